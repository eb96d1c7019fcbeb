"""Real optimizers resume bit for bit, with torch.save as the control in the same run."""

import io
from functools import partial

import pytest
import torch
from checkpoint.optimizer_cases import list_cases
from training import copy_state, equal_states, find_strides

from slimtensors.checkpoint import (
    build_checkpoint,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from slimtensors.checkpoint.state import capture_rng, restore_rng
from slimtensors.errors import UnsupportedTensorError

pytestmark = pytest.mark.filterwarnings("ignore")  # of the optimizers

FLOAT, BFLOAT = torch.float32, torch.bfloat16
CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last
DTYPES, FORMATS = (FLOAT, BFLOAT), (CONTIGUOUS, CHANNELS_LAST)

IN_BF16 = {(BFLOAT, CONTIGUOUS), (BFLOAT, CHANNELS_LAST)}
IN_CHANNELS_LAST = {(FLOAT, CHANNELS_LAST), (BFLOAT, CHANNELS_LAST)}
ALWAYS = {(dtype, memory_format) for dtype in DTYPES for memory_format in FORMATS}

CANNOT_TRAIN = {
    "torch.LBFGS": IN_CHANNELS_LAST,  # calls view(-1)
    "pytorch_optimizer.AdaMuon": IN_CHANNELS_LAST,
    "pytorch_optimizer.AdamP": IN_CHANNELS_LAST,
    "pytorch_optimizer.Nero": IN_CHANNELS_LAST,
    "pytorch_optimizer.SGDP": IN_CHANNELS_LAST,
    "pytorch_optimizer.SWATS": IN_CHANNELS_LAST,
    "pytorch_optimizer.LoRARite": IN_BF16,  # torch has no such decomposition in bf16
    "pytorch_optimizer.TRAC": IN_BF16,  # multiplies bf16 by fp32
    "pytorch_optimizer.DeMo": ALWAYS,  # needs einops
}
"""Classes that cannot train the model in a dtype or memory format, with or without checkpoints."""

NOT_REPRODUCIBLE = {"torch.SGD(fused)": IN_BF16}
"""Classes with which two equal runs give different weights."""

TORCH_DIFFERS = {
    "torch.ASGD": IN_BF16,
    "torch.NAdam": IN_BF16,
    "pytorch_optimizer.Kron": IN_BF16,
    "pytorch_optimizer.NAdam": IN_BF16,
    "pytorch_optimizer.QHAdam": IN_BF16,
    "transformers.Adafactor": IN_BF16,
}
"""Classes that do not resume bit for bit by torch.save, because torch casts float32 states."""

REFUSED = {
    "pytorch_optimizer.Conda": r"optimizer\.state\.6\.projector: .*GaLoreProjector",
    "pytorch_optimizer.ScalableShampoo": r"state\.0\.pre_conditioner: .*PreConditioner",
}
"""Classes whose states contain objects of their own, which would need pickle."""


def capture(model, optimizer):
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


class Resumed:
    """A training run that was saved, continued, and can be restored in several ways."""

    def __init__(self, case, dtype, memory_format, folder):
        self.case, self.dtype, self.memory_format = case, dtype, memory_format
        self.folder, self.file = folder, io.BytesIO()
        model, optimizer = self.start(0)
        case.train(model, optimizer, range(2))
        save_checkpoint(build_checkpoint(model, optimizer), folder / "first")
        case.train(model, optimizer, range(2, 5))
        state = build_checkpoint(model, optimizer)
        save_checkpoint(state, folder / "whole")
        save_checkpoint(state, folder / "delta", base=folder / "first")
        torch.save(capture(model, optimizer) | {"rng": capture_rng()}, self.file)
        self.saved = copy_state(capture(model, optimizer))
        self.strides = find_strides(capture(model, optimizer))
        self.result = self.finish(model, optimizer)

    def start(self, seed):
        return self.case.start(seed, self.dtype, self.memory_format)

    def finish(self, model, optimizer):
        self.case.train(model, optimizer, range(5, 8))
        return copy_state(capture(model, optimizer))

    def find_difference(self, restore):
        """Return what differs after `restore(model, optimizer)` and more training, or ''."""
        model, optimizer = self.start(1)
        restore(model, optimizer)
        restored = capture(model, optimizer)
        if not equal_states(restored, self.saved):
            return "the restored state differs"
        if find_strides(restored) != self.strides:
            return "strides differ"
        result = self.finish(model, optimizer)
        is_equal = self.result is None or equal_states(result, self.result)
        return "" if is_equal else "training differs"

    def restore_checkpoint(self, name, model, optimizer):
        restore_checkpoint(load_checkpoint(self.folder / name), model, optimizer)

    def load_torch(self, model, optimizer):
        self.file.seek(0)
        state = torch.load(self.file, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        restore_rng(state["rng"])


def can_train(case, dtype, memory_format):
    try:
        case.train(*case.start(0, dtype, memory_format), range(8))
    except Exception:
        return False
    return True


def check_case(name, dtype, memory_format, folder):
    """Raise unless a run resumes bit for bit, or is listed above."""
    case, where = list_cases()[name], (dtype, memory_format)
    if not can_train(case, *where):
        assert where in CANNOT_TRAIN.get(name, ()), "cannot train"
        return
    if name in REFUSED:
        with pytest.raises(UnsupportedTensorError, match=REFUSED[name]):
            Resumed(case, *where, folder)
        return
    run = Resumed(case, *where, folder)
    if where in NOT_REPRODUCIBLE.get(name, ()):
        run.result = None
    for kind in ("whole", "delta"):
        difference = run.find_difference(partial(run.restore_checkpoint, kind))
        assert not difference, f"{kind}: {difference}"
    try:
        difference = run.find_difference(run.load_torch)
    except RuntimeError as error:
        difference = str(error)
    assert bool(difference) == (where in TORCH_DIFFERS.get(name, ())), f"torch: {difference}"


FEW = [
    ("torch.AdamW(fused)", FLOAT, CHANNELS_LAST),
    ("torch.SGD(fused)", FLOAT, CHANNELS_LAST),
    ("torch.Adafactor", FLOAT, CHANNELS_LAST),
    ("torch.LBFGS", FLOAT, CONTIGUOUS),
    ("torch.Muon", BFLOAT, CHANNELS_LAST),
    ("torch.SparseAdam", FLOAT, CONTIGUOUS),
    ("pytorch_optimizer.MADGRAD", FLOAT, CONTIGUOUS),
    ("pytorch_optimizer.Lookahead", BFLOAT, CHANNELS_LAST),
    ("pytorch_optimizer.SCION", FLOAT, CONTIGUOUS),
    ("pytorch_optimizer.ScheduleFreeWrapper", BFLOAT, CONTIGUOUS),
    ("pytorch_optimizer.Conda", FLOAT, CONTIGUOUS),
    ("transformers.Adafactor", BFLOAT, CONTIGUOUS),
]


@pytest.mark.parametrize(("name", "dtype", "memory_format"), FEW, ids=[name for name, *_ in FEW])
def test_an_optimizer_resumes_bit_for_bit(tmp_path, name, dtype, memory_format):
    check_case(name, dtype, memory_format, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("memory_format", FORMATS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_every_optimizer_resumes_bit_for_bit(tmp_path, dtype, memory_format):
    failures = {}
    for name in list_cases():
        try:
            check_case(name, dtype, memory_format, tmp_path / name)
        except Exception as error:
            failures[name] = str(error).partition("\n")[0]
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())
