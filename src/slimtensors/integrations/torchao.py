"""Convert quantized tensors of torchao to `QuantizedTensor` and back.

Classes of torchao change with its kernels, so files contain only codes, scales and zero points.
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
    """Return a state dict with each quantized tensor of torchao as a `QuantizedTensor`.

    Tensors are not copied, except codes of less than eight bits, which are packed: torchao stores
    one per byte.

    Example:
        >>> import slimtensors
        >>> from slimtensors.integrations.torchao import from_torchao
        >>> slimtensors.save(from_torchao(model.state_dict()), "model.safetensors")
    """
    return {name: _to_quantized(name, x) if _is_torchao(x) else x for name, x in state.items()}


def to_torchao(model: nn.Module) -> nn.Module:
    """Replace each `QuantizedTensor` parameter of a model by a tensor of torchao; return the model.

    Example:
        >>> import slimtensors
        >>> state = slimtensors.load("model.safetensors", run_compressed=True)
        >>> model.load_state_dict(state, assign=True)
        >>> to_torchao(model)
    """
    converted: dict[Tensor, nn.Parameter] = {}
    for path, module in model.named_modules():
        for key, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, QuantizedTensor):
                if weight not in converted:
                    tensor = _to_torchao_tensor(f"{path}.{key}", weight)
                    converted[weight] = nn.Parameter(tensor, requires_grad=False)
                setattr(module, key, converted[weight])
    return model


def _is_torchao(x: Tensor) -> bool:
    return type(x).__module__.partition(".")[0] == "torchao"


def _to_quantized(name: str, tensor: Tensor) -> QuantizedTensor:
    x: Any = tensor
    match type(x).__name__:
        case "Int8Tensor":
            bits, kind = 8, QuantizationType.INT
            inputs = (
                None if x.act_quant_kwargs is None else _parse_row_args(name, x.act_quant_kwargs)
            )
        case "Float8Tensor" if x.qdata.dtype is torch.float8_e4m3fn:
            bits, kind, inputs = 8, QuantizationType.FLOAT, None
            _check_unset(name, x, ("act_quant_kwargs",))
        case "IntxUnpackedToInt8Tensor":
            bits, kind = int(str(x.target_dtype).removeprefix("torch.int")), QuantizationType.INT
            inputs = _parse_input_method(name, x.activation_quantization)
        case other:
            raise UnsupportedTensorError(
                f"{name}: {other} of torchao is packed for one kernel; dequantize it first"
            )
    _check_unset(name, x, ("act_quant_scale", "act_quant_zero_point", "act_pre_scale"))
    zero = getattr(x, "zero_point", None)
    zero = None if zero is None or not zero.any() else zero
    args = QuantizationArgs(
        bits,
        kind,
        symmetric=zero is None,
        group_size=_find_group_size(name, x.block_size, tuple(x.shape)),
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


def _find_group_size(name: str, block: Sequence[int], shape: tuple[int, ...]) -> int | None:
    if tuple(block) == shape:
        return None
    if len(shape) != 2 or block[0] != 1:
        raise UnsupportedTensorError(
            f"{name}: blocks of {tuple(block)} in a tensor of {shape} are not supported"
        )
    return -1 if block[1] == shape[1] else int(block[1])


def _check_unset(name: str, x: Any, attributes: Sequence[str]) -> None:
    for attribute in attributes:
        if getattr(x, attribute, None) is not None:
            raise UnsupportedTensorError(f"{name}: {attribute} is not supported")


def _parse_row_args(name: str, kwargs: Any) -> QuantizationArgs:
    if type(kwargs.granularity).__name__ != "PerRow" or kwargs.mapping_type.name != "SYMMETRIC":
        raise UnsupportedTensorError(f"{name}: unsupported quantization of inputs: {kwargs}")
    return QuantizationArgs(8, strategy=_TOKEN, dynamic=True)


def _parse_input_method(name: str, method: str | None) -> QuantizationArgs | None:
    if method is None:
        return None
    if method != "int8_asym_per_token":
        raise UnsupportedTensorError(f"{name}: unsupported quantization of inputs: {method}")
    return QuantizationArgs(8, symmetric=False, strategy=_TOKEN, dynamic=True)


def _to_torchao_tensor(name: str, x: QuantizedTensor) -> Tensor:
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
    shifted = args.type is QuantizationType.FLOAT and not args.symmetric
    if block is None or x.g_idx is not None or args.dtype is torch.uint8 or shifted:
        raise ConfigError(f"{name}: torchao does not support {x.describe()}; dequantize it first")
    if args.type is QuantizationType.FLOAT:
        _check_no_inputs(name, inputs)
        return Float8Tensor(x.plain_codes(), x.scale, block, dtype=x.dtype)  # type: ignore[no-any-return]
    codes = kernels.unpack_codes(x.plain_codes(), args, choose_kind(args), shape[-1])
    zero = torch.zeros_like(x.scale) if x.zero_point is None else x.zero_point
    zero = zero.to(args.zp_dtype or torch.int8)
    if args.num_bits == 8 and args.strategy is QuantizationStrategy.CHANNEL:
        return Int8Tensor(  # type: ignore[no-any-return]
            codes, x.scale, block, x.dtype, zero, act_quant_kwargs=_make_row_kwargs(name, inputs)
        )
    method = None if inputs is None or inputs.symmetric else "int8_asym_per_token"
    if method is None:
        _check_no_inputs(name, inputs)
    target = getattr(torch, f"int{args.num_bits}")
    return IntxUnpackedToInt8Tensor(codes, x.scale, zero, target, tuple(block), x.dtype, method)  # type: ignore[no-any-return]


def _make_row_kwargs(name: str, inputs: QuantizationArgs | None) -> Any:
    if inputs is None:
        return None
    if not inputs.symmetric:
        _check_no_inputs(name, inputs)
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs

    return QuantizeTensorToInt8Kwargs(PerRow())


def _check_no_inputs(name: str, inputs: QuantizationArgs | None) -> None:
    if inputs is not None:
        raise ConfigError(
            f"{name}: torchao does not support this quantization of inputs for such weights"
        )
