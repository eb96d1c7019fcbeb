"""Apply recipes to a model and check the result from outside.

The inputs of layers are recorded by hooks on the finished model, not by the library.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from architectures import catalogue
from strategies import same_bits
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from slimtensors.errors import SlimError
from slimtensors.folder.config_json import COMPRESSED_TENSORS
from slimtensors.layerwise.check import collect_hessians
from slimtensors.layerwise.inputs import collect_layers
from slimtensors.recipe import GPTQ, Quantize, SparseGPT, Wanda
from slimtensors.transformers import oneshot
from slimtensors.transformers.auto import load_pretrained

KINDS = ("causal", "masked", "seq2seq", "image", "vision-language", "speech")
"""Kinds of models that are checked."""

GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}}
RECIPES: dict[str, list[Any]] = {
    "2:4 + GPTQ": [SparseGPT(mask_structure="2:4"), GPTQ(config_groups=GROUPS)],
    "GPTQ": [GPTQ(config_groups=GROUPS)],
    "Wanda": [Wanda(0.5)],
}
"""Check -> recipe; the dialect is slim for the first one, and compressed-tensors for GPTQ alone."""

BATCHES, ROWS = 3, 4
_MAX_COLUMNS = 8192
"""Hessians of wider layers need too much memory for a sweep."""
_MAX_HESSIAN_ERROR, _MAX_REPEATED_ERROR = 1e-3, 0.5

Model = Any
Batch = dict[str, Any]
Build = Callable[[], Model]


@dataclass
class Outcome:
    """Result of a recipe on a model."""

    result: str
    """`right`, `refused` before any work, or `wrong`."""
    reasons: list[str] = field(default_factory=list)
    changed: int = 0
    """Number of layers that were changed."""
    calibrated: int = 0
    """Number of changed layers whose inputs were used."""
    untouched: int = 0
    """Number of linear layers that were not changed."""


def list_types(kind: str) -> list[str]:
    """Return the model types that have a model of a kind."""
    return list(getattr(modeling_auto, f"{catalogue.KINDS[kind]}_NAMES"))


def check_recipes(
    model_type: str, folder: Path, names: Sequence[str] = tuple(RECIPES)
) -> dict[str, dict[str, Any]]:
    """Return the outcome of each recipe for all kinds of models of a type, as JSON.

    It is empty if there is no model that runs.
    """
    found: dict[str, dict[str, Outcome]] = {}
    for kind in (kind for kind in KINDS if names and model_type in list_types(kind)):
        try:
            found[kind] = check_model(model_type, kind, folder / kind, names)
        except catalogue.CannotBuildError:
            continue
    return {name: _combine({kind: x[name] for kind, x in found.items()}) for name in names if found}


def _combine(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Return the worst result of several kinds of models, and all reasons."""
    results = [outcome.result for outcome in outcomes.values()]
    worst = next(result for result in ("wrong", "refused", "right") if result in results)
    reasons = [f"{kind}: {x}" for kind, outcome in outcomes.items() for x in outcome.reasons]
    combined = {"result": worst, "kinds": list(outcomes)}
    return combined | ({"reasons": reasons} if reasons else {})


def check_model(
    model_type: str, kind: str, folder: Path, names: Iterable[str]
) -> dict[str, Outcome]:
    """Apply recipes to a tiny model; raise CannotBuildError if it cannot run."""
    tiny = catalogue.find(model_type, kind)
    _check_usable(tiny, folder / "dense")
    batches = make_batches(tiny.build())
    outcomes = {}
    for name in names:
        try:
            outcome = check_recipe(tiny.build, batches, name, folder / name)
            has_hessians = name == "GPTQ" and outcome.result == "right"
            if has_hessians and (wrong := check_hessians(tiny.build, batches)):
                outcome = Outcome("wrong", wrong)
        except Exception as error:
            outcome = Outcome("wrong", [f"{type(error).__name__}: {error}"])
        outcomes[name] = outcome
    return outcomes


def _check_usable(tiny: catalogue.Tiny, folder: Path) -> None:
    """Raise CannotBuildError if a model is too wide, or transformers cannot save and load it."""
    model = tiny.build()
    layers = collect_layers(model)
    widest = max((layers[name].matrix.shape[-1] for name in list_linears(model)), default=0)
    if widest > _MAX_COLUMNS:
        raise catalogue.CannotBuildError(f"{tiny.model_type}: a layer has {widest} columns")
    try:
        model.save_pretrained(folder)
        _, info = tiny.model_class.from_pretrained(folder, output_loading_info=True)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = "missing keys" if info["missing_keys"] else ""
    if reason:
        raise catalogue.CannotBuildError(f"{tiny.model_type}: not loaded by transformers: {reason}")


def make_batches(model: Model) -> list[Batch]:
    """Return calibration data for a model; raise CannotBuildError if its inputs are unknown."""
    batches = [catalogue.make_inputs(model, rows=ROWS, seed=seed) for seed in range(BATCHES)]
    return [_add_image(model, batch, seed) for seed, batch in enumerate(batches)]


def check_recipe(build: Build, batches: Sequence[Batch], name: str, folder: Path) -> Outcome:
    """Apply a recipe to a new model, save it and load it again."""
    model = build()
    before = copy_tensors(model)
    calls = count_calls(model)
    try:
        _, report = oneshot(model, RECIPES[name], batches, output_dir=folder)
    except SlimError as error:
        return _describe_refusal(error, len(calls), before, model)
    layers = collect_layers(model)
    changed = {layer.name for step in report.steps for layer in step.layers}
    untouched = [name for name in list_linears(model) if name not in changed]
    inputs = record_inputs(model, batches)
    reasons = [
        *_check_zeros(report, layers, before),
        *_check_tensors(model, before, [layers[name].parameter for name in changed]),
        *_check_calibrated(report, layers, inputs),
        *_check_named(report, untouched),
        *_check_reloaded(model, folder, before),
    ]
    if len(report.steps) > 1:
        reasons += _check_errors(build, batches, RECIPES[name][0], model, inputs)
    return Outcome(
        "wrong" if reasons else "right",
        reasons,
        len(changed),
        sum(layer.tokens > 0 for layer in report.steps[-1].layers),
        len(untouched),
    )


def check_hessians(build: Build, batches: Sequence[Batch]) -> list[str]:
    """Quantize a new model and return the layers with other Hessians than in the finished model.

    A layer that runs several times per batch has inputs that depend on its own new weight, so that
    only a rough agreement is required.
    """
    model = build()
    with collect_hessians() as used:
        oneshot(model, RECIPES["GPTQ"], batches)
    true = record_inputs(model, batches)
    wrong = []
    for (name, _), hessian in used.items():
        inputs = true.get(name)
        if inputs is None or inputs.hessian.max() < torch.finfo(torch.float32).tiny:
            continue  # stacked experts, which hooks do not see, or numbers that are rounded to 0
        limit = _MAX_HESSIAN_ERROR if inputs.calls <= len(batches) else _MAX_REPEATED_ERROR
        if (error := _compare_hessians(hessian.double(), inputs.hessian)) > limit:
            wrong.append(f"{name}: Hessian is off by {error:.1%}")
    return wrong


@dataclass
class Inputs:
    """Inputs of a layer in all batches."""

    hessian: Tensor | float = 0.0
    """Sum of their products."""
    calls: int = 0


def copy_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers, under all of their names."""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: x.detach().clone() for name, x in tensors}


def count_calls(model: nn.Module) -> list[str]:
    """Return a list that grows with every call of a module."""
    calls: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: calls.append(name))
    return calls


def list_linears(model: nn.Module) -> list[str]:
    """Return the names of all linear layers, with `Conv1D` and stacked experts."""
    return [
        name
        for name, layer in collect_layers(model).items()
        if isinstance(layer.module, nn.Linear) or layer.weight.transposed or layer.matrix.dim() == 3
    ]


@torch.no_grad()
def record_inputs(model: nn.Module, batches: Sequence[Batch]) -> dict[str, Inputs]:
    """Run a model and return the inputs of each linear layer that runs."""
    found: dict[str, Inputs] = {}
    hooks = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D":
            continue

        def hook(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            rows = x.detach().reshape(-1, x.shape[-1]).double()
            inputs = found.setdefault(name, Inputs())
            inputs.hessian += rows.T @ rows
            inputs.calls += 1

        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    for batch in batches:
        model(**batch | ({"use_cache": False} if has_cache else {}))  # FSMT has no mask with it
    for each in hooks:
        each.remove()
    return found


def _add_image(model: Model, batch: Batch, seed: int) -> Batch:
    """Return a batch of texts with an image in each, if the model runs on that."""
    token = getattr(model.config, "image_token_id", getattr(model.config, "image_token_index", 0))
    accepted = inspect.signature(model.forward).parameters
    if not token or "pixel_values" in batch or not {"pixel_values", "input_ids"} <= {*accepted}:
        return batch
    torch.manual_seed(seed)
    pixels = torch.randn(ROWS, 3, 32, 32)
    text = batch["input_ids"].masked_fill(batch["input_ids"] == token, 1)

    def run(count: int) -> Batch:
        tokens = torch.cat([torch.full((ROWS, count), token), text], 1)
        mask = torch.ones_like(tokens)
        inputs = {**batch, "input_ids": tokens, "attention_mask": mask, "pixel_values": pixels}
        with torch.no_grad():
            model(**inputs)
        return inputs

    try:
        run(0)
    except Exception as error:
        # The message contains the number of image features, or of their values.
        features = int(found[1]) if (found := re.search(r"features:? (\d+)", str(error))) else 0
    else:
        return batch
    width = model.get_input_embeddings().embedding_dim
    for count in {features // ROWS, features // ROWS // width} - {0}:
        try:
            return run(count)
        except Exception:
            continue
    return batch


def _describe_refusal(
    error: SlimError, calls: int, before: Mapping[str, Tensor], model: nn.Module
) -> Outcome:
    text = f"{type(error).__name__}: {error}"
    if calls:
        return Outcome("wrong", [f"refused after {calls} calls of modules: {text}"])
    after = copy_tensors(model)
    if any(not same_bits(x, after[name]) for name, x in before.items()):
        return Outcome("wrong", [f"refused after weights were changed: {text}"])
    return Outcome("refused", [text])


def _check_zeros(report: Any, layers: Mapping[str, Any], before: Mapping[str, Tensor]) -> list[str]:
    """Check that half of the weights are zeros: of each four adjacent ones, or of each matrix.

    Zeros of the source count, and so do those of rounding. Half of an odd row is rounded.
    """
    wrong = []
    for step in report.steps:
        for name in (layer.name for layer in step.layers if step.structure is not None):
            layer = layers[name]
            source = before[name] if name in before else before[f"{name}.weight"]
            matrices = layer.weight.to_matrix(source)
            rows, columns = matrices.shape[-2:]
            size, slack = (4, 0) if step.structure == "2:4" else (rows * columns, rows)
            zeros = layer.matrix.reshape(-1, size).eq(0).sum(1)
            original = matrices.reshape(-1, size).eq(0).sum(1)
            is_right = zeros >= original.clamp(min=size // 2) - slack
            if len(report.steps) == 1:
                is_right &= zeros <= original.clamp(min=size // 2) + slack
            if not is_right.all():
                wrong.append(name)
    return [f"wrong zeros: {', '.join(wrong)}"] if wrong else []


def _check_tensors(
    model: nn.Module, before: Mapping[str, Tensor], changed: Sequence[nn.Parameter]
) -> list[str]:
    """Check that the reported layers changed, and nothing else."""
    after = copy_tensors(model)
    targets = {id(x) for x in changed}
    names = {n for n, x in model.named_parameters(remove_duplicate=False) if id(x) in targets}
    different = {name for name, x in before.items() if not same_bits(x, after[name])}
    reasons = []
    if wrong := sorted(different - names):
        reasons.append(f"changed, but not by a modifier: {', '.join(wrong)}")
    if wrong := sorted(name for name in names - different if before[name].any()):
        reasons.append(f"reported as changed, but unchanged: {', '.join(wrong)}")
    if wrong := sorted(n for n in different if not after[n].isfinite().all()):
        reasons.append(f"not finite: {', '.join(wrong)}")
    return reasons


def _check_calibrated(
    report: Any, layers: Mapping[str, Any], inputs: Mapping[str, Inputs]
) -> list[str]:
    """Check that each layer that runs was changed with its inputs.

    A layer that is no plain product may be named among those without inputs instead.
    """
    reasons = []
    for step in report.steps:
        blind = [
            layer.name
            for layer in step.layers
            if not layer.tokens and layer.name in inputs and inputs[layer.name].hessian.any()
        ]
        named = " ".join(step.notes)
        wrong = [
            name
            for name in blind
            if name not in named or type(layers[name].module).forward is nn.Linear.forward
        ]
        if wrong:
            reasons.append(
                f"{step.modifier}: {len(wrong)} of {len(step.layers)} layers run but were changed"
                f" without inputs: {_list_some(wrong)}"
            )
    return reasons


def _check_named(report: Any, untouched: Sequence[str]) -> list[str]:
    """Check that every linear layer that was not changed is reported with a reason."""
    named = {layer.name for layer in report.unchanged if layer.reason}
    missing = [name for name in untouched if name not in named]
    return [f"untouched and not named: {', '.join(missing)}"] if missing else []


def _check_reloaded(model: Model, folder: Path, names: Iterable[str]) -> list[str]:
    """Check that the saved model is loaded with the named tensors of the model in memory."""
    section = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    options = {"output_loading_info": True}
    try:
        if section.get("quant_method") == COMPRESSED_TENSORS:
            loaded, info = load_pretrained(type(model), folder, **options)
        else:
            loaded, info = type(model).from_pretrained(folder, **options)
    except Exception as error:
        return [f"does not reload: {type(error).__name__}: {' '.join(str(error).split())[:300]}"]
    reasons = [f"{key} after reloading: {_list_some(x)}" for key, x in info.items() if x]
    found, stored = copy_tensors(loaded), model.state_dict()
    expected = {name: stored[name] for name in names if name in stored}
    if missing := [name for name in expected if name not in found]:
        reasons.append(f"missing after reloading: {_list_some(missing)}")
    if wrong := [n for n, x in expected.items() if n in found and not same_bits(x, found[n])]:
        reasons.append(f"{len(wrong)} tensors differ after reloading: {_list_some(wrong)}")
    return reasons


def _check_errors(
    build: Build,
    batches: Sequence[Batch],
    pruning: Any,
    model: nn.Module,
    inputs: Mapping[str, Inputs],
) -> list[str]:
    """Check that GPTQ's error is not above that of rounding the same pruned weights."""
    pruned, _ = oneshot(build(), [pruning], batches)
    rounded, report = oneshot(deepcopy(pruned), [Quantize(config_groups=GROUPS)])
    before, nearest, after = map(collect_layers, (pruned, rounded, model))
    total = nearest_total = 0.0
    for name in (layer.name for layer in report.steps[0].layers if layer.name in inputs):
        weight, hessian = before[name].matrix.double(), inputs[name].hessian
        if (size := _measure(weight, hessian)) > 0:
            total += _measure(after[name].matrix.double() - weight, hessian) / size
            nearest_total += _measure(nearest[name].matrix.double() - weight, hessian) / size
    if total > nearest_total:
        return [f"the error of GPTQ is {total:.4g}, and that of rounding {nearest_total:.4g}"]
    return []


def _measure(weight: Tensor, hessian: Tensor) -> float:
    return float(((weight @ hessian) * weight).sum())


def _compare_hessians(found: Tensor, true: Tensor) -> float:
    """Return the relative difference of two Hessians that may have different scales."""
    found, true = found / found.diagonal().mean(), true / true.diagonal().mean()
    return float((found - true).norm() / true.norm())


def _list_some(names: Sequence[Any], limit: int = 4) -> str:
    some = sorted(map(str, names))
    return ", ".join(some[:limit]) + (f" and {len(some) - limit} more" if len(some) > limit else "")
