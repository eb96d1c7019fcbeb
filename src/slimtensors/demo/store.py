"""The ways to store a model that the demo shows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from slimtensors import presets
from slimtensors.archive import Archive
from slimtensors.archive.state import Item, State, as_state
from slimtensors.beside import read_config
from slimtensors.container import place
from slimtensors.demo.text import LENGTH
from slimtensors.folder import compress_folder, described, measuring
from slimtensors.quantization import QuantizationConfig
from slimtensors.quantization.by_name import is_linear, layer_of
from slimtensors.quantized_folder import Calibration, Rewrite, calibrate_folder, quantize_folder
from slimtensors.sparsity import Sparsity
from slimtensors.spec import Each, Json
from slimtensors.summary import Summary

_LEFT_OUT = ["lm_head"]


@dataclass(frozen=True)
class Way:
    """One way to store a model."""

    name: str
    folder: str
    about: str
    make: Callable[[Path, Path, str], object]
    """Writes one folder from another; the text is for methods that run the model."""


def _compressed(preset: str) -> Callable[[Path, Path, str], Summary]:
    return lambda source, target, text: compress_folder(source, target, preset=preset)


def _pruned(prune: Callable[[Tensor], Tensor]) -> Callable[[Path, Path, str], Summary]:
    return lambda source, target, text: prune_folder(source, target, prune)


def _rounded(scheme: str) -> Callable[[Path, Path, str], Summary]:
    def make(source: Path, target: Path, text: str) -> Summary:
        return quantize_folder(source, target, _config(scheme, source))

    return make


def _calibrated(scheme: str) -> Callable[[Path, Path, str], Summary]:
    def make(source: Path, target: Path, text: str) -> Summary:
        config = _config(scheme, source)
        samples = Calibration(text, samples=64, length=LENGTH)
        # In float32: some machines announce products of bf16 that they cannot do.
        return calibrate_folder(source, target, config, samples, dtype=torch.float32)

    return make


def _config(scheme: str, source: Path) -> QuantizationConfig:
    """Return the config of a preset that leaves out the output layer, if the model has one."""
    is_tied = bool(read_config(source).get("tie_word_embeddings"))
    with Archive(source) as archive:
        ignore = [layer for layer in _LEFT_OUT if is_tied or f"{layer}.weight" in archive]
    return QuantizationConfig.preset(scheme, ignore=ignore)


def half(x: Tensor) -> Tensor:
    """Zero the smaller half of a matrix."""
    limit = x.abs().float().flatten().kthvalue(max(x.numel() // 2, 1)).values
    return torch.where(x.abs().float() > limit, x, torch.zeros_like(x))


def two_of_four(x: Tensor) -> Tensor:
    """Zero the two smallest of every four neighbours."""
    if x.shape[-1] % 4:
        return x
    groups = x.reshape(-1, 4)
    smallest = groups.abs().float().argsort(dim=1)[:, :2]
    return groups.scatter(1, smallest, 0).view_as(x)


WAYS = (
    Way("lossless", "lossless", "Every bit, in fewer.", _compressed("lossless")),
    Way("sparse 50 %", "sparse-50", "The smaller half of each matrix is zero.", _pruned(half)),
    Way("sparse 2:4", "sparse-24", "Two of every four weights are zero.", _pruned(two_of_four)),
    Way("int8", "int8", "8-bit integers, a scale per 128 weights.", _rounded("W8A16")),
    Way("W4A16 RTN", "w4a16-rtn", "4-bit integers, each the nearest one.", _rounded("W4A16")),
    Way(
        "W4A16 GPTQ",
        "w4a16-gptq",
        "4-bit integers that make up for each other.",
        _calibrated("W4A16"),
    ),
    Way("extreme", "extreme", "8-bit integers, entropy-coded.", _compressed("extreme")),
)


def prune_folder(source: Path, target: Path, prune: Callable[[Tensor], Tensor]) -> Summary:
    """Write a model folder whose linear layers are pruned, and stored losslessly after that."""
    found: dict[str, Sparsity] = {}
    with Archive(source) as archive:

        def state(part: Archive) -> State:
            whole = as_state(part)
            return replace(whole, items=[_masked(item, prune) for item in whole.items])

        def edit(config: Json, summary: Summary) -> Json:
            return described(config, summary, found, preset="lossless", dialect="slim")

        choose = measuring(presets.lossless, found)
        return Rewrite().run(
            archive, place(source), target, edit, choose=choose, dialect="slim", state=state
        )


def _masked(item: Item, prune: Callable[[Tensor], Tensor]) -> Item:
    layer = layer_of(item.name, item.spec)
    if layer is None or not is_linear(layer) or layer in _LEFT_OUT:
        return item

    def read(each: Each) -> Tensor:
        x = item.read(each)
        assert isinstance(x, Tensor), "an archive gives tensors"
        return prune(x)

    return replace(item, read=read)
