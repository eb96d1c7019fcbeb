"""vLLM plug-in: vLLM's own loader, with compressed tensors decoded as they are read.

vLLM calls `register`, the entry point `vllm.general_plugins` of this package, in each of its
processes. This module does not import vLLM; the classes that extend it are in `vllm_loader`.
"""

import logging
import re
from functools import cache

from slimtensors.folder.config_json import (
    SECTIONS,
    read_method,
    read_quantization_section,
    read_sparsity_section,
    remove_compression,
)
from slimtensors.tensor import Json

TESTED = ("0.28", "0.32")
"""Oldest and newest version of vLLM that the tests run."""

_LOG = logging.getLogger(__name__)


def register() -> None:
    """Register our loader and our `quant_method`; log a warning if this vLLM does not allow it.

    Never raises: after an exception in a plug-in, vLLM starts no model, dense ones included.
    """
    try:
        from slimtensors.integrations.vllm_loader import register_classes

        register_classes()
    except Exception as error:  # vLLM guarantees no interface: anything may be missing or differ
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        _warn_once(f"slimtensors is disabled in vLLM {vllm_version()} ({reason})")
    else:
        if not is_tested(version := vllm_version()):
            _warn_once(f"slimtensors supports vLLM {' to '.join(TESTED)}; untested with {version}")


@cache
def _warn_once(message: str) -> None:
    """Log a warning, once per process."""
    _LOG.warning(message)


def vllm_version() -> str:
    """Return the version of the installed vLLM, or "(unknown version)"."""
    try:
        import vllm

        return str(vllm.__version__)
    except Exception:  # called while an error is handled, which must not be replaced
        return "(unknown version)"


def is_tested(version: str) -> bool:
    """Return True if a version is in the tested range."""
    oldest, found, newest = (
        tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (TESTED[0], version, TESTED[1])
    )
    return oldest <= found <= newest


def restore_section(section: Json) -> Json | None:
    """Return the `quantization_config` from before compression; None if it is not one of ours.

    Empty if the weights were not quantized.
    """
    config = {"quantization_config": section}
    before = remove_compression(config)
    if before == config:
        return None
    restored = read_quantization_section(before)
    return restored and {**restored, "quant_method": read_method(restored)}


def has_sparse_parts(hf_config: object) -> bool:
    """Return True if weights may be stored in the parts of the dialect `compressed-tensors`."""
    config = {key: getattr(hf_config, key, None) for key in SECTIONS}
    return "bitmask" in str(read_sparsity_section(config).get("format"))
