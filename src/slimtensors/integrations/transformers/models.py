"""Models as calls are given them: in memory, or in a folder or under a name, compressed or not."""

from typing import Any

import transformers
from torch import nn

from slimtensors.container import StrPath
from slimtensors.errors import ConfigError
from slimtensors.integrations.transformers.auto import sparse
from slimtensors.integrations.transformers.saving import enable
from slimtensors.quantized_folder.calibrate import saved_class
from slimtensors.tensors import CompressedTensor


def load_model(model: nn.Module | StrPath) -> Any:
    """Return a model with plain weights, by the class that saved it; one in memory as it is.

    One in memory whose weights are compressed there raises.
    """
    if isinstance(model, nn.Module):
        _check_plain(model)
        return model
    return enable(sparse(saved_class(model)).from_pretrained(model))


def load_tokenizer(model: nn.Module | StrPath) -> Any | None:
    """Return the tokenizer that comes with a folder or a name, if any."""
    where = model.name_or_path if hasattr(model, "name_or_path") else model
    if isinstance(where, nn.Module) or not where:
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError):
        return None


def _check_plain(model: nn.Module) -> None:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_missing = isinstance(module, nn.Linear) and not isinstance(weight, nn.Parameter)
        if is_missing or isinstance(weight, CompressedTensor):
            raise ConfigError(
                f"{name}: has no plain weight, as it is compressed in memory; pass the folder of"
                " the model, or load it by SparseAutoModel without run_compressed"
            )
