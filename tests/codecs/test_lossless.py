import pytest
import torch

import slimtensors
from slimtensors.codecs import presets
from slimtensors.errors import CorruptFileError
from slimtensors.tensor import Spec, as_bytes


def same_bits(a, b):
    return Spec.of(a) == Spec.of(b) and torch.equal(as_bytes(a), as_bytes(b))


def weights(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 0.02


def pruned(x, share):
    keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) >= share
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype))


def plan_of(x):
    return str(presets.lossless("x", x).plan)


def test_tensors_too_small_for_a_description_are_not_tried():
    x = weights(511)
    assert presets.lossless("x", x).plan is None
    assert plan_of(weights(512)) == "huffman"
    assert plan_of(pruned(x, 0.5)).startswith("bitmask")


def test_dense_tensors_are_coded_and_sparse_ones_masked_first():
    masked = "bitmask(mask=huffman, values=huffman)"
    x = weights(512, 512)
    assert plan_of(x) == plan_of(pruned(x, 0.01)) == "huffman"
    assert plan_of(pruned(x, 0.1)) == plan_of(pruned(x, 0.9)) == masked
    assert plan_of(pruned(x, 0.5).mul(2000).to(torch.int8)) == "huffman"
    assert plan_of(pruned(x, 0.9).mul(2000).to(torch.int8)) == masked


@pytest.mark.parametrize("share", [0.0, 0.02, 0.05, 0.3, 0.7, 0.97])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_plan_is_within_a_hundredth_of_the_best(share, dtype):
    x = pruned(weights(1024, 512), share)
    x = (x * 1000).to(dtype) if dtype is torch.int8 else x.to(dtype)
    sizes = {}
    for plan in (presets.Plan(presets.Huffman()), masked_plan(), presets.lossless("x", x).plan):
        encoded = slimtensors.codecs.plan.encode(plan, x)
        sizes[str(plan)] = sum(leaf.nbytes for _, leaf in encoded.leaves())
    assert sizes[plan_of(x)] <= 1.017 * min(sizes.values())


def masked_plan():
    coded = presets.Huffman()
    return slimtensors.chain(presets.Bitmask(), mask=coded, values=coded)


def test_negative_zeros_are_kept_and_mentioned():
    x = pruned(weights(256, 256), 0.5)
    x[:, ::7] = -0.0
    choice = presets.lossless("x", x)
    assert "-0.0" in choice.note


@pytest.mark.parametrize("largest", [1e-300, 1e-40, 1e300, float("inf"), float("nan")])
def test_tensors_out_of_the_range_of_scales_are_not_rounded(tmp_path, largest):
    x = weights(64, 64).double() / 0.02 * (1 if largest > 1 else largest)
    x[3, 5] = largest
    summary = slimtensors.save({"x": x}, tmp_path / "x", preset="extreme")
    assert f"its largest item, {x.abs().max():g}," in summary.tensors[0].note
    assert same_bits(slimtensors.load(tmp_path / "x")["x"], x)


def test_all_tensors_round_trip_through_a_file(tmp_path):
    x = weights(300, 700)
    tensors = {
        "bf16": x.bfloat16(),
        "half": x.half(),
        "sparse": pruned(x, 0.8),
        "negative": -pruned(x, 0.8),
        "double": x.double(),
        "complex": torch.complex(x, -x),
        "int8": (x * 1000).to(torch.int8),
        "fp8": (x * 100).to(torch.float8_e4m3fn),
        "ids": torch.arange(20_000),
        "mask": x > 0.01,
        "bias": x[0].clone(),
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
    }
    summary = slimtensors.save(tensors, tmp_path / "x.safetensors", preset="lossless")
    back = slimtensors.load(tmp_path / "x.safetensors")
    assert all(same_bits(back[name], tensor) for name, tensor in tensors.items())
    how = {stored.name: stored.codec for stored in summary.tensors}
    assert how["bf16"] == how["ids"] == "huffman"
    assert how["scalar"] == how["nothing"] == "plain"


def test_damage_names_the_tensor(tmp_path):
    path = tmp_path / "x.safetensors"
    slimtensors.save({"layer.weight": weights(400, 400)}, path, preset="lossless")
    raw = bytearray(path.read_bytes())
    raw[-1000] ^= 4
    path.write_bytes(raw)
    with pytest.raises(CorruptFileError, match=r"layer\.weight.*checksum"):
        slimtensors.load(path)
