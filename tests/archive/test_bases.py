"""Deltas that are opened as the models they represent: how their bases are found."""

import json
import os

import pytest
import torch
from models import write_folder
from reliability_tools import edit_manifest
from strategies import same_bits

import slimtensors
from slimtensors.archive import bases
from slimtensors.archive.bases import MAX_CHAIN
from slimtensors.archive.delta import diff
from slimtensors.cli import main
from slimtensors.errors import ConfigError, CorruptFileError, MismatchError
from slimtensors.folder import compress_folder, convert_folder, decompress_folder
from slimtensors.folder.delta import diff_folder, restore_folder


def table(seed=0, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    found = {f"layers.{i}.weight": torch.randn(64, 64).to(dtype) for i in range(3)}
    return found | {"norm.weight": torch.randn(4000).to(dtype), "codes": torch.arange(20)}


def tuned(base, *names):
    """Return a model that differs from the base in a few tensors."""
    return {name: x * 1.01 if name in names else x for name, x in base.items()}


def moved(base, step):
    return tuned(base, f"layers.{step % 3}.weight")


@pytest.fixture
def made(tmp_path):
    """The delta folder `work/delta` of `work/base`, and the tensors of its model."""
    base = table()
    new = tuned(base, "layers.0.weight", "norm.weight")
    write_folder(tmp_path / "work" / "base", table=base)
    write_folder(tmp_path / "new", table=new)
    delta = tmp_path / "work" / "delta"
    diff_folder(tmp_path / "new", tmp_path / "work" / "base", delta)
    return delta, new


def check(path, expected, **options):
    with slimtensors.open(path, **options) as archive:
        assert set(archive.keys()) == set(expected)
        for name, x in expected.items():
            assert archive.spec(name).shape == x.shape
            assert same_bits(archive.get_tensor(name), x)
        assert all(same_bits(x, expected[name]) for name, x in archive.items())
    loaded = slimtensors.load(path, **options)
    assert all(same_bits(loaded[name], x) for name, x in expected.items())
    return archive.base.found.found_by


def move_base(made, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    return (made[0].parent / "base").rename(target)


def test_a_sibling_is_found_by_its_content_under_any_name(made):
    delta, new = made
    assert check(delta, new) == "sibling"
    assert check(delta / "delta.safetensors", new) == "sibling"
    (delta.parent / "base").rename(delta.parent / "renamed")
    write_folder(delta.parent / "base", table=table(seed=1))  # another model has its name now
    assert check(delta, new) == "sibling"


def test_a_relative_path_finds_siblings(made, monkeypatch):
    delta, new = made
    monkeypatch.chdir(delta)
    assert check(".", new) == "sibling"
    monkeypatch.chdir(delta.parent / "base")
    assert check("../delta", new) == "sibling"


def test_an_explicit_base_comes_first(made, tmp_path):
    delta, new = made
    other = move_base(made, tmp_path / "elsewhere" / "x")
    assert check(delta, new, base=other) == "argument"
    assert check(delta, new, base=slimtensors.open(other)) == "argument"
    with slimtensors.using_base(other):
        assert check(delta, new) == "context"
    with pytest.raises(MismatchError, match="was not found"):
        slimtensors.open(delta)


def test_an_explicit_wrong_base_is_refused_although_a_sibling_fits(made, tmp_path):
    wrong = write_folder(tmp_path / "wrong", table=table(seed=1))
    with pytest.raises(MismatchError, match=r"wrong.*: .*: differs from the tensor"):
        slimtensors.load(made[0], base=wrong)
    fewer = write_folder(tmp_path / "fewer", table={"other": torch.ones(4)})
    with pytest.raises(MismatchError, match=r"fewer: .*: not found; this is not the base"):
        slimtensors.load(made[0], base=fewer)
    with pytest.raises(ConfigError, match=r"new is not a delta that needs a base; omit base"):
        slimtensors.open(tmp_path / "new", base=wrong)


def in_hub_cache(cache, model, revision="0" * 40):
    folder = cache / ("models--" + model.replace("/", "--"))
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    return folder / "snapshots" / revision


@pytest.fixture
def hub(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("revision", [None, "0" * 40, "main"])
def test_the_cache_of_the_hub_is_searched(made, tmp_path, hub, revision):
    delta, new = made
    base = move_base(made, in_hub_cache(hub, "owner/name"))
    with pytest.raises(MismatchError, match="was not found"):
        slimtensors.open(delta)
    named = tmp_path / "named" / "delta"
    diff_folder(tmp_path / "new", base, named, base_model="owner/name", base_revision=revision)
    section = json.loads((named / "config.json").read_text())["quantization_config"]["delta"]
    assert (section["base_model"], section.get("base_revision")) == ("owner/name", revision)
    assert check(named, new) == "hub cache"


def test_the_config_names_the_base_on_the_hub(made, hub):
    """Older deltas get the name by editing their config."""
    delta, new = made
    move_base(made, in_hub_cache(hub, "owner/name"))
    config = json.loads((delta / "config.json").read_text())
    config["quantization_config"]["delta"]["base_model"] = "owner/name"
    (delta / "config.json").write_text(json.dumps(config))
    assert check(delta, new) == "hub cache"


def test_a_base_in_the_cache_of_the_hub_is_recorded(made, tmp_path, hub):
    _, new = made
    base = move_base(made, in_hub_cache(hub, "owner/name"))
    (tmp_path / "file").mkdir()
    diff(tmp_path / "new", base, tmp_path / "file" / "x.safetensors")
    assert check(tmp_path / "file" / "x.safetensors", new) == "hub cache"
    (hub / "models--owner--name").rename(hub / "gone")
    with pytest.raises(MismatchError, match=f"hf download owner/name --revision {'0' * 40}`"):
        slimtensors.open(tmp_path / "file" / "x.safetensors")


@pytest.mark.parametrize("place", ["one/base", "one/owner/base", "one"])
def test_listed_folders_are_searched(made, tmp_path, monkeypatch, place):
    delta, new = made
    move_base(made, tmp_path / place)
    (tmp_path / "two").mkdir()
    listed = [tmp_path / "missing", tmp_path / "two", tmp_path / "one"]
    monkeypatch.setenv("SLIMTENSORS_BASES", os.pathsep.join(map(str, listed)))
    assert check(delta, new) == "SLIMTENSORS_BASES"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bases_and_models_may_be_sharded_and_compressed(tmp_path, shards, dtype):
    base = table(dtype=dtype)
    new = tuned(base, "layers.1.weight", "codes")
    write_folder(tmp_path / "dense", table=base, shards=shards)
    compress_folder(tmp_path / "dense", tmp_path / "in" / "base")
    write_folder(tmp_path / "new", table=new, shards=shards)
    diff_folder(tmp_path / "new", tmp_path / "dense", tmp_path / "in" / "delta")
    assert check(tmp_path / "in" / "delta", new) == "sibling"
    decompress_folder(tmp_path / "in" / "delta", tmp_path / "back")
    assert slimtensors.verify(tmp_path / "back", against=tmp_path / "new").files == "identical"
    compress_folder(tmp_path / "in" / "delta", tmp_path / "small")
    assert slimtensors.verify(tmp_path / "small", against=tmp_path / "new").files == "identical"
    assert "delta" not in (tmp_path / "small" / "config.json").read_text()
    convert_folder(tmp_path / "in" / "delta", tmp_path / "plain", to="dense")
    assert slimtensors.verify(tmp_path / "plain", against=tmp_path / "new")
    with slimtensors.open(tmp_path / "in" / "delta") as archive:
        slimtensors.save(archive, tmp_path / "saved.safetensors")
    assert slimtensors.verify(tmp_path / "saved.safetensors", against=tmp_path / "new")


def test_tied_tensors_stay_tied(tmp_path):
    base = table()
    new = tuned(base, "layers.0.weight")
    new["head"] = new["layers.0.weight"]
    new["embed"] = new["layers.1.weight"]
    slimtensors.save(base, tmp_path / "base.safetensors")
    slimtensors.save(new, tmp_path / "new.safetensors")
    diff(tmp_path / "new.safetensors", tmp_path / "base.safetensors", tmp_path / "d.safetensors")
    loaded = slimtensors.load(tmp_path / "d.safetensors")
    assert loaded["head"] is loaded["layers.0.weight"]
    assert loaded["embed"] is loaded["layers.1.weight"]
    assert all(same_bits(loaded[name], x) for name, x in new.items())


def test_values_that_are_not_tensors_are_loaded(tmp_path):
    slimtensors.save({"w": torch.ones(64), "step": 1}, tmp_path / "base.safetensors")
    new = {"w": torch.ones(64), "step": 2, "list": [torch.zeros(3)]}
    slimtensors.save(new, tmp_path / "new.safetensors")
    diff(tmp_path / "new.safetensors", tmp_path / "base.safetensors", tmp_path / "d.safetensors")
    loaded = slimtensors.load(tmp_path / "d.safetensors")
    assert (loaded["step"], loaded["list"][0].tolist()) == (2, [0.0, 0.0, 0.0])


def test_a_delta_that_needs_no_base_loads_without_one(tmp_path):
    torch.manual_seed(0)
    for name in ("base", "new"):
        slimtensors.save({"x": torch.randn(64, 64)}, tmp_path / f"{name}.safetensors")
    diff(tmp_path / "new.safetensors", tmp_path / "base.safetensors", tmp_path / "d.safetensors")
    expected = slimtensors.load(tmp_path / "new.safetensors")
    (tmp_path / "base.safetensors").unlink()
    assert same_bits(slimtensors.load(tmp_path / "d.safetensors")["x"], expected["x"])


def test_the_next_candidate_is_used_where_one_differs(tmp_path):
    """More tensors than are compared in advance, of which one that is not differs."""
    torch.manual_seed(0)
    base = {f"x{i:02}": torch.randn(3000) for i in range(30)}
    new = {name: x * 1.00001 for name, x in base.items()}
    folder = tmp_path / "in"
    folder.mkdir()
    slimtensors.save(base, folder / "z.safetensors")
    slimtensors.save(new, tmp_path / "new.safetensors")
    diff(tmp_path / "new.safetensors", folder / "z.safetensors", folder / "d.safetensors")
    (folder / "z.safetensors").rename(folder / "y.safetensors")
    with slimtensors.Archive(folder / "d.safetensors") as delta:
        manifest = bases.DeltaManifest.from_archive(delta)
        probes = bases._choose_probes(slimtensors.open(folder / "y.safetensors"), manifest)
    other = next(name for name in base if name not in probes)
    slimtensors.save(base | {other: torch.zeros(3000)}, folder / "a.safetensors")
    archive = slimtensors.open(folder / "d.safetensors")
    assert archive.base.found.archive.path.endswith("a.safetensors")
    assert all(same_bits(x, new[name]) for name, x in archive.items(threads=2))
    assert archive.base.found.archive.path.endswith("y.safetensors")
    (folder / "y.safetensors").unlink()
    with pytest.raises(MismatchError, match=rf"a\.safetensors: {other}: differs .*found by: sib"):
        slimtensors.load(folder / "d.safetensors")


def test_candidates_are_compared_by_headers_and_a_few_tensors_only(made, monkeypatch):
    delta, _ = made
    for i in range(4):
        write_folder(delta.parent / f"a{i}", table=table(seed=i + 1))
        small = {name: x[:2] for name, x in table(seed=i).items()}
        write_folder(delta.parent / f"b{i}", table=small)
    (delta.parent / "base").rename(delta.parent / "z")
    read = []
    digest = bases.tensor_digest
    monkeypatch.setattr(bases, "tensor_digest", lambda x: read.append(tuple(x.shape)) or digest(x))
    with slimtensors.open(delta):
        assert len(read) == 4 + 5  # one of each wrong model, then those of the base
        assert (2,) not in read


def test_siblings_that_are_no_models_are_skipped(made, tmp_path):
    delta, new = made
    (delta.parent / "base").rename(delta.parent / "z")
    (delta.parent / "damaged.safetensors").write_bytes(b"x" * 100)
    (delta.parent / "empty").mkdir()
    (delta.parent / "notes.txt").write_text("text")
    write_folder(delta.parent / "shards", table=table(), shards=2)
    next((delta.parent / "shards").glob("*00001*")).unlink()
    assert check(delta, new) == "sibling"


def chain(folder, count):
    """Write `model0` and a chain of deltas from it; return the tensors of the last model."""
    model = table()
    write_folder(folder / "model0", table=model)
    before = folder / "model0"
    for step in range(1, count + 1):
        model = moved(model, step)
        write_folder(folder / "last" / f"model{step}", table=model)
        diff_folder(folder / "last" / f"model{step}", before, folder / f"delta{step}")
        before = folder / f"delta{step}"
    return model


def test_a_delta_of_a_delta_loads(tmp_path):
    new = chain(tmp_path, 3)
    assert check(tmp_path / "delta3", new) == "sibling"
    found = slimtensors.open(tmp_path / "delta3").base.found
    assert found.to_json()["base"]["base"]["path"] == str(tmp_path / "model0")
    for name in ("delta1", "delta2", "model0"):  # by content: the hints are of no use
        (tmp_path / name).rename(tmp_path / f"x{name}")
    assert check(tmp_path / "delta3", new) == "sibling"
    restore_folder(tmp_path / "delta3", None, tmp_path / "back")
    assert slimtensors.verify(tmp_path / "back", against=tmp_path / "last" / "model3")
    (tmp_path / "xmodel0").rename(tmp_path / ".model0")
    with pytest.raises(MismatchError, match="its base 'delta2' was not found"):
        slimtensors.open(tmp_path / "delta3")


def test_the_length_of_a_chain_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("slimtensors.archive.delta.MAX_CHAIN", 2)
    chain(tmp_path, 2)
    model = write_folder(tmp_path / "more", table=table())
    with pytest.raises(ConfigError, match="delta2 is the last of 2 deltas, the maximum"):
        diff_folder(model, tmp_path / "delta2", tmp_path / "delta3")
    monkeypatch.setattr("slimtensors.archive.bases.MAX_CHAIN", 1)
    with pytest.raises(MismatchError, match=r"delta1: chain of more than 1 deltas"):
        slimtensors.open(tmp_path / "delta2")
    assert MAX_CHAIN == 16


def test_a_cycle_is_refused(tmp_path):
    """Two deltas that name each other as base, and the base of both is gone."""
    chain(tmp_path, 2)
    (tmp_path / "model0").rename(tmp_path / ".model0")
    for name in ("delta1", "delta2"):
        path = tmp_path / name / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"]["delta"]["base"] = {"delta1": "delta2"}.get(name, "delta1")
        path.write_text(json.dumps(config))
    with pytest.raises(MismatchError, match=r"base 'delta1' was not found.* \(a cycle of deltas\)"):
        slimtensors.open(tmp_path / "delta2")
    with pytest.raises(MismatchError, match=r"delta2 is the base of itself"):
        slimtensors.open(tmp_path / "delta2", base=tmp_path / "delta2")


@pytest.mark.hostile
@pytest.mark.parametrize("name", ["../base", "/base", "..", ".", "a/../../base", "", 7, None])
def test_a_path_in_the_file_never_leads_out_of_the_parent(made, tmp_path, name):
    delta, _ = made
    base = move_base(made, tmp_path / "base")
    name = str(base) if name == "/base" else name
    path = delta / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["delta"]["base"] = name
    path.write_text(json.dumps(config))
    weights = delta / "delta.safetensors"
    forge = {"name": name, "model": "../../base", "revision": 3}
    raw = edit_manifest(weights.read_bytes(), lambda m: m["delta"].update(base=forge))
    weights.write_bytes(raw)
    with pytest.raises(MismatchError, match=r"its base.* was not found"):
        slimtensors.open(delta)


@pytest.mark.hostile
def test_a_link_beside_the_delta_does_not_lead_out_of_its_parent(made, tmp_path):
    delta, new = made
    base = move_base(made, tmp_path / "outside" / "base")
    (delta.parent / "base").symlink_to(base, target_is_directory=True)
    with pytest.raises(MismatchError, match="base: a link that leads out of"):
        slimtensors.open(delta)
    (delta.parent / "base").unlink()
    base.rename(delta.parent / "real")
    (delta.parent / "base").symlink_to("real", target_is_directory=True)
    assert check(delta, new) == "sibling"


@pytest.mark.hostile
@pytest.mark.parametrize("text", ["{", "[]", '{"quantization_config": {"delta": 3}}', "[" * 5000])
def test_a_config_that_cannot_be_read_is_not_needed(made, text):
    delta, new = made
    (delta / "config.json").write_text(text)
    assert check(delta, new) == "sibling"


@pytest.mark.hostile
@pytest.mark.parametrize("names", [[], {"codes": 3}, {"other": "codes"}])
def test_a_malformed_table_of_names_is_a_corrupt_file_error(made, names):
    path = made[0] / "delta.safetensors"
    forged = edit_manifest(path.read_bytes(), lambda m: m["delta"].update(names=names))
    path.write_bytes(forged)
    with pytest.raises(CorruptFileError, match=r"delta: delta: malformed delta"):
        slimtensors.open(made[0])


def test_a_base_beside_a_remote_delta_is_found_by_its_name(made):
    fsspec = pytest.importorskip("fsspec")
    delta, new = made
    memory = fsspec.filesystem("memory")
    for path in (delta / "delta.safetensors", delta.parent / "base" / "model.safetensors"):
        memory.pipe(f"/remote-delta/{path.parent.name}/{path.name}", path.read_bytes())
    assert check("memory://remote-delta/delta", new) == "sibling"
    memory.rm("/remote-delta/base/model.safetensors")
    with pytest.raises(MismatchError, match="its base 'base' was not found"):
        slimtensors.open("memory://remote-delta/delta")


def test_the_base_is_not_overwritten(made):
    delta, _ = made
    with pytest.raises(ConfigError, match="choose another target"):
        decompress_folder(delta, delta.parent / "base", replace=True)


def test_verify_reads_the_base_on_request(made, tmp_path):
    delta, _ = made
    assert slimtensors.verify(delta).tensors == 2  # the residuals
    assert slimtensors.verify(delta, base=delta.parent / "base").tensors == 5
    assert slimtensors.verify(delta, against=tmp_path / "new").equal == 5
    assert slimtensors.verify(tmp_path / "new", against=delta).equal == 5
    assert not slimtensors.verify(delta, against=delta.parent / "base")
    compress_folder(tmp_path / "new", tmp_path / "small")
    assert slimtensors.verify(tmp_path / "small", against=delta).files == "identical"


def run(capsys, *words):
    code = main([str(word) for word in words])
    return code, capsys.readouterr()


def test_inspect_reports_the_base(made, tmp_path, capsys):
    delta, _ = made
    code, out = run(capsys, "inspect", delta)
    assert code == 0
    assert "delta of base (5 tensors, digest " in out.out
    assert f"base: {delta.parent / 'base'} (found by: sibling)" in out.out
    about = json.loads(run(capsys, "inspect", delta, "--json")[1].out)["delta"]
    assert about["found"] == {"path": str(delta.parent / "base"), "found_by": "sibling"}
    assert (about["base"], about["needed"], about["problem"]) == ("base", 5, None)
    base = move_base(made, tmp_path / "away")
    about = json.loads(run(capsys, "inspect", delta, "--json")[1].out)["delta"]
    assert about["found"] is None
    assert "was not found" in about["problem"]
    assert "base: not found" in run(capsys, "inspect", delta)[1].out
    about = json.loads(run(capsys, "inspect", delta, "--json", "--base", base)[1].out)["delta"]
    assert about["found"]["found_by"] == "argument"
    assert run(capsys, "inspect", tmp_path / "new", "--base", base)[0] == 2
    assert run(capsys, "inspect", delta, "--base", tmp_path / "new")[0] == 1


def test_verbs_take_deltas_as_models(made, tmp_path, capsys):
    delta, _ = made
    new = tmp_path / "new"
    for verb in ("decompress", "restore", "compress", "convert"):
        more = ["--to", "slim"] if verb == "convert" else []
        code, out = run(capsys, verb, delta, "-o", tmp_path / verb, *more)
        assert code == 0, out.err
        assert slimtensors.verify(tmp_path / verb, against=new)
    base = move_base(made, tmp_path / "away")
    for verb in ("decompress", "restore", "compress"):
        code, out = run(capsys, verb, delta, "-o", tmp_path / verb, "-f")
        assert (code, out.err.count("was not found")) == (1, 1)
        code, out = run(capsys, verb, delta, "--base", base, "-o", tmp_path / f"{verb}2")
        assert code == 0, out.err
    assert run(capsys, "verify", delta, "--base", base)[0] == 0
    assert run(capsys, "verify", delta, "--against", new, "--base", base)[0] == 0
    assert run(capsys, "verify", delta, "--base", new)[0] == 1


def test_diff_takes_the_base_first_or_as_an_option(made, tmp_path, capsys):
    base, new = made[0].parent / "base", tmp_path / "new"
    assert run(capsys, "diff", base, new, "-o", tmp_path / "a")[0] == 0
    assert run(capsys, "diff", new, "--base", base, "-o", tmp_path / "b")[0] == 0
    first, second = (tmp_path / x / "delta.safetensors" for x in "ab")
    assert first.read_bytes() == second.read_bytes()
    for words, message in [
        ([base, new, "--base", base], "omit --base, and name the base first"),
        ([new], "diff needs two models: slimtensors diff BASE"),
        ([base, new, new], "diff takes BASE and MODEL, got 3 models"),
        ([base, new, "--base-revision", "main"], "requires base_model"),
        ([base, new, "--base-model", "../x"], "expected OWNER/NAME"),
    ]:
        code, out = run(capsys, "diff", *words, "-o", tmp_path / "c")
        assert code == 2
        assert message in out.err
        assert not (tmp_path / "c").exists()
    named = ["--base-model", "o/n", "--base-revision", "v1"]
    assert run(capsys, "diff", base, new, "-o", tmp_path / "c", *named)[0] == 0
    about = json.loads(run(capsys, "inspect", tmp_path / "c", "--json")[1].out)["delta"]
    assert (about["base_model"], about["base_revision"]) == ("o/n", "v1")
