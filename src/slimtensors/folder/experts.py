"""Stacked experts that transformers loads as linear layers if a folder is quantized.

For such modules (Llama 4), a quantized folder contains one layer per expert and projection, and a
dense one the stacks.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from slimtensors.archive import Archive
from slimtensors.archive.write import ArchiveSource, TensorSource, as_source
from slimtensors.errors import ConfigError, CorruptFileError, MissingDependencyError
from slimtensors.folder.architecture import Architecture
from slimtensors.parallel import Each
from slimtensors.tensor import Json, Spec

_EXPERT = re.compile(r"(?:^|\.)\w*experts\.\d+\.")


class Tensors(Protocol):
    """Names and shapes of the tensors of a folder."""

    @property
    def path(self) -> str:
        """Path of the folder."""

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""

    def __len__(self) -> int:
        """Return the number of tensors."""

    def spec(self, name: str) -> Spec:
        """Return dtype and shape of a tensor."""

    def tied(self) -> dict[str, str]:
        """Return the names that are stored under another one."""


@dataclass(frozen=True)
class ExpertMatrix:
    """The weight of a linear layer of one expert, and its place in a stack."""

    name: str
    stack: str
    expert: int
    rows: slice
    """Its rows in the matrix of all layers of the expert in this stack."""
    transposed: bool
    """Whether the matrices of the stack are `[inputs, outputs]`."""
    shape: tuple[int, int]

    def take_from(self, stacked: Tensor) -> Tensor:
        """Return the weight `[outputs, inputs]` from the matrix of its expert in the stack."""
        matrix = stacked.T if self.transposed else stacked
        return matrix[self.rows].contiguous()


class DividedExperts:
    """The tensors of a folder with stacks of experts divided into matrices."""

    def __init__(
        self, archive: Archive, matrices: Sequence[ExpertMatrix], architecture: Architecture
    ) -> None:
        self._archive = archive
        self.architecture = architecture
        """The model with a linear layer for each matrix."""
        self._matrices = {matrix.name: matrix for matrix in matrices}
        self._stacks: dict[str, list[ExpertMatrix]] = {}
        for matrix in matrices:
            self._stacks.setdefault(matrix.stack, []).append(matrix)
        self.path = archive.path

    def __iter__(self) -> Iterator[str]:
        """Yield the names, those of the matrices in place of their stack."""
        for name in self._archive:
            if name in self._stacks:
                yield from (matrix.name for matrix in self._stacks[name])
            else:
                yield name

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._archive) - len(self._stacks) + len(self._matrices)

    def spec(self, name: str) -> Spec:
        """Return dtype and shape of a tensor."""
        if (matrix := self._matrices.get(name)) is None:
            return self._archive.spec(name)
        return Spec(self._archive.spec(matrix.stack).dtype, matrix.shape)

    def tied(self) -> dict[str, str]:
        """Return the names that are stored under another one."""
        return self._archive.tied()

    def make_source(self, part: Archive) -> ArchiveSource:
        """Return the content of a file of the folder, with divided stacks."""
        source = as_source(part).expand_copies()
        items: list[TensorSource] = []
        for item in source.items:
            matrices = self._stacks.get(item.name)
            items += [item] if matrices is None else [self._make_item(part, x) for x in matrices]
        return ArchiveSource(items, source.tied)

    def _make_item(self, part: Archive, matrix: ExpertMatrix) -> TensorSource:
        def read(each: Each) -> Tensor:
            if part.has_rows(matrix.stack):
                stacked = part.load_rows(matrix.stack, matrix.expert, matrix.expert + 1)[0]
            else:
                stacked = part.load_one(matrix.stack, each)[matrix.expert]
            return matrix.take_from(stacked)

        return TensorSource(matrix.name, self.spec(matrix.name), read)


def divide_experts(archive: Archive, architecture: Architecture) -> DividedExperts | None:
    """Return a folder as transformers loads it quantized; None if it divides no stacks."""
    replaced = architecture.list_replaced_modules()
    matrices: list[ExpertMatrix] = []
    places = architecture.place(archive) if replaced else {}
    for module, layers in replaced.items():
        stacks = {x: archive.spec(x).shape for x, place in places.items() if place.module == module}
        if stacks:  # else missing in the files
            matrices += _find_matrices(stacks, layers)
    if not matrices:
        return None
    return DividedExperts(archive, matrices, architecture.with_modules(replaced))


def find_expert_stacks(names: Iterable[str], config: Json) -> dict[str, list[ExpertMatrix]]:
    """Return the stacks of a dense folder that weights of a quantized one belong to.

    `names` are those of the weights in the quantized folder.
    """
    stored = [name for name in names if _EXPERT.search(name)]
    if not stored:
        return {}
    try:
        architecture = Architecture.build(config)
    except (ConfigError, MissingDependencyError):
        return {}
    replaced = architecture.list_replaced_modules()
    places = architecture.with_modules(replaced).place(stored) if replaced else {}
    files = {place.parameter: name for name, place in places.items()}
    shapes = {name: spec.shape for name, spec in architecture.parameters.items()}
    found: dict[str, list[ExpertMatrix]] = {}
    for module, layers in replaced.items():
        stacks = {x: shape for x, shape in shapes.items() if x.rpartition(".")[0] == module}
        for matrix in _find_matrices(stacks, layers):
            if (file := files.get(matrix.name)) is None:
                raise CorruptFileError(f"{matrix.name} not found among the experts")
            prefix = file.removesuffix(matrix.name.removeprefix(module))
            stack = prefix + matrix.stack.removeprefix(module)
            found.setdefault(stack, []).append(replace(matrix, name=file, stack=stack))
    return found


def list_stack_patterns(architecture: Architecture) -> dict[str, tuple[list[str], bool]]:
    """Return the ends of names of stacks that a quantized folder divides.

    Map each to the ends of the names of its parts, with `*` for the expert, in the order of their
    rows, and whether its matrices are transposed.
    """
    found: dict[str, tuple[list[str], bool]] = {}
    for module, layers in architecture.list_replaced_modules().items():
        last = module.rpartition(".")[2]
        shapes = {
            name: spec.shape
            for name, spec in architecture.parameters.items()
            if name.rpartition(".")[0] == module
        }
        patterns: dict[str, tuple[list[str], bool]] = {}
        for matrix in _find_matrices(shapes, layers):
            if matrix.expert == 0:
                stack = f".{last}{matrix.stack.removeprefix(module)}"
                part = f".{last}.*{matrix.name.removeprefix(f'{module}.0')}"
                patterns.setdefault(stack, ([], matrix.transposed))[0].append(part)
        found |= patterns
    return found


def make_stack(
    name: str, matrices: Sequence[ExpertMatrix], items: Mapping[str, TensorSource]
) -> TensorSource:
    """Return the stack of all its matrices, each read from its item."""
    by_expert: dict[int, list[ExpertMatrix]] = {}
    for matrix in sorted(matrices, key=lambda x: (x.expert, x.rows.start)):
        by_expert.setdefault(matrix.expert, []).append(matrix)
    rows, columns = sum(x.shape[0] for x in by_expert[0]), matrices[0].shape[1]
    is_transposed = matrices[0].transposed
    shape = (len(by_expert), *((columns, rows) if is_transposed else (rows, columns)))

    def read(each: Each) -> Tensor:
        x = torch.empty(shape, dtype=items[matrices[0].name].spec.dtype)
        for expert, parts in by_expert.items():
            matrix = x[expert].T if is_transposed else x[expert]
            for part in parts:
                weight = items[part.name].read(each)
                assert isinstance(weight, Tensor), "stacks are made of dense weights"
                matrix[part.rows] = weight
        return x

    return TensorSource(name, Spec(items[matrices[0].name].spec.dtype, shape), read)


def _find_matrices(
    stacks: Mapping[str, tuple[int, ...]], layers: nn.Module
) -> Iterator[ExpertMatrix]:
    """Yield the layers of all experts, given the shapes of the stacks that contain them."""
    first = layers.get_submodule("0")
    linear = {name: x for name, x in first.named_children() if isinstance(x, nn.Linear)}
    parts = {name: _split_name(name.rpartition(".")[2], linear) for name in stacks}
    orders = [
        {
            is_transposed
            for is_transposed in (False, True)
            if shape == _stack_shape([linear[x] for x in parts[name]], shape[0], is_transposed)
        }
        for name, shape in stacks.items()
    ]
    # A square matrix fits both ways, but not all of an expert are square.
    possible = set.intersection({False, True}, *orders)
    if len(possible) != 1:
        raise ConfigError(f"the stacks {', '.join(stacks)} cannot be divided into linear layers")
    (is_transposed,) = possible
    for name, shape in stacks.items():
        prefix = name.rpartition(".")[0]
        for expert in range(shape[0]):
            begin = 0
            for part in parts[name]:
                rows, columns = linear[part].out_features, linear[part].in_features
                yield ExpertMatrix(
                    f"{prefix}.{expert}.{part}.weight",
                    name,
                    expert,
                    slice(begin, begin + rows),
                    is_transposed,
                    (rows, columns),
                )
                begin += rows


def _split_name(name: str, layers: Mapping[str, nn.Linear]) -> list[str]:
    """Return the layers in a stack: `gate_up_proj` contains `gate_proj`, then `up_proj`."""
    if name in layers:
        return [name]
    *stems, suffix = name.split("_")
    parts = [f"{stem}_{suffix}" for stem in stems]
    if not parts or not all(part in layers for part in parts):
        raise ConfigError(f"{name}: stack of unknown layers; expected {', '.join(layers)}")
    return parts


def _stack_shape(
    layers: Sequence[nn.Linear], experts: int, is_transposed: bool
) -> tuple[int, int, int]:
    rows, columns = sum(x.out_features for x in layers), layers[0].in_features
    return (experts, columns, rows) if is_transposed else (experts, rows, columns)
