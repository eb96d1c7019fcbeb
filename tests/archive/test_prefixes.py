"""Deltas of models whose names differ from those of the base by a prefix."""

import json

import pytest
import torch
from models import write_folder
from reliability_tools import edit_manifest
from strategies import same_bits

import slimtensors
from slimtensors.archive.dialects import entries
from slimtensors.archive.prefixes import PrefixMatch, match_names
from slimtensors.cli import main
from slimtensors.errors import UnsupportedVersionError
from slimtensors.folder.delta import diff_folder
from slimtensors.tensor import Spec


def specs(*names, size=4):
    return {name: Spec(torch.float32, (size,)) for name in names}


CASES = {
    "removed": (["encoder.a", "encoder.b"], ["bert.encoder.a", "bert.encoder.b", "cls.x"], "bert."),
    "added": (["module.a.w", "module.b.w"], ["a.w", "b.w"], "module."),
    "compiled": (["_orig_mod.a.w", "_orig_mod.b"], ["a.w", "b"], "_orig_mod."),
    "both": (["module._orig_mod.model.a.w"], ["a.w"], "module._orig_mod.model."),
}


@pytest.mark.parametrize("case", CASES)
def test_names_are_matched_without_a_prefix(case):
    new, base, prefix = CASES[case]
    found, (match,) = match_names(specs(*new), specs(*base))
    assert list(found) == new
    assert all(
        name.removeprefix(prefix) == home.removeprefix(prefix) for name, home in found.items()
    )
    assert prefix in (match.new, match.base)
    assert match.tensors == len(new)


def test_equal_names_come_first_and_no_tensor_is_used_twice():
    new, base = specs("a.w", "m.a.w", "m.b.w"), specs("a.w", "b.w")
    found, prefixes = match_names(new, base)
    assert found == {"a.w": "a.w", "m.b.w": "b.w"}
    assert prefixes == [PrefixMatch("m.", "", 1)]


def test_the_prefix_with_most_bytes_wins():
    new = specs("w", size=9) | specs("v", size=2)
    base = specs("a.w", "b.w", size=9) | specs("a.v", size=2)
    assert match_names(new, base)[0] == {"w": "a.w", "v": "a.v"}


def test_other_dtypes_shapes_and_endings_do_not_match():
    base = specs("bert.a", "b.suffix", size=4)
    for new in (specs("a", size=5), specs("b"), specs("berta"), {"a": Spec(torch.int32, (4,))}):
        assert match_names(new, base) == ({}, [])


@pytest.fixture
def models(tmp_path):
    torch.manual_seed(0)
    base = {f"bert.layer.{i}.weight": torch.randn(64, 64).bfloat16() for i in range(3)}
    new = {name.removeprefix("bert."): x for name, x in base.items()}
    new["layer.0.weight"] = new["layer.0.weight"] * 1.01
    new["head.weight"] = torch.randn(8, 64)
    write_folder(tmp_path / "base", table=base | {"cls": torch.ones(4)})
    write_folder(tmp_path / "new", table=new)
    return tmp_path, new


def test_a_delta_with_other_names_is_small_and_exact(models, capsys):
    folder, new = models
    diff = ["diff", str(folder / "base"), str(folder / "new"), "-o", str(folder / "delta")]
    assert main([*diff, "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["base"]["prefixes"] == [{"new": "", "base": "bert.", "tensors": 3}]
    assert about["stored_bytes"] < 6000
    assert main([*diff, "-f"]) == 0
    assert "; 3 without the prefix 'bert.' of the base" in capsys.readouterr().out
    loaded = slimtensors.load(folder / "delta")
    assert loaded.keys() == new.keys()
    assert all(same_bits(loaded[name], x) for name, x in new.items())
    assert main(["restore", str(folder / "delta"), "-o", str(folder / "back")]) == 0
    assert slimtensors.verify(folder / "back", against=folder / "new").files == "identical"
    assert main(["inspect", str(folder / "delta"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["delta"]["renamed"] == 3


def manifest_version(path):
    found = []
    edit_manifest(path.read_bytes(), lambda manifest: found.append(manifest["version"]))
    return found[0]


def test_readers_of_older_versions_refuse_other_names(models, monkeypatch):
    folder, _ = models
    diff_folder(folder / "new", folder / "base", folder / "delta")
    assert manifest_version(folder / "delta" / "delta.safetensors") == 4
    diff_folder(folder / "base", folder / "base", folder / "usual")
    assert manifest_version(folder / "usual" / "delta.safetensors") == 2  # it describes originals
    monkeypatch.setattr(entries, "VERSION", 3)
    with pytest.raises(UnsupportedVersionError, match=r"format version 4 is newer than .* 3; upgr"):
        slimtensors.load(folder / "delta")
