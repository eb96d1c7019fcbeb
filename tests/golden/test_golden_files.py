"""Golden files load to the bits that went in, and nobody rewrites them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden.slim.expected import describe, read_expected, sha256
from slimtensors.distributed import StorageReader
from torch.distributed import checkpoint as dcp

import slimtensors
from slimtensors import _core
from slimtensors.archive import values
from slimtensors.archive.decompress import decompress
from slimtensors.checkpoint import load_checkpoint
from slimtensors.checkpoint.run import verify_run
from slimtensors.codecs import names
from slimtensors.folder import decompress_folder, restore_folder
from slimtensors.sync import Pool, following

GOLDEN = Path(__file__).parent
SLIM = GOLDEN / "slim"
VERSION_1 = SLIM / "1"


def find_golden(*folders):
    """Parametrize a test with the golden files of these folders, of all versions."""
    found = sorted(path for folder in folders for path in SLIM.glob(f"*/{folder}/expected-*.json"))
    paths = [path.with_name(path.stem.removeprefix("expected-")) for path in found]
    ids = ["-".join(path.relative_to(SLIM).parts) for path in paths]
    return pytest.mark.parametrize("path", paths, ids=ids)


def expected(path):
    return read_expected(path.with_name(f"expected-{path.name}.json"))


def read_manifest(path):
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return json.loads(header["__metadata__"]["slimtensors"])


def test_nobody_rewrites_adds_or_removes_a_golden_file():
    lines = (GOLDEN / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    listed = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    found = {
        path.relative_to(GOLDEN).as_posix(): sha256(path.read_bytes())
        for path in GOLDEN.rglob("*")
        if path.is_file() and path.suffix in (".safetensors", ".json")
    }
    assert found == listed
    assert sum(path.stat().st_size for path in SLIM.rglob("*.*")) < 1_400_000


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
@find_golden("codecs", "states", "shards", "sparseml")
def test_a_golden_archive_loads_to_the_bits_that_went_in(path):
    file = path if path.is_dir() else path.with_name(f"{path.name}.safetensors")
    assert describe(slimtensors.load(file)) == expected(path)
    assert slimtensors.verify(file)


@pytest.mark.parametrize("version", ["1", "4"])
def test_a_golden_delta_restores_to_the_bits_that_went_in(version, tmp_path):
    folder, target = SLIM / version / "deltas", tmp_path / "new.safetensors"
    slimtensors.restore(folder / "file.safetensors", folder / "base.safetensors", target)
    assert describe(slimtensors.load(target)) == expected(folder / "file")


@pytest.mark.parametrize("path", ["1/deltas/file", "1/deltas/folder", "4/names/delta"])
def test_a_golden_delta_loads_with_the_base_beside_it(path):
    file = SLIM / path if (SLIM / path).is_dir() else SLIM / f"{path}.safetensors"
    with slimtensors.open(file) as archive:
        assert archive.base.found.found_by == "sibling"
    assert describe(slimtensors.load(file)) == expected(SLIM / path)


def test_a_golden_delta_of_a_folder_restores_to_the_same_files(tmp_path):
    folder = VERSION_1 / "deltas"
    files = read_manifest(folder / "folder" / "delta.safetensors")["delta"]["files"]
    restore_folder(folder / "folder", folder / "base.safetensors", tmp_path / "new")
    assert files.keys() == {path.name for path in (tmp_path / "new").glob("*.safetensors")}
    assert len(files) > 1
    assert describe(slimtensors.load(tmp_path / "new")) == expected(folder / "folder")


@pytest.mark.parametrize("name", ["file", "folder", "delta"])
def test_golden_files_give_back_their_originals_byte_for_byte(name, tmp_path):
    folder = SLIM / "2" / "originals"
    want = json.loads((folder / "expected-sums.json").read_text())[name]
    if name == "file":
        target = tmp_path / "plain.safetensors"
        with slimtensors.open(folder / "file.safetensors") as archive:
            decompress(archive, target)
    elif name == "folder":
        decompress_folder(folder / name, tmp_path / "back")
    else:
        restore_folder(folder / name, folder / "file.safetensors", tmp_path / "back")
    found = {path.name: sha256(path.read_bytes()) for path in tmp_path.rglob("*.*")}
    assert found == want


@find_golden("checkpoints")
def test_a_golden_checkpoint_loads_to_the_bits_that_went_in(path):
    assert describe(load_checkpoint(path)) == expected(path)


@find_golden("sync")
def test_a_golden_store_is_followed_from_its_first_version_and_from_a_keyframe(path, tmp_path):
    store = shutil.copytree(path, tmp_path / "store")
    assert describe(following(store).load()[1]) == expected(path)
    later = [folder for folder in store.iterdir() if folder.name > "v00000001"]
    for folder in later:
        folder.rename(tmp_path / folder.name)
    follower = following(store)
    _, tensors = follower.load()
    for folder in later:
        (tmp_path / folder.name).rename(folder)
    update = follower.update(tensors)
    assert update.from_keyframe == (path.name == "shards")  # which is smaller there
    assert describe(tensors) == expected(path)


@pytest.mark.parametrize("version", ["1", "2", "3"])
def test_golden_checkpoints_verify(tmp_path, version):
    run = shutil.copytree(SLIM / version / "checkpoints", tmp_path / "run")
    assert verify_run(run)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@find_golden("distributed")
def test_a_golden_distributed_checkpoint_loads_to_the_bits_that_went_in(path):
    want = expected(path)
    state = make_blank(want)
    reader = StorageReader(path)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert describe(state) == want


def make_blank(value):
    """Return a state of zeros with the structure that `expected` describes."""
    match value:
        case {"type": "tensor", "dtype": dtype, "shape": shape}:
            return torch.zeros(shape, dtype=getattr(torch, dtype))
        case {"type": "dict", "items": pairs}:
            return {key: make_blank(part) for key, part in pairs}
        case {"type": "list", "items": parts}:
            return [make_blank(part) for part in parts]
    return None


@pytest.mark.parametrize("cpu", ["plain", "avx2"])
def test_all_kernels_read_and_write_the_same_bytes(cpu):
    levels = ["plain", "avx2", "avx512"]
    if levels.index(cpu) > levels.index(_core.cpu()):
        pytest.skip(f"this processor lacks {cpu}")
    environment = {**os.environ, "SLIMTENSORS_CPU": cpu, "PYTHONPATH": str(GOLDEN.parent)}
    command = [sys.executable, GOLDEN / "programs" / "check_bytes.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, cpu), done.stderr


def list_codecs(node):
    yield node["codec"]["name"]
    for part in node["parts"].values():
        if "codec" in part:
            yield from list_codecs(part)


def test_golden_files_contain_every_codec_and_every_kind_of_entry():
    codecs, entries, keys, tree_keys, manifest_keys = set(), set(), set(), set(), set()
    for path in SLIM.rglob("*.safetensors"):
        raw = path.read_bytes()
        at = 0
        while (at := raw.find(b"SLIM\x01\0\0\0", at) + 1) > 0:
            size = int.from_bytes(raw[at + 7 : at + 11], "little")
            codecs.update(list_codecs(json.loads(raw[at + 15 : at + 15 + size])))
        if b'"slimtensors"' not in raw[:200]:
            continue
        manifest = read_manifest(path)
        manifest_keys.update(manifest)
        delta = manifest.get("delta", {})
        entries.update(entry[0] for entry in delta.get("tensors", {}).values())
        for entry in delta.get("checkpoint", {}).values():
            keys.update(entry)
            keys.add(f"as {entry['as']}")
        tree_keys.update(list_tree_keys(manifest.get("tree")))
    assert codecs == {name for name in names() if "." not in name}  # others are not ours
    changes = {"sparse-change", "expected-change"}
    assert entries == {"whole", "same", "difference", "by-exponent"} | changes
    kinds = ("whole", "same", "difference", "by-exponent", "grouped", "steps", "roots")
    fields = ("as", "dtype", "shape", "bits", "seed", "base", "times", "by", "step", "from")
    assert keys == {*fields, *(f"as {kind}" for kind in kinds)}
    assert tree_keys == {
        *("tensor", "array", "scalar", "dict", "ordered", "metadata", "counter", "list", "tuple"),
        *("dtype", "device", "size", "float", "complex", "bytes"),
        *("order", "requires_grad", "parameter", "numpy_str", "numpy_bytes", "defaultdict"),
        *("deque", "maxlen", "set", "frozenset", "int"),
        *values.TAGS,
        *("position", "fold", "zone", "readonly", "struct"),
    }
    assert manifest_keys == {
        *("version", "dialect", "plans", "tied", "copies", "tree", "delta", "generation"),
        *("source", "checksums", "table", "crc32c"),
    }


def list_tree_keys(node):
    if isinstance(node, list):
        for part in node:
            yield from list_tree_keys(part)
    elif isinstance(node, dict):
        yield from node
        for part in node.values():
            yield from list_tree_keys(part)


@find_golden("pools")
def test_pools_give_back_the_files_of_their_members(path, tmp_path):
    pool = Pool(path)
    for name, sums in expected(path).items():
        pool.get(name, tmp_path / name)
        files = sorted((tmp_path / name).iterdir())
        assert {file.name: sha256(file.read_bytes()) for file in files} == sums
    assert pool.member("tuned").bases, "a tensor is stored as a difference"
