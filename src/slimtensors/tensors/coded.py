"""Weights held entropy-coded: decoded when they are used, best a block ahead on another thread."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slimtensors import codecs, presets
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.plan import Encoded, Plan, decode, encode
from slimtensors.presets import Choice
from slimtensors.spec import Json, Parts, Spec
from slimtensors.tensors.compressed import CompressedTensor
from slimtensors.tensors.convert import Compression

_MOST_LEAVES = 16


@dataclass(frozen=True)
class CodedConfig:
    """The tree of codecs, with a number for each plain tensor."""

    tree: Json

    def to_json(self) -> Json:
        """Return the JSON form."""
        return {"tree": self.tree}


class CodedTensor(CompressedTensor):
    """A tensor in the form that some plan gives it; lossless if the plan is."""

    kind = "coded"
    part_names = tuple(f"leaf{i}" for i in range(_MOST_LEAVES))
    config: CodedConfig
    _ahead: "Future[Tensor] | None" = None

    @classmethod
    def parse_config(cls, data: Json) -> CodedConfig:
        """Read the JSON form."""
        return CodedConfig(data["tree"])

    @classmethod
    def of(cls, x: Encoded) -> Self:
        """Hold what a plan made."""
        leaves = [leaf for _, leaf in x.leaves()]
        if not 0 < len(leaves) <= _MOST_LEAVES:
            raise ConfigError(f"a plan of {len(leaves)} parts cannot be held in memory: {x.plan}")
        numbers = iter(range(len(leaves)))
        parts = dict(zip(cls.part_names, leaves, strict=False))
        return cls(parts, CodedConfig(_tree(x, numbers)), x.spec)

    def encoded(self) -> Encoded:
        """Return what the plan made."""
        try:
            return _encoded(self.config.tree, self.parts())
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(f"not a tree of codecs: {error!r}") from error

    def dense(self) -> Tensor:
        """Decode, or take what was decoded ahead."""
        ahead, self._ahead = self._ahead, None
        return ahead.result() if ahead is not None else self._decoded()

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Begin to decode on another thread, for the next use."""
        if self._ahead is None:
            self._ahead = pool.submit(self._decoded)

    def _decoded(self) -> Tensor:
        return decode(self.encoded()).to(self.device, self.dtype)

    def rows(self, index: slice | Tensor) -> Tensor:
        """Decode all, to return some rows."""
        return self.dequantize()[index]

    def describe(self) -> str:
        """Say in a few words how the numbers are held."""
        return str(self.encoded().plan)


def coded_weight(preset: str | Plan = "lossless") -> Compression:
    """Hold weights as a preset would store them; those that it does not make smaller as they are.

    `quantize_(model, coded_weight())` needs `decode_ahead(blocks)` to be fast.
    """
    choose = presets.find(preset)

    def compress(weight: Tensor) -> CompressedTensor:
        x = weight.detach().cpu().contiguous()
        choice = choose("weight", x)
        plan = choice.plan if isinstance(choice, Choice) else choice
        return CodedTensor.of(encode(plan or Plan(codecs.Dense()), x))

    return compress


def decode_ahead(blocks: Iterable[nn.Module]) -> Sequence[RemovableHandle]:
    """While a block runs, decode the weights of the next one on another thread.

    Two blocks are dense at a time. Returns the hooks, whose `remove()` ends it.
    """
    order = list(blocks)
    pool = ThreadPoolExecutor(1, "slimtensors-ahead")

    def starting(following: nn.Module) -> Any:
        def start(module: nn.Module, given: object) -> None:
            for weight in following.parameters():
                if isinstance(weight, CodedTensor):
                    weight.start(pool)

        return start

    return [
        block.register_forward_pre_hook(starting(following)) for block, following in pairwise(order)
    ]


def _tree(x: Encoded, numbers: Iterable[int]) -> Json:
    parts = {
        name: _tree(part, numbers) if isinstance(part, Encoded) else next(iter(numbers))
        for name, part in x.parts.items()
    }
    return {**x.spec.to_json(), "codec": codecs.to_json(x.codec), "parts": parts}


def _encoded(tree: Json, leaves: Parts) -> Encoded:
    parts = {
        name: _encoded(part, leaves) if isinstance(part, dict) else leaves[f"leaf{part}"]
        for name, part in tree["parts"].items()
    }
    return Encoded(codecs.from_json(tree["codec"]), Spec.from_json(tree), parts)
