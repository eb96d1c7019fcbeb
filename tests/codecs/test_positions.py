import numpy as np
import pytest
import torch

from slimtensors import codecs
from slimtensors.codecs import plan
from slimtensors.codecs.plan import Plan, chain
from slimtensors.codecs.presets import choose_mask_plan

CANDIDATES = {
    "None": None,
    "huffman": Plan(codecs.Huffman()),
    "gaps(tokens=huffman)": chain(codecs.Gaps(), tokens=codecs.Huffman()),
    "density": Plan(codecs.Density()),
}


def size(mask, how):
    if how is None:
        return mask.nbytes
    return sum(part.nbytes for _, part in plan.encode(how, mask).leaves())


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.06, 0.1, 0.15, 0.3, 0.4, 0.5, 0.7, 0.99])
@pytest.mark.parametrize("shape", [(384, 48), (768, 384)])
def test_the_chosen_plan_is_close_to_the_smallest(shape, share):
    bits = np.random.default_rng(1).random((shape[0], 8 * shape[1])) < share
    mask = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little"))
    sizes = {name: size(mask, how) for name, how in CANDIDATES.items()}
    for effort, slack in (("fast", 1.03), ("max", 1.005)):
        chosen = choose_mask_plan(int(bits.sum()), bits.size, effort)
        best = min(n for name, n in sizes.items() if effort == "max" or name != "density")
        assert sizes[str(chosen)] <= slack * best + 300, (effort, sizes)
        if chosen is not None:
            assert chosen.to_json() == CANDIDATES[str(chosen)].to_json()


@pytest.mark.parametrize("effort", ["fast", "max"])
def test_masks_too_small_to_gain_are_stored_unchanged(effort):
    assert choose_mask_plan(0, 0, effort) is None
    assert choose_mask_plan(3, 64, effort) is None
    assert choose_mask_plan(1000, 2000, effort) is None


def test_random_masks_are_stored_unchanged_by_fast_presets():
    assert choose_mask_plan(500_000, 1_000_000, "fast") is None


def test_sparse_masks_take_gaps_and_denser_ones_bytes():
    assert str(choose_mask_plan(60_000, 1_000_000, "fast")) == "gaps(tokens=huffman)"
    assert str(choose_mask_plan(300_000, 1_000_000, "fast")) == "huffman"
    assert str(choose_mask_plan(60_000, 1_000_000, "max")) == "density"
