"""Fingerprints of what the result of a run depends on."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from slimtensors.quantization.algorithms.layers import Layer
from slimtensors.spec import Spec, as_bytes, on_cpu


def digests(
    model: nn.Module, layers: Iterable[Layer], batches: Iterable[Any], options: object
) -> dict[str, str]:
    """Return a digest of the model, one of the config and one of the data."""
    schemes = {layer.name: layer.args.to_dict() for layer in layers if layer.args}
    return {
        "model": _digest(dict(model.state_dict())),
        "config": _digest([schemes, repr(options)]),
        "calibration": _digest(list(batches)),
    }


def _digest(value: object) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(value):
        digest.update(len(chunk).to_bytes(8, "little"))
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(value: object) -> Iterable[bytes | memoryview]:
    """Yield the bytes of everything in a value, and what tells apart values of the same bytes."""
    if isinstance(value, Tensor):
        x = on_cpu(value)
        yield repr(Spec.of(x)).encode()
        yield as_bytes(x).numpy().data
    elif isinstance(value, Mapping):
        yield b"{%d" % len(value)
        for key, each in value.items():
            yield repr(key).encode()
            yield from _chunks(each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield b"[%d" % len(value)
        for each in value:
            yield from _chunks(each)
    else:
        yield repr(value).encode()
