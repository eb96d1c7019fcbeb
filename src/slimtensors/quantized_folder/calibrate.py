"""Quantize a model folder with data: the model is built by transformers, and run on a text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.archive import Archive, save
from slimtensors.compressor import ModelCompressor
from slimtensors.container import SINGLE, StrPath, place
from slimtensors.errors import ConfigError, MissingDependencyError
from slimtensors.folder import without_any_section
from slimtensors.making import remake
from slimtensors.quantization import QuantizationConfig, QuantizationScheme, quantize_model
from slimtensors.quantized_folder.rewrite import Rewrite, main_dtype
from slimtensors.spec import Json
from slimtensors.summary import Summary


@dataclass(frozen=True)
class Calibration:
    """The data that a model is run on."""

    text: str
    samples: int = 128
    length: int = 512
    """Tokens per sample."""

    @classmethod
    def from_file(cls, path: StrPath) -> "Calibration":
        """Read a plain text."""
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        if not text.strip():
            raise ConfigError(f"{path}: is empty; calibration needs text")
        return cls(text)

    def batches(self, tokenizer: Any) -> list[dict[str, Tensor]]:
        """Return samples from all over the text, one per batch."""
        tokens = tokenizer(self.text, return_tensors="pt", truncation=False)["input_ids"][0]
        if not len(tokens):
            raise ConfigError("the tokenizer finds no token in the calibration text")
        length = min(self.length, len(tokens))
        count = min(self.samples, max(1, len(tokens) // length))
        step = (len(tokens) - length) // max(count - 1, 1)
        starts = [i * step for i in range(count)]
        return [{"input_ids": tokens[i : i + length][None]} for i in starts]


def calibrate_folder(
    source: StrPath,
    target: StrPath,
    config: QuantizationConfig,
    calibration: Calibration,
    *,
    method: str = "gptq",
    dtype: torch.dtype | None = None,
    work: StrPath | None = None,
    how: Rewrite | None = None,
) -> Summary:
    """Quantize a model folder layer by layer on a text, in the dialect `compressed-tensors`.

    The model is in memory as a whole, and runs in `dtype` if that is given; what is written is in
    its own dtype. In the folder `work`, finished layers are kept: a run that was killed goes on
    from there.
    """
    how = how or Rewrite()
    model, tokenizer = _built(source, dtype)
    if dtype is not None:
        with Archive(source, storage_options=how.storage_options) as archive:
            own = main_dtype(archive)
        config = _with_scales_in(config, own)
    batches = calibration.batches(tokenizer)
    quantize_model(model, config, calibration=batches, method=method, folder=work)
    compressor = ModelCompressor(quantization_config=config)
    state = compressor.compress(model)
    if dtype is not None:
        state = {name: x.to(own) if x.dtype is dtype else x for name, x in state.items()}

    def put(folder: Path) -> Summary:
        return save(
            state,
            folder if how.max_shard_size is not None else folder / SINGLE,
            preset="dense",
            max_shard_size=how.max_shard_size,
            threads=how.threads,
            progress=how.progress,
        )

    def edit(data: Json, _: Summary) -> Json:
        section: Json = model.config.quantization_config
        return {**without_any_section(data), "quantization_config": section}

    where = place(source, storage_options=how.storage_options)
    return remake(where, target, put, edit, sources=[source], replace=how.replace)


def _with_scales_in(config: QuantizationConfig, dtype: torch.dtype) -> QuantizationConfig:
    """Return a config whose scales are those that `dtype` can hold, where it says nothing else."""

    def scheme(old: QuantizationScheme) -> QuantizationScheme:
        if old.weights is None or old.weights.scale_dtype is not None:
            return old
        return replace(old, weights=replace(old.weights, scale_dtype=dtype))

    groups = {name: scheme(group) for name, group in config.config_groups.items()}
    return replace(config, config_groups=groups)


def _built(source: StrPath, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Return the model and its tokenizer; the class of the model is the one that saved it."""
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError("transformers", "transformers") from None
    kind = saved_class(source)
    model: nn.Module = kind.from_pretrained(source, dtype=dtype or "auto").eval()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source}: has no tokenizer, which calibration needs: {error}"
        ) from error
    return model, tokenizer


def saved_class(source: StrPath) -> Any:
    """Return the class of transformers that saved a model, which is in a folder or has a name."""
    import transformers

    names: Sequence[str] = transformers.AutoConfig.from_pretrained(source).architectures or ()
    if (kind := find_class(names)) is None:
        raise ConfigError(f"{source}: config.json names no class of transformers: {list(names)}")
    return kind


def find_class(names: Sequence[str]) -> Any | None:
    """Return the first of these classes that transformers has, if any."""
    import transformers

    return next(
        (getattr(transformers, name) for name in names if hasattr(transformers, name)), None
    )
