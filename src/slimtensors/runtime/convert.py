"""Compress the weights of a model in place, with the names of torchao."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slimtensors.codecs.statistics import count_zeros
from slimtensors.errors import ConfigError, UnsupportedOperationError
from slimtensors.runtime.compressed import CompressedTensor
from slimtensors.runtime.configs import Compression, Int8WeightOnlyConfig, WeightConfig
from slimtensors.runtime.quantized import QuantizedTensor
from slimtensors.runtime.selection import Filter, FqnToConfig, parse_config, select_weights
from slimtensors.runtime.sparse import CsrTensor, SparseTensor
from slimtensors.tensor import Spec, as_bytes

_LOG = logging.getLogger(__name__)

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
    compressed, the model is not changed; 4-bit integers leave weights as they are if `group_size`
    does not divide their columns, as in torchao, with a warning. `set_inductor_config` has no
    effect: torch's settings are the caller's.
    """
    config = parse_config(config)
    compressed: dict[Tensor, nn.Parameter] = {}
    selected: list[tuple[nn.Module, str, Tensor]] = []
    for name, module, parameter, compress in select_weights(model, config, filter_fn):
        path = f"{name}.{parameter}".lstrip(".")
        weight = getattr(module, parameter, None)
        if not isinstance(weight, Tensor):
            raise ConfigError(f"{path} not found; exclude the module, for example by filter_fn")
        if isinstance(weight, CompressedTensor):
            raise ConfigError(f"{path} is already compressed; exclude the module by filter_fn")
        if isinstance(compress, WeightConfig) and compress.skips(weight):
            _LOG.warning("%s: columns are not divisible by group_size; not quantized", path)
            continue
        selected.append((module, parameter, weight))
        if weight not in compressed:
            source = weight if device is None else weight.detach().to(device)
            try:
                compressed[weight] = nn.Parameter(compress(source), requires_grad=False)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from error
    for module, parameter, weight in selected:
        setattr(module, parameter, compressed[weight])
    if isinstance(config, FqnToConfig):
        _report_unused(model, config)
    if device is not None:
        model.to(device)


def _report_unused(model: nn.Module, config: FqnToConfig) -> None:
    named = (*model.named_modules(), *model.named_parameters(remove_duplicate=False))
    paths = {name for name, _ in named}
    for key in config.list_unused(paths):
        _LOG.warning("FqnToConfig: %r selects no module or parameter", key)


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
