"""`slimtensors bench`; passes whether or not other compressors are installed."""

import importlib.util
import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from models import pruned
from strategies import bits

import slimtensors
from slimtensors.cli import bench, main
from slimtensors.cli.bench import PEERS, Coder, Peer
from slimtensors.codecs.presets import PRESETS
from slimtensors.tensor import DTYPES, Spec, as_bytes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the peers' imports

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "bench.json"


@pytest.fixture
def source(tmp_path):
    tensors = {
        "sparse": pruned(64, 64),
        "dense": torch.randn(100, 90),
        "integers": torch.randint(0, 9, (3000,), dtype=torch.int64),
        "bool": torch.rand(500) < 0.5,
        "0-d": torch.tensor(2.0),
        "none": torch.empty(0, 3),
    }
    tensors["tied"] = tensors["dense"]
    slimtensors.save(tensors, tmp_path / "x")
    return str(tmp_path / "x")


def bench_json(capsys, *arguments):
    code = main(["bench", *arguments, "--repeats", "1", "--json"])
    data = json.loads(capsys.readouterr().out)
    jsonschema.validate(data, json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)
    return code, data


def test_all_presets_and_installed_peers_return_the_same_bits(source, capsys):
    code, data = bench_json(capsys, source)
    assert code == 0
    found = {coder["name"]: coder for coder in data["coders"]}
    installed = {name for name, peer in PEERS.items() if importlib.util.find_spec(peer.module)}
    ours = {"extreme (lossy)" if name == "extreme" else name for name in PRESETS}
    assert found.keys() == ours | installed
    assert data["missing"].keys() == PEERS.keys() - installed
    assert all(c["back"] == "same bits" for c in found.values() if c["name"] != "extreme (lossy)")
    assert found["extreme (lossy)"]["back"] == "lossy"
    assert found["extreme (lossy)"]["bytes"] < found["lossless"]["bytes"] < data["bytes"]
    assert found["dense"]["bytes"] == data["bytes"] == data["of_bytes"]
    assert data["tensors"] == 5  # tied tensors count once, empty ones are skipped


def test_the_table_shows_the_sample_and_missing_packages(source, capsys, monkeypatch):
    absent = Peer("absent-pip-name", "module_that_is_not_there", lambda threads: None)
    monkeypatch.setattr(bench, "PEERS", {"absent": absent})
    assert main(["bench", source, "--limit", "20kB", "--repeats", "1", "-T", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["coder", "size", "bits/item", "encode", "decode", "back"]
    assert any(line.startswith("lossless") and "GB/s" in line for line in lines)
    assert "of wall time, 2 threads" in lines[-2]
    assert "of 68.7 kB, chosen at random" in lines[-2]
    assert lines[-1] == "absent: not installed: pip install absent-pip-name"


@pytest.mark.parametrize("limit", ["1", "3kB", "40kB", "1GB"])
def test_the_limit_is_respected(source, capsys, monkeypatch, limit):
    monkeypatch.setattr(bench, "PEERS", {})
    _, data = bench_json(capsys, source, "--limit", limit)
    rows = 512  # the widest row: a sample is at least one row
    assert data["bytes"] <= slimtensors.storage.parse_size(limit) + rows


def lossy_coder(threads):
    return Coder(lambda x: b"1", lambda blob, spec: bytes(spec.nbytes + 1))


def failing_coder(threads):
    raise_ = {}.__getitem__
    return Coder(lambda x: raise_("expected failure"), lambda blob, spec: b"")


def test_a_peer_that_loses_bits_or_fails_is_reported(source, capsys, monkeypatch):
    table = {"loses": Peer("a", "json", lossy_coder), "fails": Peer("b", "json", failing_coder)}
    monkeypatch.setattr(bench, "PEERS", table)
    code, data = bench_json(capsys, source)
    assert code == 1
    found = {coder["name"]: coder["back"] for coder in data["coders"]}
    assert found["loses"].startswith("DIFFERENT")
    assert "expected failure" in found["fails"]


def test_zero_threads_are_refused(source, capsys):
    assert main(["bench", source, "--threads", "0"]) == 2
    assert "threads must be at least 1, got 0" in capsys.readouterr().err


def test_an_empty_file_is_refused(source, tmp_path, capsys):
    slimtensors.save({"none": torch.empty(0)}, tmp_path / "empty")
    assert main(["bench", str(tmp_path / "empty")]) == 2
    assert main(["bench", source, "--limit", "0"]) == 2
    assert "no data to compress" in capsys.readouterr().err


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_round_trips_every_dtype_and_keeps_its_input(name):
    pytest.importorskip(PEERS[name].module)
    coder = PEERS[name].coder(1)
    for dtype in DTYPES.values():
        x = bits(1, 4096, dtype, 0.8)
        before = as_bytes(x).clone()
        back = coder.decompress(coder.compress(x), Spec.of(x))
        assert np.array_equal(np.frombuffer(back, np.uint8), before.numpy()), dtype
        assert torch.equal(as_bytes(x), before), dtype
