"""Training states: build one from live objects, check it, and restore it."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from slimtensors.checkpoint.optimizer import (
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
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    *,
    dataloader: Stateful | None = None,
    epoch: int | None = None,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    rng_state: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Return the whole state of a training run, including the random number generators.

    Tensors are references, not copies: save the state before training continues. `extra` may
    contain anything that consists of tensors, numbers, strings, dicts and lists.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> build_checkpoint(model, optimizer, step=100)["step"]
        100
    """
    parts = {"scheduler": scheduler, "scaler": scaler, "dataloader": dataloader}
    checkpoint: Checkpoint = {
        "epoch": epoch,
        "step": step,
        "metrics": dict(metrics or {}),
        "model": model.state_dict(),
        # `is not None`: a dataloader may have length 0, or none.
        "optimizer": optimizer.state_dict() if optimizer is not None else None,
        **{name: None if part is None else part.state_dict() for name, part in parts.items()},
        "rng": capture_rng() if rng_state else None,
        "layout": _describe_layout(model, optimizer),
    }
    for name in checkpoint.keys() & (extra or {}):
        raise ConfigError(f"extra: {name!r} is a reserved key; choose another name")
    return checkpoint | dict(extra or {})


def restore_checkpoint(
    checkpoint: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    *,
    dataloader: Stateful | None = None,
    rng_state: bool = True,
) -> None:
    """Load a state into these objects, so that training continues bit for bit.

    Raise `MismatchError`, which lists names and shapes, if the state does not fit; in this case
    nothing is changed. Parts of the checkpoint without a matching argument are ignored.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> state = build_checkpoint(model, step=100)
        >>> restore_checkpoint(state, model)
    """
    parts = {"scheduler": scheduler, "scaler": scaler, "dataloader": dataloader}
    for name, part in {"model": model, "optimizer": optimizer, **parts}.items():
        if part is not None and checkpoint.get(name) is None:
            raise MismatchError(f"{name}: not in the checkpoint, which was built without it")
    _check_model(checkpoint["model"], model)
    steps: list[LoadStep] = []
    is_model_first = has_own_loading(model)
    if optimizer is not None:
        layout, names = checkpoint.get("layout") or {}, name_parameters(model)
        fitted = fit_optimizer_state(checkpoint["optimizer"], layout, optimizer, names)
        if fitted.has_moved_groups and scheduler is not None:
            problem = "parameter groups are in another order, which a scheduler does not support"
            raise_mismatch("optimizer", [problem])
        load = partial(load_optimizer, optimizer, fitted.state)
        steps.append(LoadStep("optimizer", load, partial(remember_optimizer, optimizer)))
        is_model_first |= not has_torch_loading(optimizer)
    stateful = ((name, part) for name, part in parts.items() if part is not None)
    steps += [LoadStep.of(name, part, checkpoint[name]) for name, part in stateful]
    rng = checkpoint.get("rng") if rng_state else None
    if rng is not None:
        check_rng(rng)
        steps.append(LoadStep("rng", partial(restore_rng, rng), _remember_rng))
    # Last if possible: once it is checked, loading cannot fail, and no copy is needed to undo it.
    load_model = LoadStep.of_model(model, checkpoint["model"], can_undo=is_model_first)
    load_all([load_model, *steps] if is_model_first else [*steps, load_model])


@dataclass(frozen=True)
class LoadStep:
    """How to load one part of a checkpoint, and how to undo that."""

    name: str
    load: Callable[[], object]
    remember: Callable[[], Callable[[], object]]
    """Returns a function that restores the state from before."""

    @classmethod
    def of(cls, name: str, part: Stateful, state: dict[str, Any]) -> "LoadStep":
        """Return the step that loads a copy of `state` into an object."""
        return cls(name, lambda: part.load_state_dict(deepcopy(state)), partial(_remember, part))

    @classmethod
    def of_model(cls, model: nn.Module, state: dict[str, Any], *, can_undo: bool) -> "LoadStep":
        """Return the step that loads a checked state into a model."""
        if has_own_loading(model):
            return cls.of("model", model, state)
        remember = partial(_remember, model) if can_undo else lambda: lambda: None
        return cls("model", lambda: model.load_state_dict(state), remember)


def load_all(steps: Sequence[LoadStep]) -> None:
    """Run all steps; if one fails, undo them and raise `MismatchError` with its name."""
    with ExitStack() as undo:
        for step in steps:
            undo.callback(step.remember())
            try:
                step.load()
            except Exception as error:
                raise MismatchError(
                    f"{step.name}: loading the state failed, nothing was changed: "
                    f"{type(error).__name__}: {error}"
                ) from error
        undo.pop_all()


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


def name_parameters(model: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter, by its `id`."""
    return {id(p): name for name, p in model.named_parameters(remove_duplicate=True)}


def _describe_layout(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the kinds of parameters and their order in the optimizer."""
    described: dict[str, Any] = {"optimizer": []}
    if optimizer is not None:
        described = describe_optimizer(optimizer, name_parameters(model))
    return {
        **described,
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


def _check_model(state: Mapping[str, Any], model: nn.Module) -> None:
    current = model.state_dict()
    problems = [f"{name}: not in the model" for name in state if name not in current]
    problems += [f"{name}: not in the checkpoint" for name in current if name not in state]
    for name, x in state.items():
        y = current.get(name)
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape != y.shape:
            shapes = f"{list(x.shape)} in the checkpoint, {list(y.shape)} in the model"
            problems.append(f"{name}: {shapes}")
    raise_mismatch("model", problems)
