"""Choice of the stored form of each tensor: whole, as a difference, or rounded."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from slimtensors.archive.copies import find_copies
from slimtensors.archive.delta import estimate_bytes
from slimtensors.archive.delta_manifest import tensor_digest
from slimtensors.archive.write import ArchiveSource, TensorSource, source_from_tensors
from slimtensors.checkpoint.pretrained import Names, PretrainedModel
from slimtensors.checkpoint.profiles import FIRST, SECOND, WEIGHTS, Profile, StateTensorInfo
from slimtensors.checkpoint.tensor_entry import (
    GROUPED,
    MANTISSA,
    ROOTS,
    SAME,
    SCALABLE,
    STEPS,
    WHOLE,
    TensorEntry,
    decode_entry,
    derive_seed,
    round_mantissa,
    round_to_steps,
    take_roots,
)
from slimtensors.codecs import Huffman, IntBlocks, presets
from slimtensors.codecs.integer import find_largest
from slimtensors.codecs.plan import chain
from slimtensors.codecs.presets import Choice, Chooser
from slimtensors.codecs.residual import applicable_kinds, choose_residual, group_bytes
from slimtensors.parallel import Each, serially
from slimtensors.tensor import (
    KERNEL_FLOATS,
    Json,
    Spec,
    bitwise_equal,
    norm,
    relative_distance,
    to_cpu,
)

_DEFAULT_BITS = 7
"""Mantissa bits of values that cannot be stored in steps."""
_NOT_FINITE = "contains NaN or infinity; kept exact"


class BaseTensors(Protocol):
    """The tensors of the checkpoint from which differences are stored."""

    def __contains__(self, name: object) -> bool: ...

    def spec(self, name: str) -> Spec:
        """Return dtype and shape of a tensor."""
        ...

    def load(self, name: str, each: Each) -> Tensor:
        """Read and decode a tensor."""
        ...


@dataclass(frozen=True)
class PretrainedWeights:
    """The tensors of a pretrained model that belong to those of a state."""

    model: PretrainedModel
    names: Mapping[str, Names]
    """Tensor of the state -> tensors of the model."""
    weights: Collection[str]
    """Tensors of the state that are parameters and buffers of models."""
    by_digest: Mapping[str, str]
    """Digest -> tensor of the model with these bits, for tensors that have other names there."""
    unmatched: dict[str, None] = field(default_factory=dict)
    """Weights that the model lacks; filled as tensors are written."""

    def find(self, name: str, digest: str) -> Names | None:
        """Return the tensors of the model that are a tensor of the state, changed or not."""
        if name in self.names:
            return self.names[name]
        same = self.by_digest.get(digest)
        if same is None:
            self.unmatched[name] = None
        return None if same is None else (same,)


Decay = Callable[[StateTensorInfo], float]
"""Returns the factor by which a second moment has decayed since the base was saved."""


@dataclass(frozen=True)
class StateEncoder:
    """Encode the tensors of a state by a profile, as differences from a base if there is one."""

    tensors: Mapping[str, Tensor]
    infos: Mapping[str, StateTensorInfo]
    step: object
    """Part of the random seed, so that roundings of different steps are independent."""
    decay: Decay
    profile: Profile
    lossy_names: Collection[str]
    """Tensors that the profile may round."""
    base: BaseTensors | None
    errors: dict[str, float] = field(default_factory=dict)
    """Relative RMS error of each rounded tensor; filled as tensors are written."""
    kept_exact: dict[str, str] = field(default_factory=dict)
    """Tensors that the profile applies to but that were stored exactly, with the reason."""
    stores_copies_once: bool = False
    """Whether tensors with the same bits are stored once."""
    separate: Collection[str] = ()
    """Tensors that are stored even if they equal another one, or the base."""
    homes: dict[str, str] = field(default_factory=dict)
    """Name -> name under which the tensor is stored; filled by `build_source`."""
    pretrained: "PretrainedWeights | None" = None
    """The tensors of the pretrained model, if there is one."""

    def build_source(self, tree: Json | None) -> ArchiveSource:
        """Return the archive to write; tensors are encoded when they are read."""
        plain = source_from_tensors(self.tensors, tree)
        if self.stores_copies_once:
            exact = {
                item.name: self.tensors[item.name]
                for item in plain.items
                if not self._is_lossy(self.infos[item.name]) and item.name not in self.separate
            }
            plain = plain.with_copies(find_copies(exact, set(plain.tied.values())))
        self.homes.update({**plain.tied, **plain.copies})
        entries: dict[str, Json] = {}

        def make_item(name: str) -> TensorSource:
            entries[name] = {}  # fixes the order before threads fill the table

            def read(each: Each) -> Tensor | None:
                entry, stored = self._encode(name, each)
                entries[name] = entry.to_json()
                return stored

            return TensorSource(name, Spec.of(self.tensors[name]), read, always_blob=True)

        return ArchiveSource(
            [make_item(item.name) for item in plain.items],
            tree=tree,
            delta={
                "checkpoint": entries,
                "tied": dict(plain.tied),
                **({"copies": dict(plain.copies)} if plain.copies else {}),
            },
        )

    def _encode(self, name: str, each: Each) -> tuple[TensorEntry, Tensor | None]:
        x, info = to_cpu(self.tensors[name]).contiguous(), self.infos[name]
        spec = Spec.of(x)
        names, digest, pretrained = None, "", self.pretrained
        if pretrained is not None and name in pretrained.weights:
            digest = tensor_digest(x)
            names = pretrained.find(name, digest)
        if pretrained and names and pretrained.model.digest(names, spec, each) == digest:
            entry = TensorEntry(SAME, spec, base=digest, pretrained=names)
            return entry, torch.empty(0, dtype=torch.uint8) if name in self.separate else None
        y = self._load_base(name, spec, each)
        if pretrained and names and y is None:
            y = pretrained.model.load(names, spec, each)
            changed, stored = self._encode_changed(info, x, y, each)
            return replace(changed, pretrained=names) if changed.base else changed, stored
        is_same = y is not None and bitwise_equal(x, y)
        if y is not None and is_same and name not in self.separate:
            return TensorEntry(SAME, spec, base=tensor_digest(y)), None
        if is_same:
            return self._encode_exact(info, x, y, each)
        return self._encode_changed(info, x, y, each)

    def _encode_changed(
        self, info: StateTensorInfo, x: Tensor, y: Tensor | None, each: Each
    ) -> tuple[TensorEntry, Tensor]:
        """Encode a tensor that is not equal to the one in the base, if there is any."""
        if not self._can_round(info, x):
            return self._encode_exact(info, x, y, each)
        entry, stored, other = self._encode_rounded(info, x, y, each)
        if error := relative_distance(decode_entry(entry, stored, other, each), x):
            self.errors[info.name] = error
        return entry, stored

    def _is_lossy(self, info: StateTensorInfo) -> bool:
        """Return True if the profile rounds this tensor."""
        profile = self.profile
        settings = (
            (WEIGHTS, profile.weight_step or profile.weight_bits),
            (FIRST, profile.first_step or profile.first_bits),
            (SECOND, profile.second_bits),
        )
        is_rounded = any(setting and role in info.roles for role, setting in settings)
        return is_rounded and info.is_matrix and info.name in self.lossy_names

    def _can_round(self, info: StateTensorInfo, x: Tensor) -> bool:
        if not self._is_lossy(info) or not x.numel():
            return False
        if x.dtype not in KERNEL_FLOATS:
            self.kept_exact[info.name] = f"{x.dtype} is not rounded; kept exact"
            return False
        if not torch.isfinite(x.abs().amax()):
            self.kept_exact[info.name] = _NOT_FINITE
            return False
        return True

    def _encode_exact(
        self, info: StateTensorInfo, x: Tensor, y: Tensor | None, each: Each
    ) -> tuple[TensorEntry, Tensor]:
        """Encode all bits: as a difference, sorted by the second moment, or whole."""
        if FIRST in info.roles:
            return self._group_by_second_moment(info, x, TensorEntry(WHOLE, Spec.of(x)))
        can_decay = y is not None and SECOND in info.roles and x.dtype in SCALABLE
        times = self.decay(info) if can_decay else 1.0
        entry = TensorEntry(WHOLE, Spec.of(x), times=times)
        return self._encode_difference(info.name, x, y, entry, each)

    def _encode_difference(
        self, name: str, x: Tensor, y: Tensor | None, entry: TensorEntry, each: Each
    ) -> tuple[TensorEntry, Tensor]:
        """Encode `x`, which has the dtype of `entry`, in the smallest form."""
        if y is None or not any(applicable_kinds(Spec.of(x))):
            return replace(entry, times=1.0), x
        kind, residual = choose_residual(x, entry.predict(y), _size_estimator(name), each=each)
        if kind == "whole":
            return replace(entry, times=1.0), x
        return replace(entry, kind=kind, base=tensor_digest(y)), residual

    def _group_by_second_moment(
        self, info: StateTensorInfo, x: Tensor, entry: TensorEntry
    ) -> tuple[TensorEntry, Tensor]:
        """Reorder a first moment so that values with similar second moments are adjacent."""
        second = self._second_moment(info)
        if second is None or x.dtype not in KERNEL_FLOATS:
            return entry, x
        grouped = group_bytes(x, second.to(x.dtype).contiguous())
        estimate = _size_estimator(info.name)
        if estimate(grouped) >= estimate(x):
            return entry, x
        return replace(entry, kind=GROUPED, by=self._find_home(info.sibling(SECOND))), grouped

    def _encode_rounded(
        self, info: StateTensorInfo, x: Tensor, y: Tensor | None, each: Each
    ) -> tuple[TensorEntry, Tensor, Tensor | None]:
        """Return the entry, the stored tensor, and the other tensor that decoding needs."""
        profile, spec = self.profile, Spec.of(x)
        if FIRST in info.roles:
            return self._round_first_moment(info, x)
        if WEIGHTS in info.roles and profile.weight_step:
            if y is None:
                entry, stored = self._encode_exact(info, x, y, each)
                return entry, stored, y
            update = x.float() - y.float()
            step = profile.weight_step * norm(update) / update.numel() ** 0.5
            q = round_to_steps(update, step, self._seed(info))
            if q is not None:
                return TensorEntry(STEPS, spec, base=tensor_digest(y), step=step), q, y
        is_second = SECOND in info.roles
        bits = _limit_bits(profile.second_bits if is_second else profile.weight_bits, x.dtype)
        seed = self._seed(info) if is_second else None
        short = round_mantissa(x, bits, seed)
        times = self.decay(info) if is_second and y is not None else 1.0
        entry = TensorEntry(WHOLE, spec, bits=bits, seed=seed, times=times)
        entry, stored = self._encode_difference(info.name, short, y, entry, each)
        return entry, stored, y

    def _round_first_moment(
        self, info: StateTensorInfo, x: Tensor
    ) -> tuple[TensorEntry, Tensor, Tensor | None]:
        spec, second = Spec.of(x), self._second_moment(info)
        if self.profile.first_step and second is not None:
            unit = take_roots(second) * self.profile.first_step
            # Where the second moment is zero, so is the first; avoid 0/0.
            q = round_to_steps(x.float(), torch.where(unit > 0, unit, torch.inf), self._seed(info))
            if q is not None and not x[unit == 0].any():
                by, step = self._find_home(info.sibling(SECOND)), self.profile.first_step
                return TensorEntry(ROOTS, spec, by=by, step=step), q, second
        bits = _limit_bits(self.profile.first_bits, x.dtype)
        short = round_mantissa(x, bits, self._seed(info))
        entry = TensorEntry(WHOLE, spec, bits=bits)
        entry, stored = self._group_by_second_moment(info, short, entry)
        return entry, stored, second

    def _second_moment(self, info: StateTensorInfo) -> Tensor | None:
        """Return the second moment of the same parameter, as a reader will decode it."""
        name = info.sibling(SECOND)
        if name not in self.tensors or self.tensors[name].shape != info.spec.shape:
            return None
        x, sibling = to_cpu(self.tensors[name]).contiguous(), self.infos[name]
        if x.dtype != info.spec.dtype:
            return None
        if not self._is_lossy(sibling):
            return x
        y = self._load_base(name, Spec.of(x), serially)
        if (y is not None and bitwise_equal(x, y)) or not self._can_round(sibling, x):
            return x
        bits = _limit_bits(self.profile.second_bits, x.dtype)
        return round_mantissa(x, bits, self._seed(sibling)).to(x.dtype)

    def _find_home(self, name: str) -> str:
        return self.homes.get(name, name)

    def _seed(self, info: StateTensorInfo) -> int:
        return derive_seed(info.name, self.step)

    def _load_base(self, name: str, spec: Spec, each: Each) -> Tensor | None:
        if self.base is None or name not in self.base or self.base.spec(name) != spec:
            return None
        return self.base.load(name, each)


def _limit_bits(bits: int | None, dtype: torch.dtype) -> int:
    """Return the mantissa bits to keep: an entry never claims more than its dtype has."""
    return min(bits or _DEFAULT_BITS, MANTISSA[dtype])


def _size_estimator(name: str) -> Callable[[Tensor], float]:
    return lambda x: estimate_bytes(name, x, presets.lossless)


def measure_decay(
    base: BaseTensors | None, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> Decay:
    """Return a function that computes the decay of a second moment from the optimizer's steps."""

    def decay(info: StateTensorInfo) -> float:
        name = info.sibling("step")
        step = tensors.get(name)
        if base is None or name not in base or base.spec(name) != Spec(torch.float32, ()):
            return 1.0
        beta = _find_second_beta(state, info.owner)
        if step is None or beta is None or step.dim():
            return 1.0
        return compute_decay(beta, float(base.load(name, serially)), float(step))

    return decay


def compute_decay(beta: float, base_step: float, step: float) -> float:
    """Return the weight that a moving average still gives to its value at `base_step`."""
    return float(beta ** max(0.0, step - base_step))


def _find_second_beta(state: Mapping[str, Any], owner: str) -> float | None:
    """Return the beta2 of a parameter's group; `owner` is like `optimizer.state.3`."""
    *path, _, index = owner.split(".")
    optimizer: Any = state
    for key in path:
        if isinstance(optimizer, list) and key.isdigit() and int(key) < len(optimizer):
            optimizer = optimizer[int(key)]
        else:
            optimizer = optimizer.get(key) if isinstance(optimizer, dict) else None
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    for group in groups if isinstance(groups, list) else []:
        if not isinstance(group, dict) or int(index) not in group.get("params", ()):
            continue
        match group.get("betas"):
            case [_, float(beta), *_]:
                return beta
    return None


MAX_INT8_ERROR = 0.007
"""Relative RMS error up to which a tensor is rounded to 8-bit integers."""
_BLOCK_SIZES = (64, 32, 16, 8)


def make_int8_chooser(names: Collection[str]) -> Chooser:
    """Return a chooser that rounds the tensors of these names to int8 and keeps others exact."""

    def choose(name: str, x: Tensor) -> Choice:
        if name not in names:
            return Choice(presets.lossless(name, x).plan)
        size = norm(x)
        note = _NOT_FINITE
        if math.isfinite(size):
            for block in _BLOCK_SIZES:
                if not size or _estimate_error(x, block) < MAX_INT8_ERROR * size:
                    return Choice(chain(IntBlocks(block), q=Huffman(), scale=Huffman()))
            note = f"error of int8 would exceed {MAX_INT8_ERROR}; kept exact"
        return Choice(presets.lossless(name, x).plan, note)

    return choose


def _estimate_error(x: Tensor, block: int) -> float:
    """Return the expected norm of the rounding error with one scale per block."""
    return norm(find_largest(x, block)) / 127 * math.sqrt(block / 12)
