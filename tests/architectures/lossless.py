"""Compare a model loaded from its lossless folder with the dense load."""

import json
from pathlib import Path

import torch
from strategies import aligned, same_bits, same_results
from torch import Tensor

from slimtensors.folder.compress import compress_folder, decompress_folder
from slimtensors.transformers import enable

INFO = ("missing_keys", "unexpected_keys", "mismatched_keys")


def check_lossless(model, inputs, folder: Path, *, by_folder: bool) -> list[str]:
    """Return every difference between the dense load of a model and the load of ours.

    Args:
        model: model with the weights to store.
        inputs: arguments of its forward pass, or None for a model that is not run.
        folder: empty folder to write to.
        by_folder: write by `compress_folder`, or else by `save_pretrained`.
    """
    cls = type(model)
    model.save_pretrained(folder / "dense")
    if by_folder:
        compress_folder(folder / "dense", folder / "ours")
    else:
        enable(model, preset="lossless").save_pretrained(folder / "ours")
    dense, dense_info = _load(cls, folder / "dense")
    ours, our_info = _load(cls, folder / "ours")
    problems = [f"{kind} differ" for kind in INFO if dense_info[kind] != our_info[kind]]
    initialized = dense_info["missing_keys"] | {name for name, *_ in dense_info["mismatched_keys"]}
    problems += _compare_weights(dense, ours, initialized)
    problems += _compare_saved(dense, ours, folder)
    if inputs is not None and not problems:
        problems += _compare_outputs(dense, ours, inputs)
    return problems


def _load(cls, folder: Path):
    torch.manual_seed(0)  # weights that are not stored are initialized
    return cls.from_pretrained(folder, output_loading_info=True)


def _compare_weights(dense, ours, initialized: set[str]) -> list[str]:
    def list_tensors(model) -> dict[str, Tensor]:
        named = (model.named_parameters, model.named_buffers)
        return {name: x for list_named in named for name, x in list_named(remove_duplicate=False)}

    def list_ties(model) -> set[frozenset[str]]:
        by_id: dict[int, set[str]] = {}
        for name, x in model.named_parameters(remove_duplicate=False):
            by_id.setdefault(id(x), set()).add(name)
        return set(map(frozenset, by_id.values()))

    expected, found = list_tensors(dense), list_tensors(ours)
    if expected.keys() != found.keys():
        return [f"other names: {sorted(expected.keys() ^ found.keys())[:3]}"]
    problems = [
        f"{name} differs: {x.dtype} {tuple(x.shape)}, got {found[name].dtype}"
        for name, x in expected.items()
        if name not in initialized and not same_bits(x, found[name])
    ]
    problems += [
        f"{name}: requires_grad differs"
        for name, x in expected.items()
        if x.requires_grad != found[name].requires_grad
    ]
    if list_ties(dense) != list_ties(ours):
        problems.append("ties differ")
    if _describe(dense) != _describe(ours):
        problems.append("configs differ")
    return problems


def _describe(model) -> dict[str, object]:
    return {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"}


def _compare_saved(dense, ours, folder: Path) -> list[str]:
    """Save both again: dense, and as they were loaded."""
    problems = []
    dense.save_pretrained(folder / "dense-again")
    expected = _read_data(folder / "dense-again")
    ours.save_pretrained(folder / "ours-dense", save_compressed=False, skip_compression_stats=True)
    if _read_data(folder / "ours-dense") != expected:
        problems.append("saved dense, the weights differ")
    ours.save_pretrained(folder / "ours-again")
    decompress_folder(folder / "ours-again", folder / "ours-restored")
    if _read_data(folder / "ours-restored") != expected:
        problems.append("saved compressed, the weights differ")
    # transformers may load a weight in another dtype than that of its file.
    is_stable = _read_data(folder / "dense") == expected
    if is_stable and _read_data(folder / "ours-again") != _read_data(folder / "ours"):
        problems.append("saved compressed, the bytes differ")
    return problems


def _read_data(folder: Path) -> dict[str, dict[str, tuple[str, list[int], memoryview]]]:
    """Return dtype, shape and bytes of every tensor in the weight files."""
    files = {}
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        header.pop("__metadata__", None)
        data = memoryview(raw)[start:]
        files[path.name] = {
            name: (x["dtype"], x["shape"], data[slice(*x["data_offsets"])])
            for name, x in header.items()
        }
    return files


@torch.no_grad()
def _compare_outputs(dense, ours, inputs) -> list[str]:
    results = []
    for model in (dense, ours):
        torch.manual_seed(0)
        try:
            results.append(list(_flatten(aligned(model.eval())(**inputs))))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    expected, found = results
    if isinstance(expected, str):  # an architecture whose tiny model does not run
        return [] if expected == found else [f"forward: {found}, expected {expected}"]
    if isinstance(found, str):
        return [f"forward: {found}"]
    is_same = len(expected) == len(found) and all(map(_is_same_output, expected, found))
    return [] if is_same else ["outputs differ"]


def _flatten(output):
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from (x for value in output.values() for x in _flatten(value))
    elif isinstance(output, list | tuple):
        yield from (x for value in output for x in _flatten(value))


def _is_same_output(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    if a.dtype == torch.float64:
        a, b = a.float(), b.float()
    is_finite = a.isfinite()
    return torch.equal(is_finite, b.isfinite()) and same_results(a[is_finite], b[is_finite])
