"""Recognize sources that are not safetensors, and say how to make them readable."""

import re
from collections.abc import Sequence

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLE = re.compile(r".*model.*\.bin|.*\.(pt|pth|ckpt)")
_SHARD = re.compile(r"-\d+-of-\d+\.")
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]{8}")

_LOAD_PICKLE = (
    "python -c \"import torch, slimtensors; slimtensors.save(torch.load('{0}', weights_only=True),"
    " '{1}', preset='dense')\""
)


def explain_missing(path: str) -> str:
    """Return why nothing was found at `path`, and what to do if it is the name of a model."""
    if _HUB_NAME.fullmatch(path):
        name = path.partition("/")[2]
        return (
            f"{path}: no such file or folder; if this is a model on the Hugging Face Hub, download"
            f" it first: hf download {path} --local-dir {name}"
        )
    return f"{path}: no such file or folder"


def explain_file(start: bytes, name: str) -> str | None:
    """Return what the file `name` is, from its first bytes; None if they are not recognized."""
    if start.startswith((b"PK", b"\x80\x02", b"\x80\x04")):  # a zip file, or a bare pickle
        if name.endswith((".zip", ".npz", ".keras")):
            return "not a safetensors file (zip archive)"
        return (
            "not a safetensors file (probably a torch.save file); convert it with "
            + _LOAD_PICKLE.format(name, "model.safetensors")
        )
    if start.startswith(b"GGUF"):
        return (
            "not a safetensors file (GGUF, which is not supported yet); use the safetensors files"
            " of the same model, or load it with transformers (gguf_file=...) and call"
            " save_pretrained"
        )
    if start.startswith(b"version "):
        return "not a safetensors file (probably a Git LFS pointer); run git lfs pull"
    if start.lower().startswith((b"<!doctyp", b"<html")):
        return "not a safetensors file (HTML page, probably a failed download); download it again"
    if _TEXT.match(start):
        return "not a safetensors file (text)"
    return None


def explain_folder(folder: str, files: Sequence[str], inner: Sequence[str]) -> str | None:
    """Return what a folder is if it is not a model; None if there is no known reason.

    `files` are the names of its files, `inner` the relative paths of all files.
    """
    if "adapter_config.json" in files:
        return (
            f"{folder} is a LoRA adapter, not a model; merge it into its base with peft"
            " (merge_and_unload, save_pretrained), or name its file, such as"
            f" {folder}/adapter_model.safetensors"
        )
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in files):
        return None
    parts = sorted({p.rpartition("/")[0] for p in inner if p.endswith(".safetensors")} - {""})
    if "model_index.json" in files:
        part = parts[0] if parts else "unet"
        return (
            f"{folder} is a diffusers pipeline; compress its models one by one:"
            f" slimtensors compress {folder}/{part} -o OUT/{part}"
        )
    if any(path.count("/") == 1 and path.endswith("/checkpoint.json") for path in inner):
        return (
            f"{folder} is a run with checkpoints, not a model; use inspect or verify, or load one"
            " with slimtensors.checkpoint.load_checkpoint"
        )
    return _explain_weights(folder, files, parts)


def _explain_weights(folder: str, files: Sequence[str], parts: Sequence[str]) -> str | None:
    pickles = [name for name in files if _PICKLE.fullmatch(name)]
    if any(map(_SHARD.search, pickles)):
        return (
            f"{folder} contains PyTorch weights ({pickles[0]}, ...), not safetensors; load the"
            " model with transformers and call save_pretrained"
        )
    if pickles:
        return (
            f"{folder} contains PyTorch weights ({pickles[0]}), not safetensors; convert them with "
            + _LOAD_PICKLE.format(f"{folder}/{pickles[0]}", f"{folder}/model.safetensors")
        )
    for name in files:
        if name.endswith(".gguf"):
            return (
                f"{folder} contains a GGUF file ({name}), which is not supported yet; use the"
                " safetensors files of the same model"
            )
    if not files and not parts:
        return f"{folder} contains no files"
    if parts:
        return f"{folder} contains no model, but {', '.join(parts[:8])} in it may; name one of them"
    return None
