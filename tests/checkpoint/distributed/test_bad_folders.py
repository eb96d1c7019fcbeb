"""Damaged, forged and inconsistent distributed checkpoints."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from checkpoint.distributed.one import SINGLE, later, load, save, state
from torch.distributed.checkpoint.api import CheckpointException

import slimtensors
from slimtensors import _core
from slimtensors.checkpoint.distributed import verify
from slimtensors.checkpoint.distributed.manifest import (
    DistributedBase,
    DistributedManifest,
    StoredChunk,
    read_distributed_manifest,
    write_distributed_manifest,
)
from slimtensors.checkpoint.distributed.reader import StoredShards
from slimtensors.errors import (
    ConfigError,
    CorruptFileError,
    FormatError,
    UnsupportedVersionError,
)
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


def replace_manifest(folder, **changes):
    """Write a changed manifest with a valid checksum."""
    manifest = read_distributed_manifest(folder)
    (folder / MANIFEST).unlink()
    write_distributed_manifest(folder, replace(manifest, **changes))


TWICE = [[[0, 0], [50, 700], 0], [[25, 0], [50, 700], 0]]
"""Overlapping chunks with the right number of elements."""


def edit_manifest(folder, edit):
    """Edit the JSON of a manifest, and update its checksum."""
    path = folder / MANIFEST
    data = json.loads(path.read_text())
    data.pop("crc32c")
    edit(data)
    body = "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data.items())
    path.write_text(f'{body},\n"crc32c": {_core.crc32c(body.encode())}\n}}\n')


def test_a_manifest_round_trips(runs):
    for name in ("first", "second"):
        manifest = read_distributed_manifest(runs / name)
        assert DistributedManifest.from_text(manifest.to_text()) == manifest


def test_any_change_of_the_manifest_is_detected(copy):
    path = copy / MANIFEST
    raw = path.read_bytes()
    for at in range(0, len(raw), 7):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        with pytest.raises(FormatError, match=r"distributed\.json"):
            read_distributed_manifest(copy)
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CorruptFileError, match=r"distributed\.json"):
        read_distributed_manifest(copy)


def test_any_flipped_bit_of_a_file_is_detected(copy):
    path = copy / "rank-00000.safetensors"
    raw = path.read_bytes()
    whole = state(rows=100)
    for at in range(5, len(raw), len(raw) // 40):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :])
        with pytest.raises(CheckpointException, match=r"rank-00000\.safetensors"):
            load(copy, whole)
    path.write_bytes(raw[:-100])
    with pytest.raises(CheckpointException, match=r"expected .* bytes, got"):
        load(copy, whole)


@pytest.mark.parametrize(
    "name", ["../rank-00000.safetensors", "/etc/passwd", "a/b", "..", ".x", ""]
)
def test_a_manifest_cannot_point_outside_its_folder(copy, name):
    edit_manifest(copy, lambda data: data.update(files={name: 3}))
    with pytest.raises(CorruptFileError, match="invalid file name"):
        read_distributed_manifest(copy)
    edit_manifest(
        copy, lambda data: data.update(files={"a": 3}, base={"name": f"{name}/..", "run": "x"})
    )
    with pytest.raises(CorruptFileError, match="base: name: expected the name of a folder"):
        read_distributed_manifest(copy)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["tensors"]["model.wide"]["chunks"].pop(), "chunks of 70000 elements, got 0"),
        (
            lambda d: d["tensors"]["model.wide"]["chunks"].append([[0, 0], [1, 1], 0]),
            "chunks of 70000 elements, got 70001",
        ),
        (lambda d: d["tensors"]["model.wide"].update(chunks=TWICE), "chunks overlap"),
        (lambda d: d["tensors"]["model.wide"].update(chunks=[[[50, 0], [100, 700], 0]]), "bounds"),
        (
            lambda d: d["tensors"]["model.wide"].update(chunks=[[[0, 0], [100, 700], 9]]),
            "tensors: model.wide: invalid chunk .*there are 1 files",
        ),
        (lambda d: d["tensors"]["model.wide"].update(dtype="float33"), "unknown dtype"),
        (
            lambda d: d["tensors"]["model.wide"].update(path=[{}]),
            "model.wide: path: expected a list",
        ),
        (lambda d: d["objects"].update(step=7), "objects: step: expected an object"),
        (lambda d: d.update(piece_bytes=0), "piece_bytes: expected an integer from 1"),
        (lambda d: d.pop("world"), "world: missing"),
        (lambda d: d.update(world=10**400), "world: expected an integer"),
        (lambda d: d.update(world=1e400), "Infinity is not valid JSON"),
        (lambda d: d.update(extra=1), "extra: unknown key"),
        (lambda d: d.update(run=[]), "run: expected text"),
        (lambda d: d.update(files=[]), "files: expected an object"),
        (lambda d: d["files"].update({"a": 10**30}), "files: a: expected an integer"),
        (lambda d: d["tensors"]["model.wide"].update(shape=[[]]), "model.wide: invalid shape"),
        (lambda d: d["tensors"]["model.wide"].update(chunks=[[[]]]), "model.wide: invalid chunk"),
        (lambda d: d["tensors"]["model.wide"].update(dtype={}), "model.wide: unknown dtype"),
        (lambda d: d["objects"]["step"].update(file=True), "objects: step: file: expected"),
        (lambda d: d["objects"]["step"].update(path=[True]), "objects: step: path: expected"),
        (lambda d: d["errors"].update({"a": "NaN"}), "errors: a: expected a finite number"),
        (lambda d: d["errors"].update({"a": 10**400}), "errors: a: expected a number"),
        (lambda d: d["kept_exact"].update({"a": 1}), "kept_exact: a: expected text"),
        (lambda d: d["base"] or d.update(base={"name": "x"}), "base: run: missing"),
        (lambda d: d.update(format="something"), "not the manifest of"),
    ],
)
def test_an_inconsistent_manifest_raises(copy, edit, message):
    edit_manifest(copy, edit)
    with pytest.raises(CorruptFileError, match=rf"first/distributed\.json: .*{message}"):
        read_distributed_manifest(copy)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "9" * 5000, '"a"'])
def test_other_content_raises(copy, text):
    (copy / MANIFEST).write_text(text)
    with pytest.raises(CorruptFileError, match=r"first/distributed\.json: "):
        read_distributed_manifest(copy)


def test_a_fifo_as_manifest_is_refused_at_once(copy):
    (copy / MANIFEST).unlink()
    os.mkfifo(copy / MANIFEST)
    with pytest.raises(FormatError, match="not a regular file"):
        read_distributed_manifest(copy)


def test_pieces_that_no_file_contains_are_not_listed(copy):
    shape = [1 << 56, 1]

    def edit(data):
        data["piece_bytes"] = 1
        data["tensors"]["model.wide"].update(shape=shape, chunks=[[[0, 0], shape, 0]])

    edit_manifest(copy, edit)
    with pytest.raises(CorruptFileError, match=r"model\.wide: 72057594037927936 pieces expected"):
        verify(copy)


def test_a_cycle_of_bases_is_reported_as_a_cycle(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    second = read_distributed_manifest(tmp_path / "runs" / "second")
    replace_manifest(tmp_path / "runs" / "whole", base=DistributedBase("second", second.run))
    with pytest.raises(CorruptFileError, match="cycle: second -> whole -> second"):
        StoredShards(tmp_path / "runs" / "second")


def test_a_base_for_a_full_checkpoint_is_refused(runs):
    with pytest.raises(ConfigError, match="needs no base"):
        StoredShards(runs / "first", base=runs / "second")


def test_a_newer_format_version_raises(copy):
    edit_manifest(copy, lambda data: data.update(version=99))
    with pytest.raises(UnsupportedVersionError, match=r"version 99.*upgrade slimtensors"):
        read_distributed_manifest(copy)
    with pytest.raises(CheckpointException, match=r"version 99.*upgrade slimtensors"):
        load(copy, state(rows=100))


def test_a_piece_that_differs_from_the_manifest_raises(copy):
    manifest = read_distributed_manifest(copy)
    wide = manifest.tensors["model.wide"]
    box = replace(wide.chunks[0].box, shape=(70, 1000))
    spec = replace(wide.spec, shape=(70, 1000))
    other = replace(wide, spec=spec, chunks=(StoredChunk(box, 0),))
    replace_manifest(copy, tensors={**manifest.tensors, "model.wide": other})
    with pytest.raises(
        CheckpointException, match=r"model\.wide@0,0: expected .*70, 1000.*, got .*100, 700"
    ):
        load(copy, {"model": {"wide": torch.zeros(70, 1000)}})


def test_items_listed_in_the_manifest_but_not_stored_raise(copy):
    manifest = read_distributed_manifest(copy)
    replace_manifest(
        copy,
        tensors={**manifest.tensors, "model.more": manifest.tensors["model.wide"]},
        objects={**manifest.objects, "more": manifest.objects["step"]},
    )
    with pytest.raises(CheckpointException, match=r"model\.more@0,0 not found"):
        load(copy, {"model": {"more": torch.zeros(100, 700)}})
    with pytest.raises(CheckpointException, match="more not found"):
        load(copy, {"more": 3})


def test_a_delta_needs_its_original_base(runs, tmp_path):
    shutil.copytree(runs / "second", tmp_path / "second")
    with pytest.raises(CheckpointException, match=r"which was not found at .*; pass base="):
        load(tmp_path / "second", state())
    shutil.copytree(runs / "first", tmp_path / "whole")
    with pytest.raises(CheckpointException, match="is a delta of whole"):
        load(tmp_path / "second", state())
    out = load(tmp_path / "second", state(), base=runs / "whole")
    assert torch.equal(out["model"]["wide"], later(state())["model"]["wide"])


def test_a_base_with_other_content_raises(runs, tmp_path):
    shutil.copytree(runs / "second", tmp_path / "second")
    save(state(5), tmp_path / "whole")
    run = read_distributed_manifest(tmp_path / "whole").run
    replace_manifest(tmp_path / "second", base=DistributedBase("whole", run))
    with pytest.raises(CheckpointException, match="difference from another tensor"):
        load(tmp_path / "second", state())


def test_a_delta_of_itself_raises(copy):
    replace_manifest(copy, base=DistributedBase("first", read_distributed_manifest(copy).run))
    with pytest.raises(CorruptFileError, match="cycle: first -> first"):
        StoredShards(copy)


def test_a_file_that_no_rank_wrote_raises(copy, runs):
    slimtensors.save({"x": torch.zeros(3)}, copy / "rank-00000.safetensors")
    size = (copy / "rank-00000.safetensors").stat().st_size
    replace_manifest(copy, files={"rank-00000.safetensors": size})
    with pytest.raises(CheckpointException, match="is not the file of a rank"):
        load(copy, state(rows=100))


def test_a_folder_that_is_not_a_checkpoint_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        read_distributed_manifest(tmp_path / "none")
    with pytest.raises(FormatError, match="is not a distributed checkpoint"):
        read_distributed_manifest(tmp_path)
