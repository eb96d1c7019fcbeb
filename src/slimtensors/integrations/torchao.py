"""torchao's quantized tensors: taken apart into numbers, and made of numbers again.

Its classes come and go with kernels, so files hold numbers only: `save(from_torchao(state), path)`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError, MissingDependencyError, UnsupportedTensorError
from slimtensors.quantization import kernels
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy, QuantizationType
from slimtensors.runtime import QuantizedConfig, QuantizedTensor
from slimtensors.runtime.quantized import choose_kind

_TOKEN = QuantizationStrategy.TOKEN


def from_torchao(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with a `QuantizedTensor` for each tensor of torchao's, not copied.

    Codes of less than eight bits, of which torchao has one per byte, are packed.
    """
    return {name: _taken_apart(name, x) if _is_torchao(x) else x for name, x in state.items()}


def to_torchao(model: nn.Module) -> nn.Module:
    """Replace each `QuantizedTensor` among a model's parameters by torchao's; return the model."""
    done: dict[Tensor, nn.Parameter] = {}
    for path, module in model.named_modules():
        for key, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, QuantizedTensor):
                if weight not in done:
                    made = _put_together(f"{path}.{key}", weight)
                    done[weight] = nn.Parameter(made, requires_grad=False)
                setattr(module, key, done[weight])
    return model


def _is_torchao(x: Tensor) -> bool:
    return type(x).__module__.partition(".")[0] == "torchao"


def _taken_apart(name: str, given: Tensor) -> QuantizedTensor:
    x: Any = given
    match type(x).__name__:
        case "Int8Tensor":
            bits, kind = 8, QuantizationType.INT
            inputs = None if x.act_quant_kwargs is None else _of_rows(name, x.act_quant_kwargs)
        case "Float8Tensor" if x.qdata.dtype is torch.float8_e4m3fn:
            bits, kind, inputs = 8, QuantizationType.FLOAT, None
            _refuse(name, x, ("act_quant_kwargs",))
        case "IntxUnpackedToInt8Tensor":
            bits, kind = int(str(x.target_dtype).removeprefix("torch.int")), QuantizationType.INT
            inputs = _named(name, x.activation_quantization)
        case other:
            raise UnsupportedTensorError(
                f"{name}: a {other} of torchao holds what only its kernel reads; dequantize it"
            )
    _refuse(name, x, ("act_quant_scale", "act_quant_zero_point", "act_pre_scale"))
    zero = getattr(x, "zero_point", None)
    zero = None if zero is None or not zero.any() else zero
    args = QuantizationArgs(
        bits,
        kind,
        symmetric=zero is None,
        group_size=_group_size(name, x.block_size, tuple(x.shape)),
        zp_dtype=None if zero is None or zero.dtype is torch.int8 else zero.dtype,
    )
    scale = x.scale.reshape(1) if args.strategy is QuantizationStrategy.TENSOR else x.scale
    codes = kernels.pack_codes(x.qdata, args, choose_kind(args))
    return QuantizedTensor.from_codes(
        codes,
        Params(scale, zero),
        QuantizedConfig(args, inputs),
        shape=tuple(x.shape),
        dtype=x.dtype,
    )


def _group_size(name: str, block: Sequence[int], shape: tuple[int, ...]) -> int | None:
    if tuple(block) == shape:
        return None
    if len(shape) != 2 or block[0] != 1:
        raise UnsupportedTensorError(f"{name}: has blocks of {tuple(block)} in {shape}")
    return -1 if block[1] == shape[1] else int(block[1])


def _refuse(name: str, x: Any, attributes: Sequence[str]) -> None:
    for attribute in attributes:
        if getattr(x, attribute, None) is not None:
            raise UnsupportedTensorError(f"{name}: has {attribute}, which we cannot keep")


def _of_rows(name: str, asked: Any) -> QuantizationArgs:
    if type(asked.granularity).__name__ != "PerRow" or asked.mapping_type.name != "SYMMETRIC":
        raise UnsupportedTensorError(f"{name}: quantizes inputs by {asked}, which we cannot keep")
    return QuantizationArgs(8, strategy=_TOKEN, dynamic=True)


def _named(name: str, asked: str | None) -> QuantizationArgs | None:
    if asked is None:
        return None
    if asked != "int8_asym_per_token":
        raise UnsupportedTensorError(f"{name}: quantizes inputs by {asked}, which we cannot keep")
    return QuantizationArgs(8, symmetric=False, strategy=_TOKEN, dynamic=True)


def _put_together(name: str, x: QuantizedTensor) -> Tensor:
    try:
        from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor
    except ImportError as error:
        raise MissingDependencyError("torchao", "torchao") from error
    args, inputs, shape = x.config.args, x.config.inputs, tuple(x.shape)
    blocks = {
        QuantizationStrategy.CHANNEL: [1, shape[-1]],
        QuantizationStrategy.GROUP: [1, args.group_size or 0],
    }
    block = blocks.get(args.strategy) if args.strategy else None
    if block is None or x.g_idx is not None or args.dtype is torch.uint8:
        raise ConfigError(f"{name}: torchao has no {x.describe()}; dequantize it")
    if args.type is QuantizationType.FLOAT:
        _without_inputs(name, inputs)
        return Float8Tensor(x.plain_codes(), x.scale, block, dtype=x.dtype)  # type: ignore[no-any-return]
    codes = kernels.unpack_codes(x.plain_codes(), args, choose_kind(args), shape[-1])
    zero = torch.zeros_like(x.scale) if x.zero_point is None else x.zero_point
    zero = zero.to(args.zp_dtype or torch.int8)
    if args.num_bits == 8 and args.strategy is QuantizationStrategy.CHANNEL:
        return Int8Tensor(  # type: ignore[no-any-return]
            codes, x.scale, block, x.dtype, zero, act_quant_kwargs=_rows_of(name, inputs)
        )
    asked = None if inputs is None or inputs.symmetric else "int8_asym_per_token"
    if asked is None:
        _without_inputs(name, inputs)
    target = getattr(torch, f"int{args.num_bits}")
    return IntxUnpackedToInt8Tensor(codes, x.scale, zero, target, tuple(block), x.dtype, asked)  # type: ignore[no-any-return]


def _rows_of(name: str, inputs: QuantizationArgs | None) -> Any:
    if inputs is None:
        return None
    if not inputs.symmetric:
        _without_inputs(name, inputs)
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs

    return QuantizeTensorToInt8Kwargs(PerRow())


def _without_inputs(name: str, inputs: QuantizationArgs | None) -> None:
    if inputs is not None:
        raise ConfigError(f"{name}: torchao does not quantize inputs of such weights this way")
