"""A tokenizer whose tokens are bytes, in the files that transformers reads."""

from pathlib import Path

from slimtensors.container import write_json
from slimtensors.spec import Json

_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that tokenizers on bytes write as the character of that number; others get one above."""


def write_byte_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and its config: the number of a token is that of its byte."""
    level: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = False
    model = {"type": "BPE", "vocab": _characters(), "merges": []}
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": model,
        },
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", config)


def _characters() -> dict[str, int]:
    hidden = [byte for byte in range(256) if byte not in _SHOWN]
    shown = {chr(byte): byte for byte in _SHOWN}
    return shown | {chr(256 + i): byte for i, byte in enumerate(hidden)}
