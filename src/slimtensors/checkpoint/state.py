"""Training states: build one from live objects, check it, and restore it."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

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
        "optimizer": optimizer.state_dict() if optimizer else None,
        **{name: part.state_dict() if part else None for name, part in parts.items()},
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
    if optimizer is not None:
        _check_optimizer(checkpoint["optimizer"], optimizer)
    rng = checkpoint.get("rng") if rng_state else None
    if rng is not None:
        check_rng(rng)
    model.load_state_dict(checkpoint["model"])
    if optimizer is not None:
        _load_optimizer(optimizer, checkpoint["optimizer"])
    for name, part in parts.items():
        if part is not None:
            part.load_state_dict(checkpoint[name])
    if rng is not None:
        restore_rng(rng)


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
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, list[str]]:
    """Return the kinds of parameters and their order in the optimizer."""
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=True)}
    groups = optimizer.param_groups if optimizer else []
    return {
        "optimizer": [names.get(id(p), "") for group in groups for p in group["params"]],
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
    _raise_mismatch("model", problems)


_SCHEDULER_KEYS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Keys that torch's schedulers add to the parameter groups of an optimizer."""


def _check_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    groups, have = state["param_groups"], optimizer.param_groups
    if len(groups) != len(have):
        counts = f"{len(groups)} parameter groups in the checkpoint, {len(have)} now"
        _raise_mismatch("optimizer", [counts])
    problems = []
    for i, (group, current) in enumerate(zip(groups, have, strict=True)):
        saved_count, count = len(group["params"]), len(current["params"])
        if saved_count != count:
            problems.append(f"group {i}: {saved_count} parameters in the checkpoint, {count} now")
        # A new release of an optimizer only adds options; another class also lacks some.
        extra = sorted(group.keys() - current.keys() - _SCHEDULER_KEYS)
        missing = sorted(optimizer.defaults.keys() - group.keys())
        if extra and missing:
            options = f"{', '.join(extra)} in the checkpoint, {', '.join(missing)} now"
            problems.append(f"group {i}: another class of optimizer: {options}")
    _raise_mismatch("optimizer", problems)
    for index, parameter in _match_parameters(groups, optimizer):
        for key, x in state["state"].get(index, {}).items():
            if isinstance(x, Tensor) and x.dim() and x.shape != parameter.shape:
                shapes = f"{list(x.shape)} in the checkpoint, its parameter {list(parameter.shape)}"
                problems.append(f"parameter {index}: {key}: {shapes}")
    _raise_mismatch("optimizer", problems)


def _raise_mismatch(part: str, problems: Sequence[str]) -> None:
    """Raise `MismatchError` with the first 20 problems, if there are any."""
    if problems:
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        lines = "".join(f"\n  {problem}" for problem in problems[:20])
        raise MismatchError(f"the {part} does not fit the checkpoint:{lines}{more}")


def _match_parameters(
    groups: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Any, Tensor]]:
    """Yield the index of each parameter in the checkpoint, and the parameter."""
    for group, current in zip(groups, optimizer.param_groups, strict=True):
        yield from zip(group["params"], current["params"], strict=True)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load copies: the optimizer would otherwise update the checkpoint's tensors in place."""
    copies = {
        index: {k: x.clone() if isinstance(x, Tensor) else x for k, x in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": copies})
    # torch casts states to the dtype of the parameter; restore those of higher precision.
    for index, parameter in _match_parameters(state["param_groups"], optimizer):
        for key, x in copies.get(index, {}).items():
            if isinstance(x, Tensor) and optimizer.state[parameter][key].dtype != x.dtype:
                optimizer.state[parameter][key] = x.to(parameter.device)
