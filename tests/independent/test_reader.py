"""An independent reader decodes every golden file bit for bit."""

import argparse
import ast
import datetime
import decimal
import fractions
import hashlib
import io
import json
import pathlib
import types
import uuid
from collections import defaultdict, deque
from pathlib import Path

import pytest
from independent.reader import checkpoints, deltas, distributed, pools, quantized
from independent.reader.container import open_archive, restore_config, restore_originals
from independent.reader.crc32c import crc32c
from independent.reader.states import Ordered, Value
from independent.reader.tensor import DamagedError, Tensor

GOLDEN = Path(__file__).parent.parent / "golden"
SLIM = GOLDEN / "slim"
VERSION_1 = SLIM / "1"


def describe(value):
    """Return the same JSON as `expected.py`, from the values of the reader."""
    kind = type(value).__name__
    match value:
        case Tensor():
            return describe_items("tensor", value)
        case Value(value=Tensor()):
            fields = {"as" if key == "dtype" else key: x for key, x in value.fields.items()}
            return describe_items(value.kind, value.value) | fields
        case Value(kind="size"):
            return {"type": "size", "items": list(value.value)}
        case Value(kind="numpy_str"):
            return {"type": "numpy str_", "value": value.value}
        case Value(kind="numpy_bytes"):
            return {"type": "numpy bytes_", "value": value.value.hex()}
        case Value(kind="DictConfig" | "ListConfig"):
            content = value.value
            if isinstance(content, list):
                items = [[describe(key), describe(part)] for key, part in content]
                return {"type": value.kind, "items": items, "flags": value.fields}
            return {"type": value.kind, "value": content, "flags": value.fields}
        case Value():
            return {"type": value.kind, "value": value.value}
        case {"dtype": str(), "q": Tensor()}:
            return {"type": "quantized", "value": describe_quantized(value)}
        case Ordered():
            metadata = describe(value.metadata)
            return {"type": "OrderedDict", "items": pairs(value), "metadata": metadata}
        case defaultdict():
            factory = value.default_factory and value.default_factory.__name__
            return {"type": kind, "factory": factory, "items": pairs(value)}
        case dict():
            return {"type": kind, "items": pairs(value)}
        case deque():
            return {"type": kind, "maxlen": value.maxlen, "items": [describe(x) for x in value]}
        case set() | frozenset():
            return {"type": kind, "items": sorted((describe(x) for x in value), key=json.dumps)}
        case int() if value.bit_length() > 2000:
            return {"type": kind, "value": hex(value)}
        case list() | tuple():
            return {"type": kind, "items": [describe(part) for part in value]}
        case float():
            return {"type": kind, "value": value.hex()}
        case complex():
            return {"type": kind, "value": [value.real.hex(), value.imag.hex()]}
        case bytes() | bytearray():
            return {"type": kind, **describe_bytes(value)}
        case io.BytesIO():
            content = describe_bytes(value.getvalue())
            return {"type": kind, **content, "position": value.tell()}
        case range() | slice():
            parts = (value.start, value.stop, value.step)
            return {"type": kind, "items": [describe(part) for part in parts]}
        case decimal.Decimal() | fractions.Fraction() | uuid.UUID() | pathlib.PurePath():
            return {"type": kind, "value": str(value)}
        case datetime.date() | datetime.time() | datetime.timedelta() | datetime.tzinfo():
            return {"type": kind, "value": repr(value)}
        case argparse.Namespace() | types.SimpleNamespace():
            return {"type": kind, "items": pairs(vars(value))}
    return value


def describe_bytes(raw):
    if len(raw) <= 128:
        return {"value": raw.hex()}
    return {"sha256": hashlib.sha256(raw).hexdigest()}


def pairs(table):
    return [[describe(key), describe(part)] for key, part in table.items()]


def describe_items(kind, x):
    inline = len(x.data) <= 128
    content = {"hex": x.data.hex()} if inline else {"sha256": hashlib.sha256(x.data).hexdigest()}
    return {"type": kind, "dtype": x.dtype, "shape": list(x.shape), **content}


def describe_quantized(parts):
    found = {"dtype": Value("dtype", parts["dtype"]), "q": parts["q"]}
    if "axis" in parts:
        found |= {"scale": parts["scale"], "zero_point": parts["zero_point"]}
        found["axis"] = int(parts["axis"].numbers()[0])
    else:
        found["scale"] = float(parts["scale"].numbers()[0])
        found["zero_point"] = int(parts["zero_point"].numbers()[0])
    return describe(found)


def find_golden(*folders):
    """Parametrize a test with the golden files of these folders, of all versions."""
    found = sorted(path for folder in folders for path in SLIM.glob(f"*/{folder}/expected-*.json"))
    paths = [path.with_name(path.stem.removeprefix("expected-")) for path in found]
    ids = ["-".join(path.relative_to(SLIM).parts) for path in paths]
    return pytest.mark.parametrize("path", paths, ids=ids)


def expected(path):
    return json.loads(path.with_name(f"expected-{path.name}.json").read_bytes())


@find_golden("codecs", "states", "shards")
def test_archives_and_states(path):
    file = path if path.is_dir() else path.with_name(f"{path.name}.safetensors")
    assert describe(open_archive(file).state()) == expected(path)


FIRST_FILES = sorted(
    path.relative_to(VERSION_1)
    for folder in ("slim", "compressed-tensors")
    for path in (VERSION_1 / folder).glob("*")
    for path in ([path] if path.is_file() else path.iterdir())
)


@pytest.mark.parametrize("path", FIRST_FILES, ids=str)
def test_models(path):
    found = open_archive(VERSION_1 / path).tensors()
    want = open_archive(VERSION_1 / f"expected-{path.stem}.safetensors").stored
    assert {name: x.data for name, x in found.items()} == {name: x.data for name, x in want.items()}


def test_deltas():
    folder = VERSION_1 / "deltas"
    base = open_archive(folder / "base.safetensors")
    for file, name in (("file", "file"), ("folder/delta", "folder")):
        found = deltas.restore(open_archive(folder / f"{file}.safetensors"), base)
        assert sorted(describe(found)["items"]) == sorted(expected(folder / name)["items"])


def test_a_delta_with_other_names():
    folder = SLIM / "4" / "names"
    base, delta = (open_archive(folder / f"{name}.safetensors") for name in ("base", "delta"))
    found = deltas.restore(delta, base)
    assert sorted(describe(found)["items"]) == sorted(expected(folder / "delta")["items"])


def test_deltas_of_few_and_of_many_changes():
    folder = SLIM / "4" / "deltas"
    delta, base = (open_archive(folder / f"{name}.safetensors") for name in ("file", "base"))
    found = describe(deltas.restore(delta, base))
    assert sorted(found["items"]) == sorted(expected(folder / "file")["items"])


def test_original_files():
    folder = SLIM / "2" / "originals"
    want = json.loads((folder / "expected-sums.json").read_bytes())
    file, model = open_archive(folder / "file.safetensors"), open_archive(folder / "folder")
    delta = open_archive(folder / "delta" / "delta.safetensors")
    found = {
        "file": restore_originals(file, file.tensors()),
        "folder": restore_originals(model, model.tensors()),
        "delta": restore_originals(delta, deltas.restore(delta, file)),
    }
    for name in ("folder", "delta"):
        found[name]["config.json"] = restore_config((folder / name / "config.json").read_bytes())
    for name, files in found.items():
        sums = {file: hashlib.sha256(raw).hexdigest() for file, raw in files.items()}
        assert sums == want[name]


@find_golden("pools")
def test_pools(path):
    for name, sums in expected(path).items():
        files = pools.restore(path, name)
        assert {file: hashlib.sha256(raw).hexdigest() for file, raw in files.items()} == sums


@find_golden("checkpoints")
def test_checkpoints(path):
    assert describe(checkpoints.load(path)) == expected(path)


@find_golden("distributed")
def test_distributed_checkpoints(path):
    assert sort_keys(describe(distributed.load(path))) == sort_keys(expected(path))


def sort_keys(value):
    """Return the description with the keys of all dicts in order: the format does not fix it."""
    if not isinstance(value, dict):
        return value
    items = [[k, sort_keys(v)] for k, v in value["items"]] if value["type"] == "dict" else None
    return value | {"items": sorted(items, key=str)} if items else value


@find_golden("sparseml")
def test_model_folders(path):
    assert sort_keys(describe(open_archive(path).state())) == sort_keys(expected(path))


SPARSE_CODES = sorted((GOLDEN / "compressed_tensors").glob("*/sparse-*bitmask.safetensors"))
SPARSE = sorted(
    path
    for path in (GOLDEN / "compressed_tensors").rglob("*.safetensors")
    if not path.stem.endswith("dense")
    and not path.stem.startswith(("quantized", "lifecycle", "sparse-"))
)


@pytest.mark.parametrize("path", SPARSE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_sparse_files_of_compressed_tensors(path):
    found = open_archive(path).tensors()
    want = open_archive(path.with_name(f"{path.stem}-dense.safetensors")).stored
    assert found == want


@pytest.mark.parametrize("path", SPARSE_CODES, ids=lambda path: path.stem)
def test_sparse_codes_of_compressed_tensors(path):
    stored = open_archive(path).tensors()
    config = json.loads(path.with_name(f"{path.stem}-config.json").read_bytes())
    args = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    for name, want in open_archive(path.with_name(f"{path.stem}-dense.safetensors")).stored.items():
        layer = name.removesuffix("weight")
        parts = {k.removeprefix(layer): x for k, x in stored.items() if k.startswith(layer)}
        is_quantized = "weight_scale" in parts
        assert is_quantized == (layer != "lm_head.")
        have = quantized.decode_module(parts, args, want.dtype) if is_quantized else parts["weight"]
        assert have == want


QUANTIZED = [
    (path.parent, case)
    for path in sorted((GOLDEN / "compressed_tensors").glob("*/quantized.json"))
    for case in json.loads(path.read_bytes())
]


@pytest.mark.parametrize(("folder", "case"), QUANTIZED, ids=lambda x: getattr(x, "name", x))
def test_quantized_files_of_compressed_tensors(folder, case):
    stored, prefix = open_archive(folder / "quantized.safetensors").stored, f"{case}."
    parts = {k.removeprefix(prefix): x for k, x in stored.items() if k.startswith(prefix)}
    args = json.loads((folder / "quantized.json").read_bytes())[case]["weights"]
    want = open_archive(folder / "quantized-dense.safetensors").stored[case]
    assert quantized.decode_module(parts, args, want.dtype) == want


def test_crc_of_the_check_value():
    assert crc32c(b"123456789") == 0xE3069283


def test_the_reader_finds_every_flipped_bit(tmp_path):
    raw = bytearray((VERSION_1 / "slim" / "trees.safetensors").read_bytes())
    path = tmp_path / "flipped.safetensors"
    for at in range(0, len(raw), 37):
        raw[at] ^= 4
        path.write_bytes(raw)
        raw[at] ^= 4
        with pytest.raises((DamagedError, ValueError, KeyError, AssertionError)):
            open_archive(path).tensors()


def test_the_reader_imports_nothing_but_numpy():
    allowed = {"numpy", "independent"}
    standard = {"base64", "collections", "dataclasses", "functools", "hashlib", "json", "math"}
    standard |= {"pathlib", "re", "zlib", "argparse", "datetime", "decimal", "fractions", "io"}
    standard |= {"types", "uuid", "zoneinfo"}
    for path in (Path(__file__).parent / "reader").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            assert {name.partition(".")[0] for name in names} <= allowed | standard, path
