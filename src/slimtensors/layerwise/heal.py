"""Tune a rounded model by its divergence from the original.

Vectors (norms and biases) and one factor per row of each rounded matrix are trained; the integers
of the matrices stay as they are.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError
from slimtensors.layerwise.divergence import Reference
from slimtensors.layerwise.inputs import Layer
from slimtensors.layerwise.passes import evaluation_mode

Progress = Callable[[float, float], object]
"""Called with the seconds that passed, and their total."""

_RATE = 2e-3
"""Learning rate, relative to the RMS of each vector."""
_WARMUP = 4
_LEAST_FACTOR = 0.01


def heal(
    model: nn.Module,
    layers: Sequence[Layer],
    reference: Reference,
    *,
    seconds: float,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Train a model for some time; return the factors of the rows of each layer, by its name.

    The vectors of the model are changed in place. The factors are not applied to its weights.
    """
    scales = {layer.name: torch.ones(layer.matrix_shape[0], requires_grad=True) for layer in layers}
    modules = {layer.name: layer.module for layer in layers}
    vectors = [x for x in model.parameters() if x.dim() == 1 and x.is_floating_point()]
    masters = [x.detach().float().clone() for x in vectors]
    trained = [*masters, *scales.values()]
    rates = [_RATE * max(float(x.square().mean().sqrt()), 1e-3) for x in masters]
    rates += [_RATE] * len(scales)
    groups = [{"params": [x], "lr": r} for x, r in zip(trained, rates, strict=True)]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    start = time.monotonic()
    with _only_trainable(model, vectors), _scaled_rows(modules, scales):
        for step, batch in enumerate(_cycle(len(reference))):
            passed = time.monotonic() - start
            if progress:
                progress(min(passed, seconds), seconds)
            if passed >= seconds:
                break
            loss = reference.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            if not bool(loss.isfinite()):
                raise ConfigError(f"the divergence of the rounded model is {float(loss)}")
            fade = min((step + 1) / _WARMUP, 1.0) * (1 - passed / seconds)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * fade
            for master, vector in zip(masters, vectors, strict=True):
                master.grad = None if vector.grad is None else vector.grad.float()
                vector.grad = None
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for master, vector in zip(masters, vectors, strict=True):
                    vector.copy_(master)
                for x in scales.values():
                    x.clamp_(min=_LEAST_FACTOR)
    return {name: x.detach() for name, x in scales.items()}


def _cycle(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


@contextmanager
def _only_trainable(model: nn.Module, vectors: Iterable[Tensor]) -> Iterator[None]:
    """Compute gradients of some parameters only, in evaluation mode."""
    before = {name: x.requires_grad for name, x in model.named_parameters()}
    model.requires_grad_(False)
    try:
        for x in vectors:
            x.requires_grad_(True)
        with evaluation_mode(model), torch.enable_grad():
            yield
    finally:
        for name, x in model.named_parameters():
            x.requires_grad_(before[name])


@contextmanager
def _scaled_rows(modules: dict[str, nn.Module], scales: dict[str, Tensor]) -> Iterator[None]:
    """Multiply the rows of weights, by multiplying the outputs of their modules."""

    def make_hook(scale: Tensor) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            bias: Tensor | None = getattr(module, "bias", None)
            scaled: Tensor = out * scale if bias is None else (out - bias) * scale + bias
            return scaled.to(out.dtype)

        return hook

    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_hook(make_hook(scales[name]))
            stack.callback(handle.remove)
        yield
