"""The config and quantizer that transformers calls for our folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightTransform
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from slimtensors.archive import Archive
from slimtensors.archive.dialects import VERSION
from slimtensors.errors import ConfigError, UnsupportedVersionError, nearest
from slimtensors.folder.convert import COMPRESSED_TENSORS, quantization_of
from slimtensors.tensor import Json, find_dtype
from slimtensors.transformers.loading import DecodedConverter, Reader, decoded, originals
from slimtensors.transformers.saving import Origin, enable_as
from slimtensors.transformers.weights import QUANTIZED, QuantizedFiles

METHOD = "slimtensors"


@register_quantization_config(METHOD)
class SlimConfig(QuantizationConfigMixin):
    """What a folder says about its compressed weights. For people: tensors describe themselves."""

    dequantize = True
    """Once loaded the model is an ordinary one, and transformers drops this section."""

    def __init__(
        self,
        *,
        quant_method: str = METHOD,
        version: int = VERSION,
        preset: str = "sparse",
        dtype: str | None = None,
        codecs: dict[str, int] | None = None,
        bits_per_weight: float | None = None,
        before: Json | None = None,
        run_compressed: bool = False,
        delta: Json | None = None,
        **unknown: Any,
    ) -> None:
        if delta is not None:
            raise ConfigError(
                f"holds a difference from {delta.get('base')!r}, not a model; restore it first:"
                " slimtensors restore DELTA --base BASE -o MODEL"
            )
        if version > VERSION:
            raise UnsupportedVersionError(
                f"config.json: quantization_config: written in format version {version}, this"
                f" library reads up to {VERSION}; upgrade slimtensors"
            )
        known = {"version", "preset", "dtype", "codecs", "bits_per_weight", "before"}
        known |= {"run_compressed"}
        for key in unknown:
            raise ConfigError(
                f"config.json: quantization_config: unknown key {key!r}; {nearest(key, known)}"
            )
        self.quant_method = quant_method
        self.version = version
        self.preset = preset
        self.dtype = dtype
        self.codecs = codecs or {}
        self.bits_per_weight = bits_per_weight
        self.before = before or {}
        self.run_compressed = run_compressed


@register_quantizer(METHOD)
class SlimQuantizer(HfQuantizer):
    """Loads a compressed folder into an ordinary model, tensor by tensor."""

    quantization_config: SlimConfig

    def __init__(self, quantization_config: SlimConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        if not self.pre_quantized:
            raise ConfigError(
                "SlimConfig says how a folder is stored and cannot compress one on loading; load"
                " it plainly, then slimtensors.transformers.enable(model, preset=...)"
            )
        known = (None, METHOD, COMPRESSED_TENSORS)
        for section in quantization_config.before.values():
            if isinstance(section, dict) and section.get("quant_method") not in known:
                raise ConfigError(
                    f"the weights were quantized ({section['quant_method']}) before they were"
                    " compressed, and only that format's loader knows them; run slimtensors"
                    " decompress and load the result"
                )
        self._quantization = quantization_of(quantization_config.before)
        self._reader: Reader | None = None
        self._device_map: dict[str, Any] | None = None

    def validate_environment(
        self, *, device_map: str | dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Take note of where the parts of the model go, as soon as transformers knows."""
        if isinstance(device_map, dict):
            self._device_map = device_map
            if self._reader:
                self._reader.device_map = device_map

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the weights where transformers took it from compressed bytes."""
        if dtype.is_floating_point and dtype.itemsize > 1:
            return dtype
        if self.quantization_config.dtype is None:
            raise ConfigError("config.json names no dtype; pass dtype= to from_pretrained")
        return find_dtype(self.quantization_config.dtype)

    def get_new_dtype(
        self, converter: WeightTransform, param: object, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """Take note of the dtype, for floats are not floats until they are decoded."""
        if isinstance(converter, DecodedConverter):
            converter.dtype, dtype = dtype, None
        return dtype

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], model: nn.Module
    ) -> list[WeightTransform]:
        """Put decoding before whatever else happens to a weight."""
        return decoded(weight_conversions, self._reader) if self._reader else weight_conversions

    def _process_model_before_weight_loading(
        self, model: nn.Module, *, checkpoint_files: list[str] | None = None, **_: Any
    ) -> nn.Module:
        if checkpoint_files:  # none if the caller brought weights of his own
            self._reader = Reader(
                checkpoint_files,
                self._device_map,
                run_compressed=self.quantization_config.run_compressed,
                view=self._viewed(model),
            )
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        files: tuple[Path, ...] = ()
        if self._reader:
            self._reader.finish(model)
            files = self._reader.files
            model._weight_conversions = originals(model._weight_conversions)
            if self._device_map and "disk" in self._device_map.values():
                model.tie_weights(recompute_mapping=False)  # which are two files on the disk
        is_quantized = self._quantization is not None
        preset = QUANTIZED if is_quantized else self.quantization_config.preset
        enable_as(model, Origin(preset, files, self._quantization))
        return model

    def _viewed(self, model: nn.Module) -> Callable[[Archive], Archive | QuantizedFiles]:
        """Return what makes of the files those that hold the weights of the model."""
        config = self._quantization
        if config is None:
            return lambda archive: archive
        return lambda archive: QuantizedFiles(archive, config, model)

    def is_serializable(self) -> bool:
        """Say that such a model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Say that such a model can be trained: its weights are plain."""
        return True
