"""Compress the weights of a model in place: by module, in the words of torchao."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slimtensors.codecs.statistics import count_zeros
from slimtensors.errors import ConfigError, UnsupportedOperationError
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy, QuantizationType
from slimtensors.runtime.compressed import CompressedTensor
from slimtensors.runtime.quantized import QuantizedConfig, QuantizedTensor
from slimtensors.runtime.sparse import CsrTensor, SparseTensor
from slimtensors.tensor import Spec, as_bytes

Compression = Callable[[Tensor], CompressedTensor]
"""Turns a dense weight into a compressed one."""

Filter = Callable[[nn.Module, str], bool]
"""Chooses modules, which it gets with their names in the model."""

_ROWS_FROM = 0.9
"""Share of zeros from which kernels that skip them are faster than dense ones."""


def quantize_(model: nn.Module, config: Compression, filter_fn: Filter | None = None) -> None:
    """Compress the weights of the chosen modules, by default of every `nn.Linear`, one by one.

    Weights that two modules share stay shared. A model is changed only if all weights can be.
    """
    choose = filter_fn or is_linear
    done: dict[Tensor, nn.Parameter] = {}
    found: list[tuple[nn.Module, Tensor]] = []
    for name, module in model.named_modules():
        if not choose(module, name):
            continue
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            raise ConfigError(f"{name or 'the model'}: has no weight; choose others by filter_fn")
        if isinstance(weight, CompressedTensor):
            raise ConfigError(f"{name}: is compressed already; leave it out by filter_fn")
        found.append((module, weight))
        if weight not in done:
            try:
                done[weight] = nn.Parameter(config(weight), requires_grad=False)
            except ConfigError as error:
                raise ConfigError(f"{name}.weight: {error}") from error
    for module, weight in found:
        module.weight = done[weight]


def dequantize_(model: nn.Module, filter_fn: Filter | None = None) -> None:
    """Make the compressed weights of the chosen modules, by default of all, dense again."""
    done: dict[Tensor, nn.Parameter] = {}
    for name, module in model.named_modules():
        if filter_fn is not None and not filter_fn(module, name):
            continue
        for key, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, CompressedTensor):
                if weight not in done:
                    done[weight] = nn.Parameter(weight.dequantize(), requires_grad=False)
                setattr(module, key, done[weight])


def is_linear(module: nn.Module, name: str) -> bool:
    """Choose linear layers."""
    return isinstance(module, nn.Linear)


def is_linear_or_embedding(module: nn.Module, name: str) -> bool:
    """Choose linear layers and embeddings."""
    return isinstance(module, nn.Linear | nn.Embedding)


def is_mostly_zero(zeros: int, items: int) -> bool:
    """Tell whether kernels that skip zeros are worth it."""
    return zeros >= _ROWS_FROM * items


def int8_weight_only(group_size: int | None = None) -> Compression:
    """Hold weights as 8-bit integers with a scale per row, or per group of columns."""
    return _quantizing(_integers(8, group_size))


def int4_weight_only(group_size: int = 128, *, symmetric: bool = False) -> Compression:
    """Hold weights as 4-bit integers with a scale and a zero point per group of columns."""
    return _quantizing(_integers(4, group_size, symmetric=symmetric))


def int8_dynamic_activation_int8_weight() -> Compression:
    """Hold weights as 8-bit integers, and round inputs to such per token while the model runs."""
    token = QuantizationArgs(8, strategy=QuantizationStrategy.TOKEN, dynamic=True)
    return _quantizing(_integers(8, None), token)


def float8_weight_only() -> Compression:
    """Hold weights as 8-bit floats with a scale per row."""
    channel = QuantizationStrategy.CHANNEL
    return _quantizing(QuantizationArgs(8, QuantizationType.FLOAT, strategy=channel))


def sparse_weight() -> Compression:
    """Hold weights without their zeros; exact. From 90 % zeros on, kernels skip them too."""

    def compress(weight: Tensor) -> CompressedTensor:
        zeros = count_zeros(weight.detach().cpu().contiguous())
        if weight.dim() == 2 and is_mostly_zero(zeros.zero, zeros.items):
            return CsrTensor.of(weight)
        return SparseTensor.of(weight)

    return compress


def sparse_int8_weight() -> Compression:
    """Hold weights as 8-bit integers with a scale per row, and without their zeros."""
    quantize = int8_weight_only()

    def compress(weight: Tensor) -> CompressedTensor:
        whole = quantize(weight)
        return type(whole)(
            {**whole.parts(), "codes": SparseTensor.of(whole.parts()["codes"])},
            whole.config,
            Spec.of(weight),
        )

    return compress


def get_model_size_in_bytes(model: nn.Module) -> int:
    """Return the memory of all parameters and buffers; what is shared counts once."""
    tensors = [*model.parameters(), *model.buffers()]
    leaves = [leaf for x in tensors for leaf in _leaves(x)]
    sizes = {_place(leaf): leaf.numel() * leaf.element_size() for leaf in leaves}
    return sum(sizes.values())


def _integers(bits: int, group_size: int | None, *, symmetric: bool = True) -> QuantizationArgs:
    return QuantizationArgs(bits, symmetric=symmetric, group_size=group_size or -1)


def _quantizing(args: QuantizationArgs, inputs: QuantizationArgs | None = None) -> Compression:
    config = QuantizedConfig(args, inputs)
    return lambda weight: QuantizedTensor.quantize(weight, config)


def _leaves(x: Tensor) -> list[Tensor]:
    return [leaf for _, leaf in x.leaves()] if isinstance(x, CompressedTensor) else [x]


def _place(x: Tensor) -> object:
    """Return what two tensors have in common if they are the same memory."""
    if x.device.type == "meta" or not x.numel():
        return id(x)
    return x.device, x.data_ptr(), x.numel() * x.element_size()


def broadcast_(model: nn.Module, *, src: int = 0, group: "dist.ProcessGroup | None" = None) -> None:
    """Give every process the quantized weights of process `src`, before it makes a DDP of a model.

    DDP would flatten them into one dense vector, so it is told to leave them alone; having no
    gradients, they stay equal. What is held without zeros or coded differs in size and is refused.
    """
    names = []
    for name, weight in model.named_parameters(remove_duplicate=False):
        if not isinstance(weight, CompressedTensor):
            continue
        names.append(name)
        if not isinstance(weight, QuantizedTensor) or isinstance(weight.codes, CompressedTensor):
            raise UnsupportedOperationError(
                f"{name}: a tensor that is {weight.describe()} has another size in each process;"
                " load it from a file in every one, or dequantize() it"
            )
        for _, leaf in weight.leaves():
            dist.broadcast(as_bytes(leaf), src, group)
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, names)
