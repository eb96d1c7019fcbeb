"""Compress the weights of a model in place, with the names of torchao."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slimtensors.codecs.statistics import count_zeros
from slimtensors.errors import ConfigError, UnsupportedOperationError
from slimtensors.runtime.compressed import CompressedTensor
from slimtensors.runtime.configs import (
    Compression,
    FqnToConfig,
    Int8WeightOnlyConfig,
    parse_config,
)
from slimtensors.runtime.quantized import QuantizedTensor
from slimtensors.runtime.sparse import CsrTensor, SparseTensor
from slimtensors.tensor import Spec, as_bytes

Filter = Callable[[nn.Module, str], bool]
"""Function that selects modules, given a module and its name in the model."""

_CSR_SPARSITY = 0.9
"""Share of zeros above which kernels that skip them are faster than dense ones."""


def quantize_(
    model: nn.Module,
    config: Compression | FqnToConfig,
    filter_fn: Filter | None = None,
    device: torch.device | str | int | None = None,
    *,
    set_inductor_config: bool = True,
) -> None:
    """Compress the weights of the selected modules in place; by default of every `nn.Linear`.

        quantize_(model, int4_weight_only(group_size=128))

    `filter_fn(module, name)` selects modules. `device` is where weights are compressed, one by one,
    and where the model is afterwards. Weights that modules share stay shared. If a weight cannot be
    compressed, the model is not changed. `set_inductor_config` has no effect: torch's settings are
    the caller's.
    """
    choose = _make_chooser(parse_config(config), filter_fn)
    compressed: dict[Tensor, nn.Parameter] = {}
    selected: list[tuple[nn.Module, Tensor]] = []
    for name, module in model.named_modules():
        compress = choose(module, name)
        if compress is None:
            continue
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            raise ConfigError(f"{name or 'the model'} has no weight; exclude it by filter_fn")
        if isinstance(weight, CompressedTensor):
            raise ConfigError(f"{name} is already compressed; exclude it by filter_fn")
        selected.append((module, weight))
        if weight not in compressed:
            source = weight if device is None else weight.detach().to(device)
            try:
                compressed[weight] = nn.Parameter(compress(source), requires_grad=False)
            except ConfigError as error:
                raise ConfigError(f"{name}.weight: {error}") from error
    for module, weight in selected:
        module.weight = compressed[weight]
    if device is not None:
        model.to(device)


def _make_chooser(
    config: Compression | FqnToConfig, filter_fn: Filter | None
) -> Callable[[nn.Module, str], Compression | None]:
    """Return a function that returns how to compress the weight of a module, or None."""
    if not isinstance(config, FqnToConfig):
        select, compress = filter_fn or is_linear, config
        return lambda module, name: compress if select(module, name) else None
    if filter_fn is not None:
        raise ConfigError("FqnToConfig selects modules by name; pass no filter_fn")

    def choose(module: nn.Module, name: str) -> Compression | None:
        key, found = config.find(name) or (None, None)
        if found is None or (key == "_default" and not is_linear(module, name)):
            return None
        parsed = parse_config(found)
        if isinstance(parsed, FqnToConfig):
            raise ConfigError(f"{key}: FqnToConfig cannot contain another one")
        return parsed

    return choose


def dequantize_(model: nn.Module, filter_fn: Filter | None = None) -> None:
    """Replace the compressed weights of the selected modules, by default all, by dense ones."""
    dense: dict[Tensor, nn.Parameter] = {}
    for name, module in model.named_modules():
        if filter_fn is not None and not filter_fn(module, name):
            continue
        for key, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, CompressedTensor):
                if weight not in dense:
                    dense[weight] = nn.Parameter(weight.dequantize(), requires_grad=False)
                setattr(module, key, dense[weight])


def is_linear(module: nn.Module, name: str) -> bool:
    """Select linear layers."""
    return isinstance(module, nn.Linear)


def is_linear_or_embedding(module: nn.Module, name: str) -> bool:
    """Select linear layers and embeddings."""
    return isinstance(module, nn.Linear | nn.Embedding)


def is_mostly_zero(zeros: int, items: int) -> bool:
    """Return True if kernels that skip zeros are faster than dense ones."""
    return zeros >= _CSR_SPARSITY * items


def sparse_weight() -> Compression:
    """Store weights without their zeros, exactly. From 90 % zeros on, kernels skip them."""

    def compress(weight: Tensor) -> CompressedTensor:
        zeros = count_zeros(weight.detach().cpu().contiguous())
        if weight.dim() == 2 and is_mostly_zero(zeros.zero, zeros.items):
            return CsrTensor.from_dense(weight)
        return SparseTensor.from_dense(weight)

    return compress


def sparse_int8_weight() -> Compression:
    """Quantize weights to 8-bit integers with a scale per row, stored without zeros."""
    quantize = Int8WeightOnlyConfig()

    def compress(weight: Tensor) -> CompressedTensor:
        quantized = quantize(weight)
        parts = quantized.parts()
        return type(quantized)(
            {**parts, "codes": SparseTensor.from_dense(parts["codes"])},
            quantized.config,
            Spec.of(weight),
        )

    return compress


def get_model_size_in_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; shared memory counts once."""
    tensors = [*model.parameters(), *model.buffers()]
    leaves = [leaf for x in tensors for leaf in _list_leaves(x)]
    sizes = {_memory_key(leaf): leaf.numel() * leaf.element_size() for leaf in leaves}
    return sum(sizes.values())


def _list_leaves(x: Tensor) -> list[Tensor]:
    return [leaf for _, leaf in x.leaves()] if isinstance(x, CompressedTensor) else [x]


def _memory_key(x: Tensor) -> object:
    """Return a key that is equal for tensors with the same memory."""
    if x.device.type == "meta" or not x.numel():
        return id(x)
    return x.device, x.data_ptr(), x.numel() * x.element_size()


def broadcast_(model: nn.Module, *, src: int = 0, group: "dist.ProcessGroup | None" = None) -> None:
    """Broadcast the quantized weights of rank `src`; call it before wrapping a model in DDP.

    DDP would flatten them into one dense vector, so it is set to ignore them; without gradients
    they stay equal. Raise `UnsupportedOperationError` for sparse or entropy-coded weights, whose
    size differs between processes.
    """
    names = []
    for name, weight in model.named_parameters(remove_duplicate=False):
        if not isinstance(weight, CompressedTensor):
            continue
        names.append(name)
        if not isinstance(weight, QuantizedTensor) or isinstance(weight.codes, CompressedTensor):
            raise UnsupportedOperationError(
                f"{name}: the size of {weight.describe()} tensors may differ between processes;"
                " load it from a file in each process, or dequantize() it"
            )
        for _, leaf in weight.leaves():
            dist.broadcast(as_bytes(leaf), src, group)
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, names)
