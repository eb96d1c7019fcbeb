"""The manifest of a checkpoint: its checksum, its values, and its bases."""

import itertools
import json
import math
import os
import shutil

import jsonschema
import pytest
import torch
from checkpoint.manifests import edit_manifest, seal_manifest, unseal_manifest
from reliability_tools import TESTS

from slimtensors.checkpoint import (
    find_unreadable,
    list_checkpoints,
    load_checkpoint,
    repair_run,
    save_checkpoint,
    verify_run,
)
from slimtensors.checkpoint.manifest import read_manifest
from slimtensors.cli import main
from slimtensors.errors import (
    ConfigError,
    CorruptFileError,
    FormatError,
    MismatchError,
    UnsupportedVersionError,
)

METRICS = {"loss": 0.5, "nan": math.nan, "high": math.inf, "low": -math.inf}


def save_pair(folder, **options):
    """Save a checkpoint and a delta of it."""
    x = torch.arange(12.0)
    save_checkpoint({"x": x, "step": 1, "metrics": METRICS}, folder / "first", **options)
    save_checkpoint({"x": x, "step": 2}, folder / "second", base=folder / "first")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    save_pair(folder)
    return folder


@pytest.fixture
def run(runs, tmp_path):
    return shutil.copytree(runs, tmp_path / "run")


def strict_json(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_manifest_is_strict_json_that_ends_with_its_checksum(run):
    text = (run / "first" / "checkpoint.json").read_text()
    data = strict_json(text)
    assert list(data)[-1] == "crc32c"
    assert data["version"] == 2
    assert data["metrics"] == {"loss": 0.5, "nan": "NaN", "high": "Infinity", "low": "-Infinity"}
    assert repr(read_manifest(run / "first").metrics) == repr(METRICS)
    assert text == seal_manifest({k: v for k, v in data.items() if k != "crc32c"})


def find_problem(folder):
    try:
        read_manifest(folder)
    except FormatError as error:
        return str(error)
    return ""


def test_every_flipped_bit_of_the_manifest_is_detected_and_removes_nothing(run):
    path = run / "second" / "checkpoint.json"
    raw = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for at, bit in itertools.product(range(len(raw)), range(8)):
            os.pwrite(file.fileno(), bytes([raw[at] ^ 1 << bit]), at)
            assert "second/checkpoint.json: " in find_problem(run / "second")
            if at % 97 == bit:
                assert list(verify_run(run).damaged) == ["second"]
                assert repair_run(run) == []
            os.pwrite(file.fileno(), raw[at : at + 1], at)
    for end in range(0, len(raw), 11):
        path.write_bytes(raw[:end])
        assert "second/checkpoint.json: " in find_problem(run / "second")
    assert sorted(p.name for p in run.iterdir() if not p.name.startswith(".")) == [
        "first",
        "second",
    ]
    path.write_bytes(raw)
    assert verify_run(run)


def test_version_1_loads_and_is_reported_as_unsealed(run, capsys):
    unseal_manifest(run / "first", metrics=METRICS)
    assert "NaN" in (run / "first" / "checkpoint.json").read_text()
    assert load_checkpoint(run / "second")["step"] == 2
    assert repr(read_manifest(run / "first").metrics) == repr(METRICS)
    assert verify_run(run).unsealed == ["first"]
    assert main(["verify", str(run)]) == 0
    assert "first: format version 1 has no checksum" in capsys.readouterr().err
    assert main(["verify", str(run / "first")]) == 0
    assert "first: format version 1 has no checksum" in capsys.readouterr().err
    assert main(["inspect", str(run)]) == 0
    assert "first: format version 1 has no checksum" in capsys.readouterr().err
    for verb, schema in (("inspect", "run"), ("verify", "verify-run")):
        assert main([verb, str(run), "--json"]) == 0
        printed = strict_json(capsys.readouterr().out)
        path = TESTS.parent / "docs" / "schemas" / f"{schema}.json"
        jsonschema.validate(printed, json.loads(path.read_text()))
    data = json.loads((run / "first" / "checkpoint.json").read_text())
    del data["metrics"], data["errors"]
    (run / "first" / "checkpoint.json").write_text(json.dumps(data))
    assert read_manifest(run / "first").metrics == {}


def test_version_2_refuses_bare_nan(run):
    edit_manifest(run / "first", lambda data: data["metrics"].update(nan=math.nan))
    with pytest.raises(CorruptFileError, match="NaN is not valid JSON"):
        load_checkpoint(run / "first")


def nest(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


WRONG = [None, True, -1, 10**30, 10**400, 1.5, "", "x", [], {}, [1], {"a": 1}, nest(50), "\ud800"]
ALLOWED = {
    "step": [None, -1],
    "epoch": [None, -1],
    "profile": ["", "x"],
    "metrics": [{}, {"a": 1}],
    "errors": [{}, {"a": 1}],
    "base": [None],
}


def test_every_malformed_value_is_a_format_error_with_file_and_key(run):
    path = run / "second" / "checkpoint.json"
    raw = path.read_text()
    for key in json.loads(raw).keys() - {"crc32c"}:
        for value in WRONG:
            if any(type(value) is type(v) and value == v for v in ALLOWED.get(key, ())):
                continue
            path.write_text(raw)
            edit_manifest(run / "second", lambda data, k=key, v=value: {**data, k: v})
            with pytest.raises(
                FormatError, match=rf"second/checkpoint\.json: .*({key}|manifest|ver)"
            ):
                read_manifest(run / "second")
            assert [point.name for point in list_checkpoints(run)] == ["first"]
    path.write_text(raw)
    for key in json.loads(raw).keys() - {"crc32c", "format"}:
        edit_manifest(run / "second", lambda data, k=key: {n: v for n, v in data.items() if n != k})
        with pytest.raises(CorruptFileError, match=rf"checkpoint\.json: {key}: missing"):
            read_manifest(run / "second")
        path.write_text(raw)
    for value in ("x", True, None, 10**400, [], {}):
        edit_manifest(run / "second", lambda data, v=value: data["metrics"].update(loss=v))
        with pytest.raises(
            CorruptFileError, match=r"checkpoint\.json: metrics: loss: expected a num"
        ):
            read_manifest(run / "second")
        path.write_text(raw)


def test_a_malformed_step_never_ends_inspect_verify_or_resume(run, capsys):
    edit_manifest(run / "second", lambda data: data.update(step="x"))
    with pytest.raises(
        CorruptFileError, match=r"checkpoint\.json: step: expected an integer, got x"
    ):
        load_checkpoint(run / "second")
    for verb, code in (("inspect", 0), ("verify", 3)):
        assert main([verb, str(run)]) == code
        assert "second: " in capsys.readouterr().err
    assert main(["verify", str(run / "second"), "--json"]) == 3
    assert "step: expected" in strict_json(capsys.readouterr().out)["damaged"]["checkpoint.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "[" * 100_000, '{"a":' * 100_000, "1" * 5000, b"\xff\xfe{"],
)
def test_other_content_is_a_format_error(run, text):
    path = run / "second" / "checkpoint.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CorruptFileError, match=r"second/checkpoint\.json: "):
        read_manifest(run / "second")
    assert list(find_unreadable(run)) == ["second"]


def test_a_newer_version_is_reported_as_such(run):
    edit_manifest(run / "first", lambda data: data.update(version=4))
    with pytest.raises(
        UnsupportedVersionError, match="version 4 is newer than the supported version 3; upgrade"
    ):
        load_checkpoint(run / "first")


def test_a_fifo_as_manifest_is_refused_at_once(run):
    path = run / "second" / "checkpoint.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FormatError, match="not a regular file"):
        load_checkpoint(run / "second")
    assert list(find_unreadable(run)) == ["second"]


@pytest.mark.parametrize(
    "name", ["../first", "/tmp/first", "a/b", "..", ".", ".hidden", "a\\b", ""]
)
def test_a_base_is_the_plain_name_of_a_sibling(run, name):
    edit_manifest(run / "second", lambda data: data["base"].update(name=name))
    with pytest.raises(CorruptFileError, match="base: name: expected the name of a folder"):
        load_checkpoint(run / "second")


def test_a_cycle_of_bases_is_reported_as_a_cycle(run, capsys):
    ids = {name: read_manifest(run / name).id for name in ("first", "second")}
    edit_manifest(
        run / "first", lambda data: data.update(base={"name": "second", "id": ids["second"]})
    )
    with pytest.raises(CorruptFileError, match="cycle: second -> first -> second"):
        load_checkpoint(run / "second")
    assert set(verify_run(run).damaged) == {"first", "second"}
    edit_manifest(
        run / "first", lambda data: data.update(base={"name": "first", "id": ids["first"]})
    )
    with pytest.raises(CorruptFileError, match="cycle: first -> first"):
        load_checkpoint(run / "first")


def test_a_state_of_another_checkpoint_is_refused(run):
    shutil.copy(run / "first" / "state.safetensors", run / "second" / "state.safetensors")
    with pytest.raises(CorruptFileError, match="content differs from the id"):
        load_checkpoint(run / "second")
    (run / "first" / "state.safetensors").unlink()
    with pytest.raises(CorruptFileError, match=r"state\.safetensors not found"):
        load_checkpoint(run / "first")


def test_verify_reports_deltas_of_a_damaged_base(run, capsys):
    state = run / "first" / "state.safetensors"
    raw = bytearray(state.read_bytes())
    raw[-1] ^= 1
    state.write_bytes(raw)
    found = verify_run(run).damaged
    assert "checksum mismatch" in found["first"]
    assert "second cannot be restored: damaged base first" in found["second"]
    assert main(["verify", str(run / "second"), "--json"]) == 3
    assert list(strict_json(capsys.readouterr().out)["damaged"]) == ["first: x"]


def test_a_base_for_a_full_checkpoint_is_refused(run):
    with pytest.raises(ConfigError, match="needs no base"):
        load_checkpoint(run / "first", base=run / "second")
    with pytest.raises(MismatchError, match="has id"):
        load_checkpoint(run / "second", base=run / "second")


def test_a_step_beyond_64_bits_is_refused_at_save(tmp_path):
    with pytest.raises(ConfigError, match="step"):
        save_checkpoint({"step": 1 << 63}, tmp_path / "x")
    save_checkpoint({"step": (1 << 63) - 1}, tmp_path / "y")
    assert read_manifest(tmp_path / "y").step == (1 << 63) - 1
