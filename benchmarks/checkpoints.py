"""Size and speed of checkpoints of two models in training, compared with other tools.

    python benchmarks/checkpoints.py FOLDER        # trains first, if FOLDER has no states

Peers zipnn and zstandard are optional.
"""

import io
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measure import MB, Report, Timing, interleaved, options
from safetensors.torch import save_file
from training import states

from slimtensors.archive.tree import flatten
from slimtensors.checkpoint import load_checkpoint, save_checkpoint
from slimtensors.checkpoint.loop import Snapshot

State = dict[str, Any]

PAIRS = {"gpt": (1000, 1020), "gpt-bf16": (1040, 1060), "minilm": (60, 110)}
"""Steps of a base and a later state: 20 steps of pre-training, 50 of fine-tuning."""

TIMED = ("gpt", "minilm")

ALONE = {"gpt": 0.84, "gpt-bf16": 0.70, "minilm": 0.84}
"""Largest size of an exact checkpoint relative to torch.save."""

TARGETS = {
    "gpt": {"exact": 1 / 0.73, "optimizer-bf16": 2.5, "optimizer": 3.3, "all": 10, "history": 14},
    "gpt-bf16": {"exact": 1 / 0.70},
    "minilm": {
        "exact": 1 / 0.45,
        "optimizer-bf16": 3.5,
        "optimizer": 3.3,
        "all": 13,
        "history": 14,
    },
}


def plain_bytes(state: State) -> int:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getbuffer().nbytes


def peers(state: State, folder: Path) -> dict[str, int]:
    """Return the sizes of a state compressed by peers."""
    tensors, _ = flatten(state)
    contiguous = {name: x.contiguous().clone() for name, x in tensors.items()}
    save_file(contiguous, folder / "peer.safetensors")
    found = {
        "torch.save": plain_bytes(state),
        "safetensors": (folder / "peer.safetensors").stat().st_size,
        "trainweights' scheme (weights int8 in blocks of 64)": sum(
            x.numel() + 4 * -(-x.numel() // 64) if name.startswith("model.") else x.nbytes
            for name, x in contiguous.items()
        ),
    }
    if find_spec("zstandard"):
        import zstandard

        buffer = io.BytesIO()
        torch.save(state, buffer)
        found["torch.save + zstd-3"] = len(zstandard.compress(buffer.getvalue(), 3))
    if find_spec("zipnn"):
        from zipnn import ZipNN

        found["zipnn"] = sum(
            len(_zipnn(ZipNN, x)) if x.is_floating_point() and x.dim() else x.nbytes
            for x in contiguous.values()
        )
    return found


def _zipnn(coder: Any, x: torch.Tensor) -> bytes:
    dtype = "float32" if x.element_size() == 4 else "bfloat16"
    raw = bytearray(x.view(torch.uint8).numpy().tobytes())
    return coder(input_format="byte", bytearray_dtype=dtype).compress(raw)


def sizes(report: Report, name: str, base: State, state: State, folder: Path) -> None:
    plain = plain_bytes(state)
    print(f"\n{name}: {plain / MB:.1f} MB by torch.save")
    for peer, size in peers(state, folder).items():
        print(f"  {peer:56}{size / plain:8.4f}{plain / size:8.2f}x")
        report.rows.append({"group": name, "case": peer, "of_torch_save": size / plain})
    alone = save_checkpoint(base, folder / "base").manifest.bytes / plain_bytes(base)
    report.at_most(f"{name}: exact, alone, of torch.save", alone, ALONE[name])
    for profile, target in TARGETS[name].items():
        saved = save_checkpoint(state, folder / profile, base=folder / "base", profile=profile)
        report.at_least(f"{name}: {profile}, smaller", plain / saved.manifest.bytes, target)
    weights = {"model": state["model"]}
    saved = save_checkpoint(weights, folder / "int8", quantize_i8=True)
    report.at_most(f"{name}: int8, largest error", max(saved.errors.values()), 0.007, "relative")
    dense = sum(x.nbytes for x in state["model"].values())
    if name != "gpt-bf16":
        report.at_most(f"{name}: int8, of the weights", saved.manifest.bytes / dense, 0.26)
        return
    few = {"model": _touched(state["model"], 0.019)}
    save_checkpoint(weights, folder / "few-base")
    delta = save_checkpoint(few, folder / "few", base=folder / "few-base")
    smaller = plain_bytes(few) / delta.manifest.bytes
    report.at_least(f"{name}: weights of which 1.9 % changed, smaller", smaller, 30)


def _touched(weights: State, fraction: float) -> State:
    """Return weights of which some are moved to an adjacent float."""
    random = torch.Generator().manual_seed(0)

    def moved(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        chosen = torch.rand(x.shape, generator=random) < fraction
        return (x.view(torch.int16) + chosen.to(torch.int16)).view(x.dtype)

    return {name: moved(x) for name, x in weights.items()}


def speed(report: Report, name: str, base: State, state: State, folder: Path) -> None:
    plain = plain_bytes(state)
    torch.save(state, folder / "plain.pt")
    save_checkpoint(state, folder / "loaded")
    path = folder / "speed"

    def anew() -> None:
        shutil.rmtree(path, ignore_errors=True)
        (folder / "speed.pt").unlink(missing_ok=True)

    def ours(what: State = state, **how: Any) -> Callable[[], object]:
        return lambda: save_checkpoint(what, path, **how)

    def zstd() -> None:
        import zstandard

        buffer = io.BytesIO()
        torch.save(state, buffer)
        (folder / "speed.pt").write_bytes(zstandard.compress(buffer.getvalue(), 3))

    cases = {
        "torch.save": lambda: torch.save(state, folder / "speed.pt"),
        **({"torch.save + zstd-3": zstd} if find_spec("zstandard") else {}),
        "exact, alone": ours(),
        "exact, delta": ours(base=folder / "base"),
        "all, delta": ours(base=folder / "base", profile="all"),
        "torch.load": lambda: torch.load(folder / "plain.pt"),
        "load": lambda: load_checkpoint(folder / "loaded"),
        "int8 (weights only)": ours({"model": state["model"]}, quantize_i8=True),
    }
    timings = interleaved(cases, 5, slow={"torch.save + zstd-3": 3}, before=anew)
    report.table(f"{name}: time", timings, size=plain)
    if "torch.save + zstd-3" in timings:
        times = timings["torch.save + zstd-3"].best / timings["exact, alone"].best
        report.at_least(f"{name}: save, times torch.save + zstd-3", times, 3)
    ratio = timings["load"].best / timings["torch.load"].best
    report.at_most(f"{name}: load, times torch.load", ratio, 1.5)
    dense = sum(x.nbytes for x in state["model"].values())
    rate = dense / timings["int8 (weights only)"].best / MB
    report.at_least(f"{name}: int8, of trainweights' 4.3 MB/s", rate / 4.3, 100)
    stall = _stall(state)
    report.table(f"{name}: stall", stall, size=plain, against="a plain copy")
    ratio = stall["a snapshot"].best / stall["a plain copy"].best
    report.at_most(f"{name}: stall, times a plain copy", ratio, 1.2)


def _stall(state: State) -> dict[str, Timing]:
    """Time a snapshot and a copy of the tensors, both into mapped memory."""
    tensors, _ = flatten(state)
    copies = {name: x.clone() for name, x in tensors.items()}
    snapshot = Snapshot()

    def copy() -> None:
        for name, x in tensors.items():
            copies[name].copy_(x)

    return interleaved({"a plain copy": copy, "a snapshot": lambda: snapshot.take(state)}, 15)


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=PAIRS, action="append")
    chosen = parser.parse_args()
    report = Report("checkpoints", quick=chosen.quick)
    for name in chosen.only or PAIRS:
        paths = states(name, chosen.folder)
        base, state = (torch.load(paths[step]) for step in PAIRS[name])
        with tempfile.TemporaryDirectory() as folder:
            sizes(report, name, base, state, Path(folder))
            if not chosen.quick and name in TIMED:
                speed(report, name, base, state, Path(folder))
    report.finish()


if __name__ == "__main__":
    main()
