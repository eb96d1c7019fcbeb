"""Pools of models that share tensors."""

import doctest
import filecmp
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import write_folder
from reliability_tools import ENVIRONMENT
from safetensors.torch import load_file, save_file

from slimtensors.errors import (
    ConfigError,
    CorruptFileError,
    FormatError,
    MismatchError,
    MissingFileError,
    UnsupportedVersionError,
)
from slimtensors.sync import Pool
from slimtensors.sync import pool as pool_module
from slimtensors.sync.objects import MAX_DEPTH

EXAMPLE = Path(__file__).parents[2] / "examples" / "pool_on_ray.py"
PROGRAM = Path(__file__).parent / "programs" / "add_to_pool.py"


def base_weights():
    g = torch.Generator().manual_seed(0)
    table = {f"layers.{i}.weight": torch.randn(96, 128, generator=g).bfloat16() for i in range(4)}
    return {**table, "norm.weight": torch.ones(96, dtype=torch.bfloat16)}


def tune(table, seed, *, layers=(2, 3), rate=1e-2):
    """Return a model of which some layers differ a little."""
    g = torch.Generator().manual_seed(seed)

    def change(x):
        return (x.float() * (1 + rate * torch.randn(x.shape, generator=g))).bfloat16()

    names = {f"layers.{i}.weight" for i in layers}
    return {name: change(x) if name in names else x for name, x in table.items()}


@pytest.fixture
def family(tmp_path):
    base = base_weights()
    tables = {"base": base, "tuned-1": tune(base, 1), "tuned-2": tune(base, 2)}
    for name, table in tables.items():
        write_folder(tmp_path / name, table=table, shards=2 if name == "tuned-2" else 1)
    return tmp_path


def assert_same_files(one, other):
    """Compare all files of two folders byte for byte."""
    names = {p.relative_to(one) for p in one.rglob("*") if p.is_file()}
    assert names == {p.relative_to(other) for p in other.rglob("*") if p.is_file()}
    for name in names:
        assert filecmp.cmp(one / name, other / name, shallow=False), name


def add_all(folder, names=("base", "tuned-1", "tuned-2")):
    pool = Pool(folder / "pool")
    return pool, {name: pool.add(folder / name) for name in names}


def test_members_come_back_byte_for_byte_and_share_tensors(family):
    pool, added = add_all(family)
    assert pool.names() == ["base", "tuned-1", "tuned-2"]
    for name in pool.names():
        pool.get(name, family / f"{name}-again")
        assert_same_files(family / name, family / f"{name}-again")
    assert (added["base"].new_tensors, added["tuned-1"].new_tensors) == (5, 2)
    assert added["tuned-1"].member.base == added["tuned-2"].member.base == "base"
    whole = sum(pool.tensors.path(d).stat().st_size for d in added["base"].member.tensors)
    tuned = sum(
        pool.tensors.path(d).stat().st_size
        for d in added["tuned-1"].member.tensors - added["base"].member.tensors
    )
    assert tuned < 0.4 * whole, "half of the layers, as differences"


def test_adding_again_stores_nothing(family):
    pool, _ = add_all(family)
    before = pool.stored_bytes()
    again = pool.add(family / "tuned-1")
    assert (again.stored_bytes, again.member.base) == (0, "base")
    copy = pool.add(family / "tuned-1", name="a copy")
    assert (copy.new_tensors, copy.stored_bytes) == (0, 0)
    assert pool.stored_bytes() - before < 2_000


def test_another_model_of_the_same_name_is_refused(family):
    pool, _ = add_all(family)
    with pytest.raises(ConfigError, match="contains another model called 'base'"):
        pool.add(family / "tuned-1", name="base")
    pool.get("base", family / "again")
    assert_same_files(family / "base", family / "again")


def test_removing_the_base_keeps_what_others_need(family):
    pool, _ = add_all(family)
    pool.remove("base")
    assert pool.names() == ["tuned-1", "tuned-2"]
    assert pool.verify().damaged == []
    pool.get("tuned-2", family / "again")
    assert_same_files(family / "tuned-2", family / "again")
    freed = pool.own_bytes()["tuned-1"]
    assert pool.remove("tuned-1") == freed > 0
    assert pool.verify().damaged == []
    pool.remove("tuned-2")
    assert not pool.tensors.digests()
    assert not pool.files.digests()


def test_the_most_similar_member_becomes_the_base(tmp_path):
    one, other = base_weights(), {n: x.flip(0).contiguous() for n, x in base_weights().items()}
    for name, table in {"one": one, "other": other, "new": tune(other, 5, layers=range(4))}.items():
        write_folder(tmp_path / name, table=table)
    _, added = add_all(tmp_path, ("one", "other", "new"))
    assert added["new"].member.base == "other"


def test_a_base_may_be_named(family):
    pool, _ = add_all(family, ("base", "tuned-1"))
    member = pool.add(family / "tuned-2", base="tuned-1").member
    assert member.base == "tuned-1"
    with pytest.raises(ConfigError, match="has no member 'tuned-3'; did you mean"):
        pool.add(family / "tuned-2", name="x", base="tuned-3")


def test_chains_of_differences_are_bounded(tmp_path):
    pool, table = Pool(tmp_path / "pool"), base_weights()
    for i in range(MAX_DEPTH + 3):
        write_folder(tmp_path / f"m{i}", table=table)
        pool.add(tmp_path / f"m{i}", base=f"m{i - 1}" if i else None)
        table = tune(table, i, layers=range(4), rate=1e-3)
    depths = [len(pool.tensors.bases(digest)) for digest in pool.tensors.digests()]
    assert max(depths) == MAX_DEPTH
    for i in range(MAX_DEPTH + 3):
        pool.get(f"m{i}", tmp_path / "again", replace=True)
        assert_same_files(tmp_path / f"m{i}", tmp_path / "again")


def test_all_dtypes_tied_empty_and_blob_like_tensors(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    dtypes = [torch.float32, torch.float16, torch.int8, torch.bool, torch.int64, torch.float64]
    table = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    table |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(-0.0)}
    table["fp8"] = torch.arange(16).float().to(torch.float8_e4m3fn)
    save_file(table, folder / "model.safetensors")
    pool = Pool(tmp_path / "pool")
    pool.add(folder)
    slim = tmp_path / "slim"
    slim.mkdir()
    assert subprocess_free_compress(folder, slim)
    pool.add(slim)
    for name in ("model", "slim"):
        pool.get(name, tmp_path / f"{name}-again")
        assert_same_files(tmp_path / name, tmp_path / f"{name}-again")


def subprocess_free_compress(folder, slim):
    """Write a compressed copy, whose entries are blobs."""
    import slimtensors

    big = {**load_file(folder / "model.safetensors"), "zeros": torch.zeros(64, 64)}
    return slimtensors.save(big, slim / "model.safetensors").ratio > 1


def test_hidden_files_are_left_out_and_reported(family):
    (family / "base" / ".secret").write_text("x")
    (family / "base" / ".gitattributes").write_text("y")
    pool = Pool(family / "pool")
    assert list(pool.add(family / "base").left_out) == [".secret"]
    pool.get("base", family / "again")
    assert (family / "again" / ".gitattributes").exists()
    assert not (family / "again" / ".secret").exists()


def test_files_that_change_while_they_are_added_are_refused(family, monkeypatch):
    pool = Pool(family / "pool")
    open_model = pool_module._open

    def open_and_change(*arguments):
        job = open_model(*arguments)
        (family / "base" / "tokenizer.json").write_text("changed")
        return job

    monkeypatch.setattr(pool_module, "_open", open_and_change)
    with pytest.raises(MismatchError, match=r"tokenizer\.json changed while it was added"):
        pool.add(family / "base")
    assert pool.names() == []


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "a\\b", "x" * 300])
def test_names_that_are_not_plain_are_refused(family, name):
    pool = Pool(family / "pool")
    with pytest.raises(ConfigError, match="cannot be the name of a member"):
        pool.add(family / "base", name=name)
    pool.add(family / "base")
    with pytest.raises(ConfigError, match="cannot be the name of a member"):
        pool.get(name, family / "again")


def test_other_folders_are_not_taken_for_pools(family):
    with pytest.raises(ConfigError, match="exists and is not a pool"):
        Pool(family / "base").add(family / "tuned-1")
    with pytest.raises(FormatError, match=r"is not a pool \(pool.json not found\)"):
        Pool(family / "base").names()
    with pytest.raises(FileNotFoundError, match="no such pool"):
        Pool(family / "missing").names()
    with pytest.raises(ConfigError, match="is inside"):
        Pool(family / "base" / "pool").add(family / "base")
    with pytest.raises(ConfigError, match="no safetensors files found"):
        Pool(family / "pool").add(family / "base" / "onnx")
    with pytest.raises(ConfigError, match="is a file; a pool stores folders"):
        Pool(family / "pool").add(family / "base" / "model.safetensors")


def test_newer_pools_are_refused(family):
    pool, _ = add_all(family, ("base",))
    manifest = family / "pool" / "pool.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        pool.names()


@pytest.mark.hostile
def test_damaged_objects_are_reported_by_name(family):
    pool, added = add_all(family, ("base", "tuned-1"))
    digest = min(added["base"].member.tensors)
    path = pool.tensors.path(digest)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert any(str(path) in problem for problem in pool.verify().damaged)
    with pytest.raises(CorruptFileError, match=digest):
        pool.get("base", family / "again")
    assert not (family / "again").exists()
    path.unlink()
    with pytest.raises(MissingFileError, match=f"{digest}.*needed by a member"):
        pool.get("base", family / "again")


@pytest.mark.hostile
def test_an_object_with_the_content_of_another_is_refused(family):
    pool, added = add_all(family, ("base",))
    one, other = sorted(added["base"].member.tensors)[:2]
    text = pool.tensors.path(other).read_bytes().replace(other.encode(), one.encode())
    pool.tensors.path(one).write_bytes(text)
    with pytest.raises(CorruptFileError, match=r"damaged|differs"):
        pool.get("base", family / "again")
    blob = min(added["base"].member.blobs)
    pool.files.path(blob).write_text("other")
    assert any("content differs" in problem for problem in pool.verify().damaged)


@pytest.mark.hostile
def test_every_changed_character_of_a_member_is_noticed(family):
    pool, _ = add_all(family, ("base",))
    path = family / "pool" / "members" / "base.json"
    text = path.read_bytes()
    for i in range(0, len(text), 97):
        changed = bytearray(text)
        changed[i] ^= 2
        path.write_bytes(changed)
        with pytest.raises(FormatError, match=r"base\.json"):
            pool.member("base")
        with pytest.raises(FormatError):
            pool.clean()  # removes nothing: it cannot know what this member needs
    path.write_bytes(text)
    assert pool.verify().damaged == []


@pytest.mark.hostile
def test_paths_outside_of_the_folder_are_refused(family):
    pool, added = add_all(family, ("base",))
    member = added["base"].member
    files = {f"../{name}": file for name, file in member.files.items()}
    path = family / "pool" / "members" / "evil.json"
    path.write_text(type(member)("evil", files).to_text())
    with pytest.raises(CorruptFileError, match="not a path inside the folder"):
        pool.get("evil", family / "x" / "again")


@pytest.mark.crash
def test_a_killed_add_leaves_a_pool_that_works(family):
    add_all(family, ("base",))
    command = [sys.executable, str(PROGRAM), str(family / "pool"), str(family / "tuned-1")]
    environment = {**ENVIRONMENT, "DELAY": "30"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"adding\n"
        process.send_signal(signal.SIGKILL)
    pool = Pool(family / "pool")
    assert pool.names() == ["base"]
    pool.add(family / "tuned-1")
    pool.remove("base")
    assert pool.verify().damaged == []
    assert not list((family / "pool" / "members").glob(".*"))


@pytest.mark.crash
def test_what_a_running_add_needs_is_not_removed(family):
    pool, _ = add_all(family, ("base",))
    command = [sys.executable, str(PROGRAM), str(family / "pool"), str(family / "tuned-1")]
    environment = {**ENVIRONMENT, "DELAY": "0.1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"adding\n"
        pool.remove("base")
        assert process.wait() == 0
    pool.get("tuned-1", family / "again")
    assert_same_files(family / "tuned-1", family / "again")
    assert pool.verify().damaged == []


@pytest.mark.crash
def test_an_interrupted_removal_loses_nothing(family):
    pool, added = add_all(family, ("base",))
    digest = min(added["base"].member.tensors)
    path = pool.tensors.path(digest)
    path.rename(path.with_name(f".{path.name}.0123456789abcdef.slimtensors-removed"))
    pool.get("base", family / "again")
    assert_same_files(family / "base", family / "again")
    pool.clean()
    assert pool.verify().damaged == []
    assert not list((family / "pool" / "tensors").rglob(".*"))


@pytest.mark.long
@pytest.mark.crash
def test_processes_that_add_and_remove_at_once(family):
    base = load_file(family / "base" / "model.safetensors")
    models = [family / f"m{i}" for i in range(5)]
    for i, folder in enumerate(models):
        write_folder(folder, table=tune(base, 100 + i))
    pool, _ = add_all(family, ("base",))
    command = [sys.executable, str(PROGRAM), str(family / "pool")]
    orders = [models, models[::-1]]
    processes = [
        subprocess.Popen([*command, *map(str, order)], env=ENVIRONMENT) for order in orders
    ]
    while any(process.poll() is None for process in processes):
        for name in pool.names():
            if name in ("base", "m3"):
                pool.remove(name)
    assert [process.returncode for process in processes] == [0, 0]
    assert pool.verify().damaged == []
    for folder in models:
        if folder.name in pool.names():
            pool.get(folder.name, family / "again", replace=True)
            assert_same_files(folder, family / "again")
    assert set(pool.names()) >= {f.name for f in models} - {"m3"}


def test_the_example_in_the_docstring_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(pool_module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.long
@pytest.mark.slow
def test_a_hundred_models_through_ray_with_a_killed_worker(tmp_path):
    command = [sys.executable, str(EXAMPLE), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    assert "100 models in" in done.stdout
    assert "one worker killed; all intact" in done.stdout


def test_links_in_the_source_are_followed_as_in_the_cache_of_a_hub(family):
    blobs, snapshot = family / "blobs", family / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for i, path in enumerate(p for p in (family / "base").iterdir() if p.is_file()):
        os.link(path, blobs / str(i))
        (snapshot / path.name).symlink_to(blobs / str(i))
    pool = Pool(family / "pool")
    pool.add(snapshot)
    pool.get("snapshot", family / "again")
    assert (family / "again" / "model.safetensors").read_bytes() == (
        family / "base" / "model.safetensors"
    ).read_bytes()
    assert json.loads((family / "again" / "config.json").read_text())
