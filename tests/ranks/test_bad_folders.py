"""Distributed checkpoints that are damaged, forged, or not what they say."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from ranks.one import SINGLE, later, load, save, state
from torch.distributed.checkpoint.api import CheckpointException

import slimtensors
from slimtensors import _core
from slimtensors.checkpoint.distributed.manifest import (
    DistributedBase,
    DistributedManifest,
    StoredChunk,
    read_manifest,
    write_manifest,
)
from slimtensors.checkpoint.distributed.reader import StoredShards
from slimtensors.errors import CorruptFileError, FormatError, UnsupportedVersionError
from slimtensors.storage.reader import DISTRIBUTED as MANIFEST

pytestmark = pytest.mark.filterwarnings(SINGLE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    save(state(rows=100), folder / "first")
    save(later(state()), folder / "whole")
    save(later(state()), folder / "second", base=folder / "whole")
    return folder


@pytest.fixture
def copy(runs, tmp_path):
    shutil.copytree(runs / "first", tmp_path / "first")
    return tmp_path / "first"


def rewritten(folder, **changes):
    """Write another manifest, as whoever forges one would: with a good checksum."""
    about = read_manifest(folder)
    (folder / MANIFEST).unlink()
    write_manifest(folder, replace(about, **changes))


TWICE = [[[0, 0], [50, 700], 0], [[25, 0], [50, 700], 0]]
"""As many items as there are, some of them twice."""


def forged(folder, edit):
    """Edit the JSON itself, and seal it again."""
    path = folder / MANIFEST
    data = json.loads(path.read_text())
    data.pop("crc32c")
    edit(data)
    body = "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data.items())
    path.write_text(f'{body},\n"crc32c": {_core.crc32c(body.encode())}\n}}\n')


def test_a_manifest_says_the_same_after_it_was_read(runs):
    for name in ("first", "second"):
        about = read_manifest(runs / name)
        assert DistributedManifest.from_text(about.to_text()) == about


def test_any_change_of_the_manifest_is_found(copy):
    path = copy / MANIFEST
    raw = path.read_bytes()
    for at in range(0, len(raw), 7):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        with pytest.raises(FormatError, match=r"distributed\.json"):
            read_manifest(copy)
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CorruptFileError, match=r"distributed\.json"):
        read_manifest(copy)


def test_any_flipped_bit_of_a_file_is_found(copy):
    path = copy / "rank-00000.safetensors"
    raw = path.read_bytes()
    whole = state(rows=100)
    for at in range(5, len(raw), len(raw) // 40):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :])
        with pytest.raises(CheckpointException, match=r"rank-00000\.safetensors"):
            load(copy, whole)
    path.write_bytes(raw[:-100])
    with pytest.raises(CheckpointException, match=r"bytes, .* were written"):
        load(copy, whole)


@pytest.mark.parametrize(
    "name", ["../rank-00000.safetensors", "/etc/passwd", "a/b", "..", ".x", ""]
)
def test_a_manifest_cannot_lead_out_of_its_folder(copy, name):
    forged(copy, lambda data: data.update(files={name: 3}))
    with pytest.raises(CorruptFileError, match="is not a file of this folder"):
        read_manifest(copy)
    forged(copy, lambda data: data.update(files={"a": 3}, base={"name": f"{name}/..", "run": "x"}))
    with pytest.raises(CorruptFileError, match="is not a checkpoint beside this one"):
        read_manifest(copy)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["tensors"]["model.wide"]["chunks"].pop(), "chunks are missing"),
        (lambda d: d["tensors"]["model.wide"]["chunks"].append([[0, 0], [1, 1], 0]), "too many"),
        (lambda d: d["tensors"]["model.wide"].update(chunks=TWICE), "two chunks overlap"),
        (lambda d: d["tensors"]["model.wide"].update(chunks=[[[50, 0], [100, 700], 0]]), "outside"),
        (lambda d: d["tensors"]["model.wide"].update(chunks=[[[0, 0], [100, 700], 9]]), "file 9"),
        (lambda d: d["tensors"]["model.wide"].update(dtype="float33"), "unknown dtype"),
        (lambda d: d["tensors"]["model.wide"].update(path=[{}]), "lies nowhere"),
        (lambda d: d["objects"].update(step=7), "int"),
        (lambda d: d.update(piece_bytes=0), "pieces of 0 bytes"),
        (lambda d: d.pop("world"), "world"),
        (lambda d: d.update(format="something"), "is not the description"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(copy, edit, message):
    forged(copy, edit)
    with pytest.raises(CorruptFileError, match=message):
        read_manifest(copy)


def test_a_newer_version_says_so(copy):
    forged(copy, lambda data: data.update(version=99))
    with pytest.raises(UnsupportedVersionError, match=r"version 99.*update slimtensors"):
        read_manifest(copy)
    with pytest.raises(CheckpointException, match=r"version 99.*update slimtensors"):
        load(copy, state(rows=100))


def test_a_piece_that_is_not_what_the_manifest_says_is_refused(copy):
    about = read_manifest(copy)
    wide = about.tensors["model.wide"]
    box = replace(wide.chunks[0].box, shape=(70, 1000))
    spec = replace(wide.spec, shape=(70, 1000))
    other = replace(wide, spec=spec, chunks=(StoredChunk(box, 0),))
    rewritten(copy, tensors={**about.tensors, "model.wide": other})
    with pytest.raises(CheckpointException, match="is not the piece that the manifest describes"):
        load(copy, {"model": {"wide": torch.zeros(70, 1000)}})


def test_what_the_manifest_names_and_no_file_has_is_missing(copy):
    about = read_manifest(copy)
    rewritten(
        copy,
        tensors={**about.tensors, "model.more": about.tensors["model.wide"]},
        objects={**about.objects, "more": about.objects["step"]},
    )
    with pytest.raises(CheckpointException, match=r"model\.more@0,0: is missing"):
        load(copy, {"model": {"more": torch.zeros(100, 700)}})
    with pytest.raises(CheckpointException, match="more: is missing"):
        load(copy, {"more": 3})


def test_a_difference_needs_the_very_base(runs, tmp_path):
    shutil.copytree(runs / "second", tmp_path / "second")
    with pytest.raises(CheckpointException, match=r"which is not at .*; bring it back, or pass"):
        load(tmp_path / "second", state())
    shutil.copytree(runs / "first", tmp_path / "whole")
    with pytest.raises(CheckpointException, match="is a difference from whole"):
        load(tmp_path / "second", state())
    out = load(tmp_path / "second", state(), base=runs / "whole")
    assert torch.equal(out["model"]["wide"], later(state())["model"]["wide"])


def test_a_base_with_other_content_is_refused(runs, tmp_path):
    shutil.copytree(runs / "second", tmp_path / "second")
    save(state(5), tmp_path / "whole")
    run = read_manifest(tmp_path / "whole").run
    rewritten(tmp_path / "second", base=DistributedBase("whole", run))
    with pytest.raises(CheckpointException, match="the base is not what it was made from"):
        load(tmp_path / "second", state())


def test_a_checkpoint_is_no_difference_from_itself(copy):
    rewritten(copy, base=DistributedBase("first", read_manifest(copy).run))
    with pytest.raises(CorruptFileError, match="from itself"):
        StoredShards(copy)


def test_a_file_of_something_else_is_refused(copy, runs):
    slimtensors.save({"x": torch.zeros(3)}, copy / "rank-00000.safetensors")
    size = (copy / "rank-00000.safetensors").stat().st_size
    rewritten(copy, files={"rank-00000.safetensors": size})
    with pytest.raises(CheckpointException, match="is not the file of a rank"):
        load(copy, state(rows=100))


def test_a_folder_that_is_no_checkpoint_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        read_manifest(tmp_path / "none")
    with pytest.raises(FormatError, match="is no distributed checkpoint"):
        read_manifest(tmp_path)
