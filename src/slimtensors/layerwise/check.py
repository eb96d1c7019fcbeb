"""Check that layers were calibrated on the inputs that they have in the finished model."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from slimtensors.layerwise.engine import OBSERVER
from slimtensors.layerwise.hessian import HessianMap, MatrixKey
from slimtensors.layerwise.inputs import Batch, InputRecorder, Layer, collect_layers, remove_padding
from slimtensors.layerwise.passes import evaluation_mode, run_model


@contextmanager
def collect_hessians() -> Iterator[dict[MatrixKey, Tensor]]:
    """Collect the Hessians that are used within the context, for `compare_hessians`.

    Example:
        >>> with collect_hessians() as used:
        ...     quantize_model(model, config, calibration=batches)
        >>> max(compare_hessians(model, used, batches).values())
    """
    used: dict[MatrixKey, Tensor] = {}

    def observe(layer: Layer, hessians: HessianMap) -> None:
        for i in range(layer.count):
            if (hessian := hessians.get((layer.name, i))) is not None:
                used[layer.name, i] = hessian.mean()

    token = OBSERVER.set(observe)
    try:
        yield used
    finally:
        OBSERVER.reset(token)


def compare_hessians(
    model: nn.Module,
    used: Mapping[MatrixKey, Tensor],
    batches: Iterable[Batch],
    *,
    repeated: bool = False,
) -> dict[str, float]:
    """Return how much the Hessians of each layer differ from those of a plain forward pass.

    The differences are relative, of the Frobenius norm; the largest one of a layer's matrices is
    returned. They are zero, up to rounding. A layer that runs more than once per batch is not
    compared unless `repeated` is set, because its later inputs depend on its own new weight.
    """
    names = {name for name, _ in used}
    layers = [layer for name, layer in collect_layers(model).items() if name in names]
    recorder = InputRecorder(layers, share=False)
    with evaluation_mode(model):
        for batch in remove_padding(model, batches):
            with recorder:
                run_model(model, batch)
            recorder.end_batch()
    found = {key: each.hessian.mean() for each in recorder.inputs() for key in each.readers}
    differences = dict.fromkeys(names, 0.0)
    for key, hessian in used.items():
        expected = found.get(key, torch.zeros_like(hessian))
        difference = float((hessian - expected).norm() / hessian.norm().clamp(min=1e-30))
        differences[key[0]] = max(differences[key[0]], difference)
    skipped = set() if repeated else recorder.repeated
    return {name: x for name, x in differences.items() if name not in skipped}
