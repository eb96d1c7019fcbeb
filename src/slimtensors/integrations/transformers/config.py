"""What `config.json` says about compressed weights, as transformers wants it."""

from typing import Any

from transformers.quantizers import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from slimtensors.dialects import VERSION
from slimtensors.errors import ConfigError, UnsupportedVersionError, nearest
from slimtensors.spec import Json

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
