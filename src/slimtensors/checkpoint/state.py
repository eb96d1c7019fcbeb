"""Training states: build, check and restore them."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError, MismatchError


def capture_rng() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, and of each CUDA device's."""
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
    """Raise if this machine has not the generators that `state` is of."""
    wanted = len(state.get("cuda", ()))
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted not in (0, have):
        raise MismatchError(
            f"rng: holds the random numbers of {wanted} CUDA devices, but there are {have}; "
            "pass rng_state=False to go on with other ones"
        )


def restore_rng(state: Mapping[str, Any]) -> None:
    """Let all generators go on where they were."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    kind, position = numpy["kind"], numpy["position"]
    np.random.set_state((kind, keys, position, numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if state.get("cuda"):
        torch.cuda.set_rng_state_all(state["cuda"])


Checkpoint = dict[str, Any]

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""What torch's schedulers add to the options of an optimizer."""


class Stateful(Protocol):
    """A scheduler, a scaler, a dataloader: anything that can tell its state and take it back."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from a state."""
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
    """Return the whole state of a training run, by reference: save it before training goes on.

    `extra` may hold anything else that consists of tensors, numbers, text, dicts and lists.
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
        "layout": _layout(model, optimizer),
    }
    for name in checkpoint.keys() & (extra or {}):
        raise ConfigError(f"extra: {name!r} is a part of every checkpoint; choose another name")
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
    """Put a state back into these objects, so that training goes on as if it had never stopped.

    Raise `MismatchError`, which lists names and shapes, if they do not fit; nothing has changed
    then. Parts that the checkpoint has and the call does not ask for are left alone.
    """
    parts = {"scheduler": scheduler, "scaler": scaler, "dataloader": dataloader}
    for name, part in {"model": model, "optimizer": optimizer, **parts}.items():
        if part is not None and checkpoint.get(name) is None:
            raise MismatchError(f"{name}: the checkpoint has none; it was built without")
    _check_model(checkpoint["model"], model)
    if optimizer is not None:
        _check_optimizer(checkpoint["optimizer"], optimizer)
    random = checkpoint.get("rng") if rng_state else None
    if random is not None:
        check_rng(random)
    model.load_state_dict(checkpoint["model"])
    if optimizer is not None:
        _load_optimizer(optimizer, checkpoint["optimizer"])
    for name, part in parts.items():
        if part is not None:
            part.load_state_dict(checkpoint[name])
    if random is not None:
        restore_rng(random)


def _layout(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, list[str]]:
    """Return what the names alone do not tell: the kinds of tensors, and the optimizer's order."""
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=True)}
    groups = optimizer.param_groups if optimizer else []
    return {
        "optimizer": [names.get(id(p), "") for group in groups for p in group["params"]],
        "buffers": [name for name, _ in model.named_buffers()],
        "embeddings": list(_of_kind(model, "Embedding")),
        "norms": list(_of_kind(model, "Norm")),
    }


def _of_kind(model: nn.Module, kind: str) -> Iterator[str]:
    """Yield the parameters of modules whose class is called so: LayerNorm, LlamaRMSNorm, …"""
    for path, module in model.named_modules():
        if kind in type(module).__name__:
            own = module.named_parameters(recurse=False)
            yield from (f"{path}.{name}" if path else name for name, _ in own)


def _check_model(state: Mapping[str, Any], model: nn.Module) -> None:
    have = model.state_dict()
    lines = [f"{name}: is not in the model" for name in state if name not in have]
    lines += [f"{name}: is not in the checkpoint" for name in have if name not in state]
    for name, x in state.items():
        y = have.get(name)
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape != y.shape:
            lines.append(f"{name}: {list(x.shape)} in the checkpoint, {list(y.shape)} in the model")
    _refuse("model", lines)


def _check_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    groups, have = state["param_groups"], optimizer.param_groups
    if len(groups) != len(have):
        _refuse("optimizer", [f"{len(groups)} parameter groups in the checkpoint, {len(have)} now"])
    lines = []
    for i, (group, mine) in enumerate(zip(groups, have, strict=True)):
        counts = len(group["params"]), len(mine["params"])
        if counts[0] != counts[1]:
            lines.append(f"group {i}: {counts[0]} parameters in the checkpoint, {counts[1]} now")
        # One kind of optimizer gains options by and by; two kinds have each what the other lacks.
        more = sorted(group.keys() - mine.keys() - _OF_SCHEDULERS)
        fewer = sorted(optimizer.defaults.keys() - group.keys())
        if more and fewer:
            options = f"{', '.join(more)} in the checkpoint, {', '.join(fewer)} now"
            lines.append(f"group {i}: is of another kind of optimizer: {options}")
    _refuse("optimizer", lines)
    for index, parameter in _numbered(groups, optimizer):
        for key, x in state["state"].get(index, {}).items():
            if isinstance(x, Tensor) and x.dim() and x.shape != parameter.shape:
                shapes = f"{list(x.shape)} in the checkpoint, its parameter {list(parameter.shape)}"
                lines.append(f"parameter {index}: {key}: {shapes}")
    _refuse("optimizer", lines)


def _refuse(part: str, lines: Sequence[str]) -> None:
    if lines:
        more = f"\n  and {len(lines) - 20} more" if len(lines) > 20 else ""
        listed = "".join(f"\n  {line}" for line in lines[:20])
        raise MismatchError(f"the {part} does not fit the checkpoint:{listed}{more}")


def _numbered(
    groups: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Any, Tensor]]:
    """Yield the checkpoint's number for each parameter, and the parameter."""
    for group, mine in zip(groups, optimizer.param_groups, strict=True):
        yield from zip(group["params"], mine["params"], strict=True)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load copies: an optimizer would keep the checkpoint's own tensors, and train on them."""
    copies = {
        index: {k: x.clone() if isinstance(x, Tensor) else x for k, x in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": copies})
    # torch casts states to the dtype of the parameter; those that were kept finer go back so.
    for index, parameter in _numbered(state["param_groups"], optimizer):
        for key, x in copies.get(index, {}).items():
            if isinstance(x, Tensor) and optimizer.state[parameter][key].dtype != x.dtype:
                optimizer.state[parameter][key] = x.to(parameter.device)
