"""Stacked experts, under the names and in the pieces that checkpoints have them in."""

import re
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError
from slimtensors.quantization import formats
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.state import Quantization, parts_of


def expert_parts(model: nn.Module, state: Quantization) -> dict[str, Tensor]:
    """Return what is stored of stacked experts: for each of them, the parts of its layers."""
    stored: dict[str, Tensor] = {}
    args = state.plan.weight_args
    for weight in state.plan.weights:
        assert args is not None, "a layer without quantized weights lists none"
        how = formats.find(state.plan.format)
        codes, params = how.parse(parts_of(weight, state.kept()), args)
        for layer, rows in _rows(model, state, weight.parameter, codes.shape).items():
            own = _params_of_rows(params, rows, codes.shape[-2], args)
            parts = how.store(codes.flatten(0, 1)[rows], own, args)
            stored |= {f"{layer}.{suffix}": x for suffix, x in parts.items()}
    return stored


def expert_targets(model: nn.Module, state: Quantization) -> dict[str, str]:
    """Return what checkpoints call the layers of stacked experts, each with a pattern for all."""
    names: dict[str, str] = {}
    for weight in state.plan.weights:
        shape, _ = state.plan.dense[weight.parameter]
        for layer in _rows(model, state, weight.parameter, shape):
            stem = re.sub(r"\.\d+\.[^.]+$", "", layer)
            names[layer] = f"re:{re.escape(stem)}\\..*"
    return names


def routers(model: nn.Module) -> list[str]:
    """List the layers that choose experts, as checkpoints call them.

    They are no `Linear` in transformers, but are in vLLM, which must be told to leave them alone.
    """
    found = {
        f"{name}.weight": torch.zeros(1, 1)
        for name, module in model.named_modules()
        if _ROUTER.search(type(module).__name__) and "weight" in dict(module.named_parameters())
    }
    return [name.removesuffix(".weight") for name in _as_saved(model, found)]


_ROUTER = re.compile(r"Router|Gating|Gate(?![a-z])")


def _rows(
    model: nn.Module, state: Quantization, parameter: str, shape: Sequence[int]
) -> dict[str, Tensor]:
    """Return which rows of all experts make up each layer of the checkpoint, by its name.

    transformers knows how it cuts a stack when it saves; numbers of rows, sent through the same
    cut, tell which of them ends up where.
    """
    experts, rows = shape[:2]
    places = torch.arange(experts * rows).view(experts, rows, 1)
    name = f"{state.plan.name}.{parameter}"
    cut = _as_saved(model, {name: places.repeat(1, 1, 2)})
    if name in cut:  # as it is: checkpoints of this model have stacks as well
        return {f"{state.plan.name}.{i}.{parameter}": places[i, :, 0] for i in range(experts)}
    for piece in cut.values():
        if piece.dim() != 2 or piece.shape[1] != 2:
            raise ConfigError(f"{name}: is turned around in checkpoints; leave it unquantized")
    return {layer.removesuffix(".weight"): piece[:, 0] for layer, piece in cut.items()}


def _as_saved(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    cut: dict[str, Tensor] = revert_weight_conversion(model, state)
    return cut


def _params_of_rows(params: Params, rows: Tensor, height: int, args: QuantizationArgs) -> Params:
    """Return the params of some rows of a stack whose matrices have `height` of them."""
    first = int(rows[0])
    if args.strategy is QuantizationStrategy.BLOCK:
        step = (args.block_structure or (1, 1))[0]
        if first % height % step or (len(rows) % step and (first + len(rows)) % height):
            raise ConfigError(f"blocks of {step} rows reach over the end of a layer's rows")
        at, down = rows[::step], params.scale.shape[-2]
        chosen = at // height * down + at % height // step
    elif args.strategy is QuantizationStrategy.TENSOR:
        chosen = rows[:1] // height
    else:
        chosen = rows

    def pick(x: Tensor) -> Tensor:
        found = x.flatten(0, 1)[chosen]
        return found.flatten() if args.strategy is QuantizationStrategy.TENSOR else found

    whole = params.global_scale
    return Params(
        pick(params.scale),
        None if params.zero_point is None else pick(params.zero_point),
        None if whole is None else whole.flatten()[first // height].reshape(1),
    )
