"""Base class of tensors that stay compressed while a model runs.

A compressed tensor has the shape and dtype of the dense one. It consists of plain tensors, its
parts, and a form: a JSON description of how to decompress them. Parts have the layout of files,
which does not depend on the machine.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from slimtensors._moved import Renamed
from slimtensors.errors import (
    CorruptFileError,
    FormatError,
    UnsupportedOperationError,
    UnsupportedVersionError,
    report_malformed,
)
from slimtensors.runtime.dispatch import DispatchedTensor
from slimtensors.tensor import QUANTIZED_DTYPES, Json, Spec, memory_extent

VERSION = 1
"""Version of the form, which is also inside files of `torch.save`."""

_kinds: dict[str, type["CompressedTensor"]] = {}


class Config(Protocol):
    """Configuration that is needed to decompress parts."""

    def to_json(self) -> Json:
        """Return the JSON form, which `CompressedTensor.parse_config` parses."""
        ...


@dataclass(frozen=True)
class NoConfig:
    """Empty configuration, for tensors that need only their parts."""

    def to_json(self) -> Json:
        """Return an empty object."""
        return {}


class CompressedTensor(DispatchedTensor):
    """A tensor stored as compressed parts. It has no gradient: `requires_grad` stays False."""

    kind: ClassVar[str]
    """Name in forms."""
    part_names: ClassVar[tuple[str, ...]]
    """Attributes that are parts."""
    optional_parts: ClassVar[frozenset[str]] = frozenset()
    """Parts that may be None, never the first."""
    nested_parts: ClassVar[frozenset[str]] = frozenset()
    """Parts that may be compressed themselves."""
    index_parts: ClassVar[frozenset[str]] = frozenset()
    """Parts with which kernels address memory without checking them again."""
    config: Any
    """A frozen `Config`."""
    is_copy: bool = False
    """Whether it is a slice with memory of its own: writing to it would not change the weight."""

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            _kinds[cls.kind] = cls

    def __new__(cls, parts: Mapping[str, Tensor], config: Config, spec: Spec) -> Self:
        """Wrap `parts` without copying them."""
        device = parts[cls.part_names[0]].device
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            spec.shape,
            strides=cls.find_strides(spec.shape, config),
            dtype=spec.dtype,
            device=device,
            requires_grad=False,
        )
        for name in cls.part_names:
            setattr(wrapper, name, parts.get(name))
        wrapper.config = config
        wrapper._origin = _ORIGIN
        return wrapper

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse other parts: `torch.load` sets every attribute that a file names."""
        own = {*self.part_names, "config", "_origin"}
        replaces = name in own and name in self.__dict__
        if name == "__dict__":  # set by torch.utils.swap_tensors, to that of another tensor
            replaces = not isinstance(value, dict) or value.get("_origin") is not _ORIGIN
        if replaces:
            raise CorruptFileError(f"{type(self).__name__}.{name} cannot be replaced")
        super().__setattr__(name, value)

    def __setstate__(self, state: object) -> None:
        """Refuse any state: all of it is in the arguments of `rebuild`."""
        raise CorruptFileError(f"{type(self).__name__} has no state to set")

    @classmethod
    def parse_config(cls, data: Json) -> Config:
        """Parse the JSON form of a config."""
        return NoConfig()

    @classmethod
    def find_strides(cls, shape: tuple[int, ...], config: Config) -> tuple[int, ...] | None:
        """Return the strides that the tensor reports; None if it is contiguous."""
        return None

    dense, forget = Renamed("decompress"), Renamed("invalidate")
    at, rows, changed = Renamed("take_row"), Renamed("take_rows"), Renamed("map_leaves")

    def decompress(self) -> Tensor:
        """Implement `dequantize` for parts that have data."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        """Return the dense tensor."""
        if self.device.type == "meta":
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return dequantize_op(*self.traced_arguments()) if self.is_traced() else self.decompress()

    def check(self) -> None:
        """Raise `CorruptFileError` if parts that were read from a file do not fit together."""
        if self.dtype in QUANTIZED_DTYPES:
            raise CorruptFileError(f"a {self.kind} tensor cannot be {self.dtype}")
        parts = self.parts()
        for name in self.part_names:
            if name not in parts and name not in self.optional_parts:
                raise CorruptFileError(f"part {name!r} is missing")
        for name, part in parts.items():
            if isinstance(part, CompressedTensor) and name not in self.nested_parts:
                raise CorruptFileError(f"part {name!r} must be a plain tensor")
            if part.device != self.device:
                raise CorruptFileError(f"part {name!r} is on {part.device}, not {self.device}")

    def invalidate(self) -> None:
        """Drop everything cached about the parts, whose data has been replaced."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the result of `F.linear`, by the fastest available kernel."""
        return functional.linear(x, self.dequantize(), bias)

    def alias(self) -> Self:
        """Return a tensor with the same parts: both change if one is copied into."""
        parts = {
            name: part.alias() if isinstance(part, CompressedTensor) else part.detach()
            for name, part in self.parts().items()
        }
        return type(self)(parts, self.config, Spec(self.dtype, tuple(self.shape)))

    def take_rows(self, index: slice | Tensor) -> Tensor:
        """Return rows: compressed for a slice if possible, dense for a tensor of indices."""
        sliced = self.slice_rows(index) if isinstance(index, slice) else None
        return self.dequantize()[index] if sliced is None else sliced

    def slice_rows(self, rows: slice) -> "CompressedTensor | None":
        """Return compressed rows, or None if only a dense tensor can contain them."""
        return None

    def slice_columns(self, columns: slice) -> "CompressedTensor | None":
        """Return compressed columns, or None if only a dense tensor can contain them."""
        return None

    @classmethod
    def concatenate(cls, tensors: Sequence[Self], dim: int) -> "CompressedTensor | None":
        """Return matrices of this class as one, or None if only a dense tensor can contain them."""
        return None

    def make_zero_rows(self, count: int) -> Self:
        """Return `count` rows of zeros, compressed, into which FSDP2 copies a shard."""
        raise UnsupportedOperationError(
            f"FSDP2 cannot shard {self.describe()} weights; dequantize() them before fully_shard"
            " (to make a dense tensor of zeros, call torch.zeros)"
        )

    def take_row(self, index: int) -> Tensor:
        """Return one row."""
        return self.take_rows(torch.tensor([index], device=self.device))[0]

    def parts(self) -> dict[str, Tensor]:
        """Return the parts that are set, by name."""
        return {name: x for name in self.part_names if (x := getattr(self, name)) is not None}

    def leaves(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every plain tensor with its dotted path."""
        for name, part in self.parts().items():
            if isinstance(part, CompressedTensor):
                yield from ((f"{name}.{path}", leaf) for path, leaf in part.leaves())
            else:
                yield name, part

    def form(self) -> Json:
        """Return the JSON description; `rebuild` restores the tensor from it and the leaves."""
        inner = {k: p.form() for k, p in self.parts().items() if isinstance(p, CompressedTensor)}
        return {
            "version": VERSION,
            "kind": self.kind,
            **Spec(self.dtype, tuple(self.shape)).to_json(),
            "config": self.config.to_json(),
            **({"inner": inner} if inner else {}),
        }

    def map_leaves(
        self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> Self:
        """Return the tensor with `function` applied to every leaf, and another outer dtype."""
        parts = {
            name: part.map_leaves(function)
            if isinstance(part, CompressedTensor)
            else function(part)
            for name, part in self.parts().items()
        }
        return type(self)(parts, self.config, Spec(dtype or self.dtype, tuple(self.shape)))

    def cast(self, dtype: torch.dtype) -> "CompressedTensor":
        """Return the tensor as `dtype`; values are rounded now or when they are used."""
        return self.map_leaves(lambda x: x, dtype)

    def is_traced(self) -> bool:
        """Return True under a compiler or in a fake tensor mode, where only shapes matter."""
        first: Tensor = self
        while isinstance(first, CompressedTensor):
            first = getattr(first, first.part_names[0])
        return torch.compiler.is_compiling() or type(first) is not Tensor or are_results_fake()

    def has_no_values(self) -> bool:
        """Return True on the meta device and where `is_traced`."""
        return self.is_meta or self.is_traced()

    def traced_arguments(self) -> tuple[str, list[Tensor]]:
        """Return the arguments that represent this tensor in custom operators."""
        names, leaves = zip(*self.leaves(), strict=True)
        return json.dumps([self.form(), names]), list(leaves)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        size = sum(leaf.nbytes for _, leaf in self.leaves())
        shape, like = tuple(self.shape), str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({self.describe()}, shape={shape}, {like}, {size} bytes)"

    def describe(self) -> str:
        """Return a short description of the encoding."""
        return self.kind

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        form, leaves = json.dumps(self.form()), dict(self.leaves())
        is_param = isinstance(self, nn.Parameter)
        if protocol <= _SAVE_PROTOCOL:
            return rebuild, (form, leaves, is_param)
        dtypes = {name: x.dtype for name, x in leaves.items() if x.dtype not in _PICKLED_DTYPES}
        leaves |= {name: leaves[name].view(_INTEGERS[dtypes[name].itemsize]) for name in dtypes}
        return rebuild_pickled, (form, leaves, dtypes, is_param)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied: Tensor = self.map_leaves(torch.clone)
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, requires_grad=False)
            memo[id(self)] = copied
        return memo[id(self)]  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return list(self.parts()), json.dumps([self.config.to_json(), str(self.dtype)])

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], context: str, size: Any, stride: object
    ) -> Self:
        config, dtype = json.loads(context)
        spec = Spec(getattr(torch, dtype.removeprefix("torch.")), tuple(size))
        return cls(parts, cls.parse_config(config), spec)


_ORIGIN = object()
"""Marks the attributes of tensors that were made here; no file can contain it."""


def rebuild(form: str, leaves: Mapping[str, Tensor], is_param: bool = False) -> Tensor:
    """Return the compressed tensor that `form` and `leaves` describe.

    `torch.load(weights_only=True)` calls this with whatever a file contains: nothing is trusted.
    """
    with report_malformed("compressed tensor", computes=True):
        x = _rebuild(json.loads(form), {name: _adopt(name, x) for name, x in leaves.items()}, "")
        for name in leaves.keys() - dict(x.leaves()).keys():
            raise CorruptFileError(f"unknown part {str(name)[:80]!r}")
        if not are_results_fake():
            x.check()
    return nn.Parameter(x, requires_grad=False) if is_param else x


_SAVE_PROTOCOL = 2
"""Protocol of `torch.save`; a higher one is a plain pickle, for which torch has fewer dtypes."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PICKLED_DTYPES = {
    *_INTEGERS.values(),
    torch.bool,
    torch.int8,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}
"""Dtypes of tensors that torch restores from plain pickles."""


def rebuild_pickled(
    form: str, leaves: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], is_param: bool
) -> Tensor:
    """Return a tensor from a plain pickle, in which some leaves are integers instead of `dtypes`.

    Nothing is trusted, as in `rebuild`.
    """
    with report_malformed("compressed tensor", computes=True):
        viewed = {name: leaves[name].view(dtype) for name, dtype in dtypes.items()}
    return rebuild(form, {**leaves, **viewed}, is_param)


def _adopt(name: str, x: Tensor) -> Tensor:
    """Return a part from a file as a contiguous tensor, separate from the one that was passed.

    A file may let `torch.load` call `set_` on the passed tensor later, and may let another tensor
    share its memory, which then must not be trusted for addresses.
    """
    if are_results_fake():
        return x
    plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided
    if not plain or x.is_quantized or x.is_conj() or x.is_neg():
        raise CorruptFileError(f"part {name!r} is not a plain tensor")
    # The second condition is for items that share memory: expanded, a few bytes fill any memory.
    if not x.is_meta and max(memory_extent(x), x.nbytes) > x.untyped_storage().nbytes():
        raise CorruptFileError(f"part {name!r} is larger than its memory")
    is_index = any(name.rpartition(".")[2] in kind.index_parts for kind in _kinds.values())
    return x.detach().clone().contiguous() if is_index else x.detach().contiguous()


def _rebuild(form: Json, leaves: Mapping[str, Tensor], prefix: str) -> CompressedTensor:
    version = form["version"]
    if type(version) is not int or version < 1:
        raise FormatError(f"invalid version {version!r}")
    if version > VERSION:
        raise UnsupportedVersionError(
            f"version {version} is newer than the supported version {VERSION}; upgrade slimtensors"
        )
    if form["kind"] not in _kinds:
        raise FormatError(f"unknown kind of compressed tensor {form['kind']!r}")
    cls = _kinds[form["kind"]]
    inner = form.get("inner", {})
    for name in inner.keys() - cls.nested_parts:
        raise FormatError(f"part {name!r} of a {cls.kind} tensor cannot be compressed")
    parts: dict[str, Tensor] = {}
    for name in cls.part_names:
        if name in inner:
            parts[name] = _rebuild(inner[name], leaves, f"{prefix}{name}.")
        elif prefix + name in leaves:
            parts[name] = leaves[prefix + name]
    if cls.part_names[0] not in parts:
        raise FormatError(f"part {cls.part_names[0]!r} is missing")
    return cls(parts, cls.parse_config(form["config"]), Spec.from_json(form))


rebuild.__module__ = rebuild_pickled.__module__ = "slimtensors.runtime"
"""In files of `torch.save`, and in the message of `torch.load` if this module is not imported."""
torch.serialization.add_safe_globals(
    [rebuild, (rebuild, "slimtensors.tensors.compressed.rebuild"), rebuild_pickled]
)


def are_results_fake() -> bool:
    """Return True if new tensors are fake, even though ours may be real."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def rebuild_traced(form: str, leaves: list[Tensor]) -> CompressedTensor:
    """Return the tensor that `CompressedTensor.traced_arguments` represents."""
    description, names = json.loads(form)
    return _rebuild(description, dict(zip(names, leaves, strict=True)), "")


def parse_traced_spec(form: str) -> Spec:
    """Return dtype and shape of the tensor that `traced_arguments` represents."""
    return Spec.from_json(json.loads(form)[0])


@torch.library.custom_op("slimtensors::dequantize", mutates_args=())
def dequantize_op(form: str, leaves: list[Tensor]) -> Tensor:
    """Return the dense tensor that `CompressedTensor.traced_arguments` represents."""
    return rebuild_traced(form, leaves).decompress()


@dequantize_op.register_fake
def _(form: str, leaves: list[Tensor]) -> Tensor:
    spec = parse_traced_spec(form)
    return leaves[0].new_empty(spec.shape, dtype=spec.dtype)
