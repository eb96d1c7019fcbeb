"""Training states: build one from live objects, check it, and restore it."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from slimtensors.checkpoint.names import fit_model_state, name_parameters, strip_saved_names
from slimtensors.checkpoint.optimizer import (
    OptimizerState,
    describe_optimizer,
    fit_optimizer_state,
    has_torch_loading,
    load_optimizer,
    raise_mismatch,
    remember_optimizer,
)
from slimtensors.errors import ConfigError, MismatchError

Checkpoint = dict[str, Any]


class Stateful(Protocol):
    """An object with a state: a scheduler, a scaler, a dataloader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore the state."""
        ...


def build_checkpoint(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    *,
    models: Mapping[str, nn.Module] | None = None,
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    schedulers: Mapping[str, Stateful] | None = None,
    scalers: Mapping[str, Stateful] | None = None,
    dataloader: Stateful | None = None,
    epoch: int | None = None,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    rng_state: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Return the whole state of a training run, including the random number generators.

    `models`, `optimizers`, `schedulers` and `scalers` are further objects by name. Tensors are
    references, not copies: save the state before training continues. `extra` may contain anything
    that consists of tensors, numbers, strings, dicts and lists, and objects with a `state_dict`.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> build_checkpoint(model, optimizer, step=100)["step"]
        100
    """
    objects = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "dataloader": dataloader,
    }
    named = _check_named(
        model, models=models, optimizers=optimizers, schedulers=schedulers, scalers=scalers
    )
    checkpoint: Checkpoint = {
        "epoch": epoch,
        "step": step,
        "metrics": dict(metrics or {}),
        # `is None`: a dataloader may have length 0, or none.
        **{name: None if part is None else part.state_dict() for name, part in objects.items()},
        "rng": capture_rng() if rng_state else None,
        "layout": _describe_layout(model, optimizer, models, optimizers),
    }
    for kind, parts in named.items():
        checkpoint[kind] = {name: part.state_dict() for name, part in parts.items()}
    reserved = set(checkpoint)
    for name, value in (extra or {}).items():
        if str(name).partition(".")[0] in reserved:
            raise ConfigError(f"extra: {name!r} is a reserved key; choose another name")
        checkpoint[name] = value.state_dict() if is_stateful(value) else value
    return checkpoint


def restore_checkpoint(
    checkpoint: Mapping[str, Any],
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    *,
    models: Mapping[str, nn.Module] | None = None,
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    schedulers: Mapping[str, Stateful] | None = None,
    scalers: Mapping[str, Stateful] | None = None,
    dataloader: Stateful | None = None,
    extra: Mapping[str, Stateful] | None = None,
    rng_state: bool = True,
) -> None:
    """Load a state into these objects, so that training continues bit for bit.

    Raise `MismatchError`, which lists names and shapes, if the state does not fit; in this case
    nothing is changed. Parts of the checkpoint without a matching argument are ignored. Names of
    models match with and without the prefixes of `torch.compile` and DataParallel.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> state = build_checkpoint(model, step=100)
        >>> restore_checkpoint(state, model)
    """
    _check_named(
        model, models=models, optimizers=optimizers, schedulers=schedulers, scalers=scalers
    )
    parts = _PartFinder(_check_mapping("checkpoint", checkpoint))
    all_models = parts.find("model", model, models)
    all_optimizers = parts.find("optimizer", optimizer, optimizers)
    others = parts.find("scheduler", scheduler, schedulers)
    has_scheduler = bool(others)
    others += parts.find("scaler", scaler, scalers) + parts.find("dataloader", dataloader, None)
    others += parts.find_extra(extra or {})
    fitted_models = [
        (part, _check_model(part.label, part.state, part.object)) for part in all_models
    ]
    steps: list[LoadStep] = []
    is_model_first = any(has_own_loading(part.object) for part in all_models)
    names = name_parameters(model, models)
    for part in all_optimizers:
        fitted = _fit_optimizer(part, parts.find_layout(part), names)
        if fitted.has_moved_groups and has_scheduler:
            problem = "parameter groups are in another order, which a scheduler does not support"
            raise_mismatch(part.label, [problem])
        load = partial(load_optimizer, part.object, fitted.state)
        steps.append(LoadStep(part.label, load, partial(remember_optimizer, part.object)))
        is_model_first |= not has_torch_loading(part.object)
    steps += [LoadStep.of(part.label, part.object, part.state) for part in others]
    rng = checkpoint.get("rng") if rng_state else None
    if rng is not None:
        check_rng(_check_mapping("rng", rng))
        steps.append(LoadStep("rng", partial(restore_rng, rng), _remember_rng))
    # Last if possible: once it is checked, loading cannot fail, and no copy is needed to undo it.
    load_models = [
        LoadStep.of_model(part.label, part.object, state, can_undo=is_model_first)
        for part, state in fitted_models
    ]
    load_all([*load_models, *steps] if is_model_first else [*steps, *load_models])


def _fit_optimizer(
    part: "_Part", layout: Mapping[str, Any], names: Mapping[int, str]
) -> OptimizerState:
    state = _check_mapping(part.label, part.state)
    try:
        return fit_optimizer_state(state, layout, part.object, names)
    except MismatchError as error:
        if part.label == "optimizer":
            raise
        raise MismatchError(f"{part.label}: {error}") from error


def is_stateful(value: object) -> bool:
    """Return True if a value is an object whose state can be saved and restored."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


def _check_named(
    model: nn.Module | None, **named: Mapping[str, Any] | None
) -> dict[str, Mapping[str, Any]]:
    """Return the mappings that are not empty; raise if a name is invalid or there is no model."""
    if model is None and not named["models"]:
        raise ConfigError("expected a model, or models={name: model}")
    for kind, parts in named.items():
        for name in parts or {}:
            if not isinstance(name, str) or not name or "." in name:
                raise ConfigError(f"{kind}: {name!r} is not a valid name; use text without dots")
    children = {name.partition(".")[0] for name in name_parameters(model).values()}
    for name in (named["models"] or {}).keys() & children:
        raise ConfigError(f"models: {name!r} is also a submodule of the model; rename one of them")
    return {kind: parts for kind, parts in named.items() if parts}


@dataclass(frozen=True)
class _Part:
    """An object and its state in a checkpoint."""

    label: str
    """`optimizer`, or `optimizers.NAME`."""
    object: Any
    state: Any


@dataclass(frozen=True)
class _PartFinder:
    """Finds the states of objects in a checkpoint."""

    checkpoint: Mapping[str, Any]

    def find(self, kind: str, single: Any, named: Mapping[str, Any] | None) -> list[_Part]:
        """Return the object of a kind and those with a name; raise if a state is missing."""
        pairs = [] if single is None else [(kind, single, self.checkpoint.get(kind))]
        states = self.checkpoint.get(f"{kind}s")
        for name, part in (named or {}).items():
            state = states.get(name) if isinstance(states, Mapping) else None
            pairs.append((f"{kind}s.{name}", part, state))
        return [self._make(*pair) for pair in pairs]

    def find_extra(self, extra: Mapping[str, Stateful]) -> list[_Part]:
        """Return the objects of `extra`; raise if a state is missing."""
        for name, part in extra.items():
            if not is_stateful(part):
                raise ConfigError(f"extra: {name!r} has no state_dict and load_state_dict")
        return [self._make(name, part, self.checkpoint.get(name)) for name, part in extra.items()]

    def find_layout(self, part: _Part) -> dict[str, Any]:
        """Return the saved layout of an optimizer, with parameter names without wrappers."""
        layout = _as_mapping(self.checkpoint.get("layout"))
        kind, _, name = part.label.partition(".")
        if name:
            layout = _as_mapping(_as_mapping(layout.get(kind)).get(name))
        stripped = strip_saved_names(self.checkpoint.get("model"), self.checkpoint.get("models"))
        order = layout.get("optimizer")
        if not isinstance(order, list):
            return dict(layout)
        return {**layout, "optimizer": [stripped.get(name, name) for name in order]}

    @staticmethod
    def _make(label: str, part: Any, state: Any) -> _Part:
        if state is None:
            raise MismatchError(f"{label}: not in the checkpoint, which was built without it")
        return _Part(label, part, state)


def _as_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True)
class LoadStep:
    """How to load one part of a checkpoint, and how to undo that."""

    name: str
    load: Callable[[], object]
    remember: Callable[[], Callable[[], object]]
    """Returns a function that restores the state from before."""

    @classmethod
    def of(cls, name: str, part: Any, state: Any) -> "LoadStep":
        """Return the step that loads a copy of `state` into an object."""
        return cls(name, lambda: part.load_state_dict(deepcopy(state)), partial(_remember, part))

    @classmethod
    def of_model(
        cls, name: str, model: nn.Module, state: Mapping[str, Any], *, can_undo: bool
    ) -> "LoadStep":
        """Return the step that loads a checked state into a model."""
        if has_own_loading(model):
            return cls.of(name, model, state)
        remember = partial(_remember, model) if can_undo else lambda: lambda: None
        return cls(name, lambda: model.load_state_dict(state), remember)


def load_all(steps: Sequence[LoadStep]) -> None:
    """Run all steps; if one fails, undo them and raise `MismatchError` with its name."""
    undo: list[tuple[str, Callable[[], object]]] = []
    for step in steps:
        undo.append((step.name, step.remember()))
        try:
            step.load()
        except BaseException as error:
            notes = _undo_all(reversed(undo))
            if not isinstance(error, Exception):
                raise
            result = "" if notes else ", nothing was changed"
            failure = MismatchError(
                f"{step.name}: loading the state failed{result}: {type(error).__name__}: {error}"
            )
            for note in notes:
                failure.add_note(note)
            raise failure from error


def _undo_all(steps: Iterable[tuple[str, Callable[[], object]]]) -> list[str]:
    """Undo loaded states; return those for which that failed, with the reason."""
    notes = []
    for name, undo in steps:
        try:
            undo()
        except Exception as error:
            notes.append(f"{name}: the previous state was not restored: {error}")
    return notes


def has_own_loading(model: nn.Module) -> bool:
    """Return True if a module has code of its own that loads states, which may fail."""
    return any(
        type(module).load_state_dict is not nn.Module.load_state_dict
        or type(module).set_extra_state is not nn.Module.set_extra_state
        or not type(module)._load_from_state_dict.__module__.startswith("torch.nn.")
        or module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        for module in model.modules()
    )


def _remember(part: Stateful) -> Callable[[], object]:
    if isinstance(part, DataLoader):  # its state_dict() may start processes
        attributes = dict(vars(part))
        return lambda: vars(part).update(attributes)
    earlier = deepcopy(part.state_dict())
    return lambda: part.load_state_dict(earlier)


def _remember_rng() -> Callable[[], object]:
    return partial(restore_rng, capture_rng())


def capture_rng() -> dict[str, Any]:
    """Return the states of the Python, NumPy, torch and CUDA random number generators."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.tensor(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def check_rng(state: Mapping[str, Any]) -> None:
    """Raise `MismatchError` if the number of CUDA devices differs from the one in `state`."""
    expected = len(state.get("cuda", ()))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if expected not in (0, count):
        raise MismatchError(
            f"rng: the checkpoint has generator states of {expected} CUDA devices, but this "
            f"machine has {count}; pass rng_state=False to leave the generators unchanged"
        )


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set all random number generators to a captured state."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    kind, position = numpy["kind"], numpy["position"]
    np.random.set_state((kind, keys, position, numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if state.get("cuda"):
        torch.cuda.set_rng_state_all(state["cuda"])


def _describe_layout(
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    models: Mapping[str, nn.Module] | None,
    optimizers: Mapping[str, torch.optim.Optimizer] | None,
) -> dict[str, Any]:
    """Return the kinds of parameters and their order in the optimizers."""
    names = name_parameters(model, models)
    described: dict[str, Any] = {"optimizer": []}
    if optimizer is not None:
        described = describe_optimizer(optimizer, names)
    layout = {**described, **_describe_model(model)}
    if models:
        layout["models"] = {name: _describe_model(part) for name, part in models.items()}
    if optimizers:
        parts = optimizers.items()
        layout["optimizers"] = {name: describe_optimizer(part, names) for name, part in parts}
    return layout


def _describe_model(model: nn.Module | None) -> dict[str, list[str]]:
    if model is None:
        return {"buffers": [], "embeddings": [], "norms": []}
    return {
        "buffers": [name for name, _ in model.named_buffers()],
        "embeddings": list(_find_parameters(model, "Embedding")),
        "norms": list(_find_parameters(model, "Norm")),
    }


def _find_parameters(model: nn.Module, kind: str) -> Iterator[str]:
    """Yield the parameters of modules whose class name contains `kind`: LlamaRMSNorm, …"""
    for path, module in model.named_modules():
        if kind in type(module).__name__:
            parameters = module.named_parameters(recurse=False)
            yield from (f"{path}.{name}" if path else name for name, _ in parameters)


def _check_model(label: str, state: object, model: nn.Module) -> Mapping[str, Any]:
    """Return the state under the names of the model; raise `MismatchError` if it does not fit."""
    state, current = fit_model_state(label, _check_mapping(label, state), model), model.state_dict()
    problems = [f"{name}: not in the model" for name in state if name not in current]
    problems += [f"{name}: not in the checkpoint" for name in current if name not in state]
    # Code of a model that loads its state may also change its tensors, such as a growing buffer.
    names = [] if has_own_loading(model) else [name for name in state if name in current]
    for name in names:
        problem = _find_tensor_problem(state[name], current[name])
        problems += [f"{name}: {problem}"] if problem else []
    raise_mismatch(label, problems)
    return state


def _find_tensor_problem(x: object, y: object) -> str:
    """Return why a saved tensor `x` cannot be copied to `y` of a model, or an empty string."""
    if not isinstance(y, Tensor):
        return ""
    if not isinstance(x, Tensor):
        return f"expected a tensor, got {type(x).__name__}"
    if x.is_meta:
        return "on the meta device, without data"
    if is_lazy(y):
        return ""
    pairs: list[tuple[object, object]] = [(list(x.shape), list(y.shape)), (x.layout, y.layout)]
    if x.is_complex() != y.is_complex() or x.is_quantized != y.is_quantized:
        pairs.append((x.dtype, y.dtype))
    different = (pair for pair in pairs if pair[0] != pair[1])
    problems = (f"{a} in the checkpoint, {b} in the model" for a, b in different)
    return next(problems, "").replace("torch.", "")


def _check_mapping(label: str, state: object) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise MismatchError(f"{label}: expected a dict, got {type(state).__name__}")
    return state
