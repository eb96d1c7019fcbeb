"""Presets, plans and preset functions, and their effect on the summary."""

import pytest
import torch
from archive.made import sparse, stored
from strategies import same_bits, same_tensors

import slimtensors
from slimtensors.archive import estimate
from slimtensors.codecs.bitmask import Bitmask
from slimtensors.codecs.bitmask24 import Bitmask24
from slimtensors.codecs.dense import Dense
from slimtensors.codecs.plan import chain
from slimtensors.codecs.presets import Choice
from slimtensors.errors import ConfigError, UnknownCodecError


def test_a_preset_is_chosen_by_name(tensors, path):
    codecs = {
        preset: {t.name: t.codec for t in slimtensors.save(tensors, path, preset=preset).tensors}
        for preset in ("dense", "sparse", "bitmask", "bitmask24")
    }
    assert set(codecs["dense"].values()) == {"plain"}
    assert codecs["sparse"]["a.weight"] == "bitmask"
    assert codecs["sparse"]["b.weight"] == "bitmask24"
    assert codecs["bitmask"]["b.weight"] == "bitmask"
    assert codecs["bitmask24"]["a.weight"] == "plain"
    assert codecs["bitmask24"]["b.weight"] == "bitmask24"


def test_a_plan_is_applied_to_every_tensor_that_it_makes_smaller(tensors, path):
    plan = chain(Bitmask(), values=chain(Bitmask(), mask=Dense()))
    summary = slimtensors.save(tensors, path, preset=plan)
    assert stored(summary, "a.weight").codec == "bitmask(values=bitmask(mask=dense))"
    assert stored(summary, "norm").codec == "plain"
    assert "would take" in stored(summary, "norm").note
    assert same_tensors(slimtensors.load(path), tensors)


def test_a_plan_that_does_not_support_a_tensor_raises_with_its_name(tensors, path):
    x = {"a.weight": tensors["a.weight"]}
    with pytest.raises(ConfigError, match=r"a\.weight: not 2:4 sparse"):
        slimtensors.save(x, path, preset=chain(Bitmask24()))
    with pytest.raises(ConfigError, match=r"0-d: 2:4 sparsity needs .* got shape \(\)"):
        slimtensors.save(tensors, path, preset=chain(Bitmask24()))
    with pytest.raises(ConfigError, match=r"a\.weight: codec 'bitmask' has no part 'x'"):
        slimtensors.save(x, path, preset=chain(Bitmask(), x=Dense()))
    assert not path.exists()


def test_a_function_chooses_by_name_and_content(tensors, path):
    asked = []

    def choose(name, x):
        asked.append(name)
        assert x.device.type == "cpu"
        if name == "a.weight":
            return chain(Bitmask())
        return Choice(None, "because") if name == "norm" else None

    summary = slimtensors.save(tensors, path, preset=choose, threads=1)
    assert sorted(asked) == sorted(set(tensors) - {"none"})
    assert stored(summary, "a.weight").codec == "bitmask"
    assert stored(summary, "b.weight").codec == "plain"
    assert stored(summary, "norm").note == "because"


def test_an_error_in_a_function_reaches_the_caller_and_leaves_no_file(tensors, path):
    def choose(name, x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        slimtensors.save(tensors, path, preset=choose)
    assert not list(path.parent.iterdir())


def test_the_default_preset_is_the_smallest_lossless_one_of_the_dialect(tensors, path):
    for dialect, preset in (("slim", "lossless"), ("compressed-tensors", "sparse")):
        found = slimtensors.save(tensors, path, dialect=dialect)
        assert found == slimtensors.save(tensors, path, dialect=dialect, preset=preset)
        assert estimate(tensors, dialect=dialect).stored_bytes == found.stored_bytes
        assert same_tensors(slimtensors.load(path), tensors)


@pytest.mark.parametrize("wrong", [Bitmask(), 3, ["sparse"]])
def test_an_invalid_preset_type_is_a_config_error(tensors, path, wrong):
    with pytest.raises(ConfigError, match="preset"):
        slimtensors.save(tensors, path, preset=wrong)


@pytest.mark.parametrize("wrong", [Bitmask(), "bitmask", 3])
def test_a_function_that_returns_no_plan_raises_with_the_tensor_name(path, wrong):
    with pytest.raises(ConfigError, match=r"a\.weight"):
        slimtensors.save({"a.weight": sparse()}, path, preset=lambda name, x: wrong, threads=1)
    assert not path.exists()


def test_unknown_names_raise_with_a_suggestion(tensors, path):
    with pytest.raises(ConfigError, match="unknown preset 'spars'; did you mean 'sparse'"):
        slimtensors.save(tensors, path, preset="spars")
    with pytest.raises(ConfigError, match="unknown preset 'zzz'; known: bitmask, bitmask24"):
        slimtensors.save(tensors, path, preset="zzz")
    with pytest.raises(ConfigError, match="unknown dialect 'slime'; did you mean 'slim'"):
        slimtensors.save(tensors, path, dialect="slime")
    with pytest.raises(ConfigError, match="dialect 'compressed_tensors'; did you mean 'compr"):
        slimtensors.save(tensors, path, dialect="compressed_tensors")
    with pytest.raises(ConfigError, match="format 'sparse-bitmsk'; did you mean 'sparse-bitm"):
        slimtensors.save_compressed(tensors, path, compression_format="sparse-bitmsk")
    with pytest.raises(ConfigError, match="unknown compression format"):
        slimtensors.load_compressed(path, slimtensors.BitmaskConfig(format="x"))
    with pytest.raises(
        ConfigError, match="unknown key 'sparsity_struct'; did you mean 'sparsity_s"
    ):
        slimtensors.BitmaskConfig.from_dict({"sparsity_struct": "2:4"})
    with pytest.raises(UnknownCodecError, match="'bitmsk'; did you mean 'bitmask'"):
        slimtensors.Plan.from_json({"codec": {"name": "bitmsk"}})
    assert not path.exists()


def test_an_unknown_option_is_a_type_error(tensors, path):
    with pytest.raises(TypeError, match="presets"):
        slimtensors.save(tensors, path, presets="sparse")


def test_a_plan_that_the_dialect_does_not_support_raises(tensors, path):
    for plan in (chain(Dense()), chain(Bitmask(), values=Dense())):
        with pytest.raises(ConfigError, match="'compressed-tensors' does not support the plan"):
            slimtensors.save(tensors, path, preset=plan, dialect="compressed-tensors")


def test_the_summary_explains_why_a_tensor_is_plain(path):
    few = torch.ones(64, 64)
    tensors = {
        "small": torch.zeros(3),
        "few zeros": few,
        "negative": torch.where(sparse() == 0, -0.0, sparse()),
        "some negative": torch.where(torch.arange(4096).view(64, 64) % 20 == 0, -0.0, sparse()),
        "fine": sparse(),
    }
    summary = slimtensors.save(tensors, path, preset="sparse")
    notes = {t.name: t.note for t in summary.tensors}
    assert "would take" in notes["small"]
    assert "plain takes 12" in notes["small"]
    assert notes["few zeros"] == "too few zeros for a bitmask"
    assert "-0.0" in notes["negative"]
    assert "-0.0" in notes["some negative"]
    assert notes["fine"] == ""
    not_24 = slimtensors.save({"x": sparse(keep=0.9)}, path, preset="bitmask24")
    assert stored(not_24, "x").note == "not 2:4 sparse"
    assert same_tensors(slimtensors.load(path), {"x": sparse(keep=0.9)})


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int8,
        torch.int32,
        torch.uint8,
        torch.complex64,
        torch.float8_e4m3fnuz,  # the byte 0x80 is NaN
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,  # the byte 0x80 is 2.0
    ],
)
def test_negative_zeros_are_not_reported_for_dtypes_without_them(path, dtype):
    raw = torch.zeros(4096, dtype.itemsize, dtype=torch.uint8)
    raw[:, -1] = 0x80
    x = raw.view(-1).view(dtype)
    assert "-0.0" not in slimtensors.save({"x": x}, path).tensors[0].note


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_negative_zeros_are_reported_for_every_dtype_with_them(path, dtype):
    x = torch.full((4096,), -0.0).to(dtype)
    assert slimtensors.save({"x": x}, path).tensors[0].note.startswith("4096 items are -0.0")
    assert same_bits(slimtensors.load(path)["x"], x)


def test_dtypes_that_safetensors_does_not_support_are_compressed(path):
    x = sparse(keep=0.1).to(torch.complex128)
    y = torch.ones(50, 50, dtype=torch.complex128)
    summary = slimtensors.save({"x": x, "y": y}, path, preset="sparse")
    assert [t.codec for t in summary.tensors] == ["bitmask", "dense"]
