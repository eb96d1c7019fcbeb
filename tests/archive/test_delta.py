"""Deltas of archives and model folders."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import weights, write_folder
from reliability_tools import edit_manifest
from safetensors.torch import load_file
from strategies import same_bits, same_tensors

import slimtensors
from slimtensors import tensor as spec
from slimtensors.archive.delta import diff, restore
from slimtensors.archive.delta_manifest import DeltaManifest, tensor_digest
from slimtensors.archive.write import ArchiveSource, TensorSource, WriteOptions, write
from slimtensors.cli import main
from slimtensors.codecs.residual import add_difference, difference, residual
from slimtensors.errors import ConfigError, CorruptFileError, MismatchError
from slimtensors.folder.compress import compress_folder
from slimtensors.folder.delta import diff_folder, restore_folder
from slimtensors.tensor import DTYPES, Spec

NUMBERS = [dtype for dtype in DTYPES.values() if not dtype.is_complex]


@given(data=st.data())
def test_base_and_residual_give_every_tensor(data):
    dtype = data.draw(st.sampled_from(NUMBERS))
    size = data.draw(st.integers(1, 40)) * dtype.itemsize
    x, base = (
        torch.frombuffer(bytearray(data.draw(st.binary(min_size=size, max_size=size))), dtype=dtype)
        for _ in range(2)
    )
    assert same_bits(add_difference(difference(x, base), base), x)
    assert not difference(x, x).view(torch.uint8).any()


@pytest.mark.parametrize("place", [0, 1 << 16, (1 << 18) + 11])
def test_any_changed_bit_is_stored(place):
    x = torch.arange((1 << 18) + 12, dtype=torch.int32).to(torch.float32)
    y = x.clone()
    assert spec.bitwise_equal(x, y)
    y.view(torch.int32)[place] ^= 1
    assert not spec.bitwise_equal(x, y)
    assert not spec.bitwise_equal(torch.tensor(0.0), torch.tensor(-0.0))
    assert spec.bitwise_equal(torch.tensor(float("nan")), torch.tensor(float("nan")))
    assert spec.bitwise_equal(torch.empty(0, 3), torch.empty(0, 3))


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


def test_restore_is_bitwise_exact(models):
    _, new, folder = models
    summary = diff(folder / "new.safetensors", folder / "base.safetensors", folder / "delta")
    assert "frozen" not in {t.name for t in summary.tensors}
    restore(folder / "delta", folder / "base.safetensors", folder / "back")
    back = slimtensors.load(folder / "back")
    assert list(back) == list(new)
    assert all(same_bits(back[name], x) for name, x in new.items())
    assert back["tied"] is back["layer0.weight"]


def test_equal_tensors_take_no_space(tmp_path):
    same = {"complex": torch.randn(40, 40, dtype=torch.complex64), "none": torch.empty(0, 3)}
    slimtensors.save(same, tmp_path / "base")
    slimtensors.save({**same, "new": torch.ones(3)}, tmp_path / "new")
    summary = diff(tmp_path / "new", tmp_path / "base", tmp_path / "delta")
    assert [t.name for t in summary.tensors] == ["new"]
    restore(tmp_path / "delta", tmp_path / "base", tmp_path / "back")
    assert slimtensors.verify(tmp_path / "back", against=tmp_path / "new")


def test_few_changes_take_little_space(models):
    _, _, folder = models
    diff(folder / "new.safetensors", folder / "base.safetensors", folder / "delta")
    assert (folder / "delta").stat().st_size * 15 < (folder / "new.safetensors").stat().st_size


def test_a_wrong_base_raises_with_the_tensor_name_and_writes_nothing(models):
    base, _, folder = models
    diff(folder / "new.safetensors", folder / "base.safetensors", folder / "delta")
    base["frozen"][7, 7] += 1
    slimtensors.save(base, folder / "other.safetensors")
    with pytest.raises(MismatchError, match=r"other\.safetensors: frozen: differs from the tensor"):
        restore(folder / "delta", folder / "other.safetensors", folder / "back")
    del base["frozen"]
    slimtensors.save(base, folder / "fewer.safetensors")
    with pytest.raises(MismatchError, match=r"fewer\.safetensors: frozen: not found"):
        restore(folder / "delta", folder / "fewer.safetensors", folder / "back")
    assert not (folder / "back").exists()


def test_without_its_base_a_delta_is_not_loaded_as_a_model(models, capsys):
    _, _, folder = models
    delta = folder / "delta"
    diff(folder / "new.safetensors", folder / "base.safetensors", delta)
    (folder / "base.safetensors").rename(folder / ".hidden")
    for load in (slimtensors.load, slimtensors.open, slimtensors.load_compressed):
        with pytest.raises(
            MismatchError, match=r"is a delta, and its base 'base\.safetensors' was"
        ):
            load(delta)
    with pytest.raises(ConfigError, match="is a delta"):
        slimtensors.Archive(delta).get_tensor("layer1.weight")
    with pytest.raises(MismatchError, match="was not found"):
        slimtensors.verify(delta, against=folder / "new.safetensors")
    assert main(["decompress", str(delta), "-o", str(folder / "x")]) == 1
    assert "SLIMTENSORS_BASES" in capsys.readouterr().err
    assert all(x.dtype is torch.uint8 for x in load_file(delta).values())
    assert slimtensors.verify(delta)
    with pytest.raises(ConfigError, match="is not a delta"):
        restore(folder / "new.safetensors", folder / ".hidden", folder / "back")


def test_a_delta_never_replaces_its_base(models):
    base, _, folder = models
    old = write_folder(folder / "old", table=base)
    tuned = write_folder(folder / "tuned", table=finetuned(base))
    for target in (old, old / "model.safetensors"):
        with pytest.raises(ConfigError, match=r"the source .*old.*; choose another"):
            diff(tuned, old, target)
    with pytest.raises(ConfigError, match=r"the source .*old.*; choose another"):
        diff_folder(tuned, old / "model.safetensors", old, replace=True)
    assert (old / "model.safetensors").is_file()


def test_a_lossy_preset_raises(tmp_path):
    slimtensors.save({"x": torch.randn(64, 64)}, tmp_path / "new")
    slimtensors.save({"y": torch.randn(64, 64)}, tmp_path / "base")
    paths = tmp_path / "new", tmp_path / "base", tmp_path / "delta"
    with pytest.raises(ConfigError, match=r"x: .* is lossy"):
        diff(*paths, preset="extreme", unrelated=True)
    assert not (tmp_path / "delta").exists()


def test_models_with_little_in_common_raise(tmp_path):
    new = {"a": torch.randn(64, 64), "b": torch.ones(20, 20), "c": torch.ones(8)}
    base = {"a": torch.randn(64, 32), "b": torch.ones(20, 20).half(), "c": torch.zeros(8)}
    new_folder = write_folder(tmp_path / "new", table=new)
    base_folder = write_folder(tmp_path / "base", table=base)
    for make in (diff, diff_folder):
        with pytest.raises(MismatchError, match=r"new and .*base .* 1 of 3 tensors .*--force"):
            make(new_folder, base_folder, tmp_path / "delta")
        assert not (tmp_path / "delta").exists()
        make(new_folder, base_folder, tmp_path / make.__name__, unrelated=True)
    restore_folder(tmp_path / "diff_folder", base_folder, tmp_path / "back")
    assert slimtensors.verify(tmp_path / "back", against=new_folder).files == "identical"


def test_an_unrelated_base_adds_no_bytes(tmp_path):
    torch.manual_seed(0)
    for name in ("a", "b"):
        slimtensors.save({"x": torch.randn(512, 512).bfloat16()}, tmp_path / name)
    diff(tmp_path / "a", tmp_path / "b", tmp_path / "delta")
    slimtensors.save(slimtensors.open(tmp_path / "a"), tmp_path / "whole")
    assert (tmp_path / "delta").stat().st_size <= (tmp_path / "whole").stat().st_size * 1.01


def test_dense_changes_are_grouped_by_the_exponents_of_the_base(tmp_path):
    torch.manual_seed(0)
    old = torch.randn(512, 512, dtype=torch.float64) * torch.logspace(-2, 0, 512)
    new = old + 1e-5 * torch.randn(512, 512)
    sizes = {}
    for name, x in (("old", old), ("new", new)):
        slimtensors.save({"x": x}, tmp_path / name)
    diff(tmp_path / "new", tmp_path / "old", tmp_path / "delta")
    assert slimtensors.open(tmp_path / "delta").delta["tensors"]["x"][0] == "by-exponent"
    for kind in ("difference", "by-exponent"):
        summary = slimtensors.save(
            {"x": residual(kind, new, old)}, tmp_path / kind, preset="lossless"
        )
        sizes[kind] = summary.stored_bytes
    assert sizes["by-exponent"] < 0.96 * sizes["difference"]
    assert (tmp_path / "delta").stat().st_size < 1.02 * sizes["by-exponent"]
    restore(tmp_path / "delta", tmp_path / "old", tmp_path / "back")
    assert slimtensors.verify(tmp_path / "back", against=tmp_path / "new")


@pytest.mark.parametrize(
    "said",
    [
        {"tensors": {"x": ["by-mood", "0" * 32]}},
        {"tensors": {"x": ["difference"]}},
        {"tensors": {"x": ["whole", "0" * 32]}},
        {"tensors": {"x": ["same", "0" * 32]}, "tied": {"x": "x"}},
        {"tensors": {"x": ["whole"]}, "files": {"a.safetensors": []}},
        {"tensors": {"x": ["whole"]}, "files": {"a.safetensors": ["x", "x"]}},
        {"tensors": {"x": ["whole"]}, "files": {"../a.safetensors": ["x"]}},
        {"tensors": {"x": ["whole"]}, "files": {"/a.safetensors": ["x"]}},
        {"tensors": {"x": ["whole"]}, "files": {"config.json": ["x"]}},
        {"tensors": {"x": ["whole"]}, "files": {"a.safetensors": ["x"], "b.safetensors": []}},
        {"tensors": {"x": ["whole"]}, "files": {"a.safetensors": ["x"]}, "index": "../a.json"},
        {"tensors": {"x": ["whole"]}, "files": {"a.safetensors": [1]}},
        {"tensors": {"x": ["whole"]}, "index": "a.json"},
    ],
)
def test_a_malformed_delta_manifest_is_a_corrupt_file_error(said):
    with pytest.raises(CorruptFileError, match="malformed delta"):
        DeltaManifest.from_json({"tied": {}, **said})


def test_a_residual_that_does_not_fit_its_base_is_a_corrupt_file_error(tmp_path):
    base = torch.zeros(64)
    slimtensors.save({"x": base}, tmp_path / "base")
    for kind in ("difference", "by-exponent"):
        item = TensorSource(
            "x", Spec.of(base), lambda each: torch.ones(63, dtype=torch.uint32), always_blob=True
        )
        told = {"tensors": {"x": [kind, tensor_digest(base)]}, "tied": {}}
        write(
            ArchiveSource([item], delta=told), tmp_path / "delta", WriteOptions(preset="lossless")
        )
        with pytest.raises(CorruptFileError, match=r"delta: x: .*fit"):
            restore(tmp_path / "delta", tmp_path / "base", tmp_path / "back")


@pytest.mark.parametrize(
    "change",
    [
        lambda delta: delta["tensors"].update(more=["whole"]),
        lambda delta: delta["tensors"].update(more=["difference", "0" * 32]),
        lambda delta: delta["tied"].update(x=["w"]),
        lambda delta: delta["tied"].update(x={}),
        lambda delta: delta.update(tensors=[]),
        lambda delta: delta.update(files={"a.safetensors": [[1]]}),
    ],
)
def test_a_forged_delta_is_refused_with_its_name(tmp_path, change):
    base, new, delta = (tmp_path / f"{name}.safetensors" for name in ("base", "new", "delta"))
    slimtensors.save({"w": torch.zeros(64, 64)}, base)
    slimtensors.save({"w": torch.ones(64, 64)}, new)
    diff(new, base, delta)
    forged = edit_manifest(delta.read_bytes(), lambda manifest: change(manifest["delta"]))
    delta.write_bytes(forged)
    with pytest.raises(CorruptFileError, match=r"delta\.safetensors"):
        restore(delta, base, tmp_path / "again.safetensors")
    assert not (tmp_path / "again.safetensors").exists()


def test_bases_may_be_remote(models):
    fsspec = pytest.importorskip("fsspec")
    _, _, folder = models
    memory = fsspec.filesystem("memory")
    memory.pipe("/delta-test/base.safetensors", (folder / "base.safetensors").read_bytes())
    memory.pipe("/delta-test/new.safetensors", (folder / "new.safetensors").read_bytes())
    options = {"storage_options": {"skip_instance_cache": False}}
    base, tuned = "memory://delta-test/base.safetensors", "memory://delta-test/new.safetensors"
    diff(tuned, base, folder / "delta", **options)
    restore(folder / "delta", base, folder / "back", **options)
    assert slimtensors.verify(folder / "back", against=folder / "new.safetensors")
    memory.pipe("/delta-test/folder/model.safetensors", (folder / "new.safetensors").read_bytes())
    diff_folder("memory://delta-test/folder", base, folder / "d", **options)
    restore_folder(folder / "d", base, folder / "r", **options)
    assert slimtensors.verify(folder / "r", against=folder / "new.safetensors")


def test_folders_on_the_command_line(models, capsys):
    base, new, folder = models
    for name, table in (("old", base), ("tuned", new)):
        slimtensors.save(table, folder / name, max_shard_size="200kB")
        (folder / name / "config.json").write_text(json.dumps({"name": name}))
    ask = ["diff", str(folder / "tuned"), "--base", str(folder / "old"), "-o", str(folder / "d")]
    assert main(ask) == 0
    assert "smaller than the whole model" in capsys.readouterr().out
    back = ["restore", str(folder / "d"), "--base", str(folder / "old"), "-o", str(folder / "r")]
    assert main([*back, "--json"]) == 0
    assert json.loads((folder / "r" / "config.json").read_text()) == {"name": "tuned"}
    assert slimtensors.verify(folder / "r", against=folder / "tuned")
    assert main(back) == 2  # it exists
    assert main([*back[:3], str(folder / "tuned"), "-o", str(folder / "x")]) == 1
    assert not (folder / "x").exists()


def names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("stem", ["model", "unusual"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_restored_folder_equals_the_original(tmp_path, shards, stem):
    old = write_folder(tmp_path / "old")
    new = write_folder(tmp_path / "new", shards=shards, config={"a": 1}, table=finetuned(weights()))
    for path in new.glob("model*"):
        text = path.read_bytes().replace(b"model-0", stem.encode() + b"-0")
        path.with_name(path.name.replace("model", stem)).write_bytes(text)
        if stem != "model":
            path.unlink()
    diff_folder(new, old, tmp_path / "delta")
    restore_folder(tmp_path / "delta", old, tmp_path / "back")
    assert names(tmp_path / "back") == names(new)
    for path in new.rglob("*.json"):
        assert json.loads(path.read_text()) == json.loads(
            (tmp_path / "back" / path.relative_to(new)).read_text()
        )
    for path in new.glob("*.safetensors"):
        assert same_tensors(load_file(path), load_file(tmp_path / "back" / path.name))
    restore_folder(tmp_path / "delta", old, tmp_path / "many", max_shard_size="9kB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert slimtensors.verify(tmp_path / "many", against=new)


def test_tied_names_stay_in_the_file_of_their_tensor(models):
    base, new, folder = models
    slimtensors.save(base, folder / "old")
    slimtensors.save(new, folder / "tuned", max_shard_size="200kB")
    diff_folder(folder / "tuned", folder / "old", folder / "d")
    restore_folder(folder / "d", folder / "old", folder / "r")
    assert names(folder / "r") == names(folder / "tuned")
    back = slimtensors.load(folder / "r")
    assert back["tied"] is back["layer0.weight"]


def test_the_config_of_a_delta_describes_it(tmp_path):
    old = write_folder(tmp_path / "old")
    config = {"model_type": "llama", "quantization_config": {"quant_method": "other", "bits": 4}}
    new = write_folder(tmp_path / "new", config=config, table=finetuned(weights()))
    diff_folder(new, old, tmp_path / "delta")
    section = json.loads((tmp_path / "delta" / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "slimtensors"
    assert section["delta"]["base"] == "old"
    assert re.fullmatch("[0-9a-f]{32}", section["delta"]["digest"])
    assert sum(section["delta"]["tensors"].values()) == len(weights())
    assert 0 < section["bits_per_weight"] < 16
    restore_folder(tmp_path / "delta", old, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_a_delta_of_a_compressed_folder_restores_a_plain_one(tmp_path):
    old = write_folder(tmp_path / "old")
    new = write_folder(tmp_path / "new", table=finetuned(weights()))
    compress_folder(new, tmp_path / "small")
    diff_folder(tmp_path / "small", old, tmp_path / "delta")
    restore_folder(tmp_path / "delta", old, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (new / "config.json").read_text()
    )
    assert same_tensors(
        load_file(tmp_path / "back" / "model.safetensors"), load_file(new / "model.safetensors")
    )


def test_another_safetensors_file_beside_a_delta_is_ignored(tmp_path):
    old = write_folder(tmp_path / "old")
    new = write_folder(tmp_path / "new", table=finetuned(weights()))
    slimtensors.save({"adapter": torch.ones(3)}, new / "adapter.safetensors")
    diff_folder(new, old, tmp_path / "delta")
    restore_folder(tmp_path / "delta", old, tmp_path / "back")
    assert names(tmp_path / "back") == names(new)
