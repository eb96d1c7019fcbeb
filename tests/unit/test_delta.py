"""Models as differences from other models."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from strategies import same_bits

import slimtensors
from slimtensors.cli import main
from slimtensors.delta import add_difference, diff, difference, restore
from slimtensors.errors import ConfigError, CorruptFileError, MismatchError
from slimtensors.spec import DTYPES

NUMBERS = [dtype for dtype in DTYPES.values() if not dtype.is_complex]


@given(data=st.data())
def test_every_tensor_is_its_base_and_the_difference(data):
    dtype = data.draw(st.sampled_from(NUMBERS))
    size = data.draw(st.integers(1, 40)) * dtype.itemsize
    x, base = (
        torch.frombuffer(bytearray(data.draw(st.binary(min_size=size, max_size=size))), dtype=dtype)
        for _ in range(2)
    )
    assert same_bits(add_difference(difference(x, base), base), x)
    assert not difference(x, x).view(torch.uint8).any()


def test_neighbours_differ_by_one_across_exponents_and_zero():
    near = torch.tensor([1.0, -1.0, 2.0, 0.0, 1e-45])
    after = torch.nextafter(near, torch.full_like(near, 10.0))
    assert difference(after, near).tolist()[:3] == [2, 2, 2]
    zeros = difference(torch.tensor([0.0, -0.0]), torch.tensor([-0.0, 0.0]))
    assert zeros.tolist() == [2, 1]


def finetuned(base, fraction=0.02):
    torch.manual_seed(1)
    changed = {}
    for name, x in base.items():
        where = torch.rand(x.shape) < fraction
        changed[name] = torch.where(where, (x.float() * 1.004).to(x.dtype), x)
    return changed


@pytest.fixture
def models(tmp_path):
    torch.manual_seed(0)
    base = {f"layer{i}.weight": torch.randn(256, 256).bfloat16() for i in range(4)}
    base["frozen"] = torch.randn(300, 300)
    base["other"] = torch.randn(8)
    new = finetuned(base) | {
        "frozen": base["frozen"],
        "other": torch.randn(9),
        "added": torch.ones(5),
    }
    new["tied"] = new["layer0.weight"]
    slimtensors.save(base, tmp_path / "base.safetensors")
    slimtensors.save(new, tmp_path / "new.safetensors")
    return base, new, tmp_path


def test_a_delta_and_its_base_give_the_model_bit_for_bit(models):
    _, new, folder = models
    summary = diff(folder / "new.safetensors", folder / "base.safetensors", folder / "delta")
    assert "frozen" not in {t.name for t in summary.tensors}
    restore(folder / "delta", folder / "base.safetensors", folder / "back")
    back = slimtensors.load(folder / "back")
    assert list(back) == list(new)
    assert all(same_bits(back[name], x) for name, x in new.items())
    assert back["tied"] is back["layer0.weight"]


def test_few_changes_cost_little(models):
    _, _, folder = models
    diff(folder / "new.safetensors", folder / "base.safetensors", folder / "delta")
    assert (folder / "delta").stat().st_size * 15 < (folder / "new.safetensors").stat().st_size


def test_another_base_is_refused_by_name_and_nothing_is_written(models):
    base, _, folder = models
    diff(folder / "new.safetensors", folder / "base.safetensors", folder / "delta")
    base["frozen"][7, 7] += 1
    slimtensors.save(base, folder / "other.safetensors")
    with pytest.raises(MismatchError, match=r"other\.safetensors: frozen: is not the tensor"):
        restore(folder / "delta", folder / "other.safetensors", folder / "back")
    del base["frozen"]
    slimtensors.save(base, folder / "fewer.safetensors")
    with pytest.raises(MismatchError, match=r"fewer\.safetensors: frozen: is missing"):
        restore(folder / "delta", folder / "fewer.safetensors", folder / "back")
    assert not (folder / "back").exists()


def test_a_delta_does_not_pass_for_a_model(models):
    _, _, folder = models
    diff(folder / "new.safetensors", folder / "base.safetensors", folder / "delta")
    with pytest.raises(ConfigError, match="difference from another model"):
        slimtensors.load(folder / "delta")
    with pytest.raises(ConfigError, match="difference from another model"):
        slimtensors.open(folder / "delta").get_tensor("layer1.weight")
    with pytest.raises(ConfigError, match="difference from another model"):
        dict(slimtensors.load_compressed(folder / "delta"))
    assert main(["decompress", str(folder / "delta"), "-o", str(folder / "x")]) == 2
    assert all(x.dtype is torch.uint8 for x in load_file(folder / "delta").values())
    with pytest.raises(ConfigError, match="is not a delta"):
        restore(folder / "new.safetensors", folder / "base.safetensors", folder / "back")


def test_an_unrelated_base_costs_no_more_than_none(tmp_path):
    torch.manual_seed(0)
    for name in ("a", "b"):
        slimtensors.save({"x": torch.randn(512, 512).bfloat16()}, tmp_path / name)
    diff(tmp_path / "a", tmp_path / "b", tmp_path / "delta")
    slimtensors.save(slimtensors.open(tmp_path / "a"), tmp_path / "whole")
    assert (tmp_path / "delta").stat().st_size <= (tmp_path / "whole").stat().st_size * 1.01


def test_a_difference_of_another_shape_is_damage():
    with pytest.raises(CorruptFileError):
        add_difference(torch.zeros(3, dtype=torch.uint16), torch.zeros(4).bfloat16())


def test_folders_on_the_command_line(models, capsys):
    base, new, folder = models
    for name, table in (("old", base), ("tuned", new)):
        slimtensors.save(table, folder / name, max_shard_size="200kB")
        (folder / name / "config.json").write_text(json.dumps({"name": name}))
    assert (
        main(
            ["diff", str(folder / "tuned"), "--base", str(folder / "old"), "-o", str(folder / "d")]
        )
        == 0
    )
    assert "smaller than whole" in capsys.readouterr().out
    back = ["restore", str(folder / "d"), "--base", str(folder / "old"), "-o", str(folder / "r")]
    assert main([*back, "--json"]) == 0
    assert json.loads((folder / "r" / "config.json").read_text()) == {"name": "tuned"}
    assert slimtensors.verify(folder / "r", against=folder / "tuned")
    assert main(back) == 2  # it exists
    assert main([*back[:3], str(folder / "tuned"), "-o", str(folder / "x")]) == 1
    assert not (folder / "x").exists()
