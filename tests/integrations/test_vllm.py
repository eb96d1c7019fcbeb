"""The part of the vLLM plug-in that needs no vLLM; `tests/vllm_engine` runs the real engine."""

import json
import logging
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from strategies import same_bits

import slimtensors
from slimtensors.codecs import Trellis
from slimtensors.codecs.plan import Plan
from slimtensors.errors import CorruptFileError, FormatError, MismatchError
from slimtensors.folder import compress_folder
from slimtensors.integrations import vllm
from slimtensors.integrations.vllm import is_tested, restore_section
from slimtensors.integrations.vllm_stream import (
    BufferPool,
    DeferredTensor,
    Folder,
    decode_weights,
)
from slimtensors.tensor import Spec


@pytest.fixture
def weights():
    torch.manual_seed(0)
    dense = torch.randn(64, 256).bfloat16()
    sparse = torch.randn(64, 256).mul(torch.rand(64, 256) > 0.7)
    halves = torch.randn(64, 256).view(-1, 4).mul(torch.tensor([1.0, 0, 0, 1])).view(64, 256)
    return {
        "model.embed.weight": dense,
        "model.layers.0.mlp.weight": sparse,
        "model.layers.1.mlp.weight": halves,
        "model.norm.weight": torch.ones(16),
        "model.codes": torch.randint(0, 255, (100,), dtype=torch.uint8),
    }


def stream(folder):
    """Yield names and tensors as vLLM reads them: file by file, mapped."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118


def decode(folder, **options):
    return dict(decode_weights(stream(folder), Folder("name", lambda: folder), **options))


def save(weights, folder, **options):
    folder.mkdir()
    slimtensors.save(weights, folder, **{"max_shard_size": "20kB"} | options)
    return folder


@pytest.mark.parametrize("shards", [None, "20kB"])
@pytest.mark.parametrize("preset", ["lossless", "lossless-max", "sparse", "dense"])
def test_a_stream_of_blobs_is_decoded(tmp_path, weights, preset, shards):
    save(weights, tmp_path / "small", preset=preset, max_shard_size=shards)
    loaded = decode(tmp_path / "small")
    assert loaded.keys() == weights.keys()
    assert all(same_bits(loaded[name], x) for name, x in weights.items())


def use_trellis(name, x):
    return Plan(Trellis()) if x.dim() == 2 else None


@pytest.mark.parametrize("preset", ["extreme", use_trellis])
def test_lossy_blobs_decode_to_what_slimtensors_loads(tmp_path, weights, preset):
    del weights["model.codes"]
    save(weights, tmp_path / "small", preset=preset)
    expected = slimtensors.load(tmp_path / "small")
    loaded = decode(tmp_path / "small")
    assert all(same_bits(loaded[name], x) for name, x in expected.items())


def test_a_folder_without_a_local_path_is_decoded_too(tmp_path, weights):
    save(weights, tmp_path / "small")
    loaded = dict(decode_weights(stream(tmp_path / "small"), Folder("org/name", lambda: None)))
    assert all(same_bits(loaded[name], x) for name, x in weights.items())


def test_files_with_unusual_names_are_decoded(tmp_path, weights):
    folder = save(weights, tmp_path / "small", max_shard_size=None)
    next(folder.glob("*.safetensors")).rename(folder / "consolidated.safetensors")
    loaded = decode(folder)
    assert all(same_bits(loaded[name], x) for name, x in weights.items())


def test_plain_tensors_are_passed_on_unchanged(tmp_path, weights):
    save(weights, tmp_path / "dense", preset="dense")
    plain = [x for _, x in stream(tmp_path / "dense")]
    pairs = zip(plain, stream(tmp_path / "dense"), strict=True)
    folder = Folder("name", lambda: tmp_path / "dense")
    for (x, stored), (_, loaded) in zip(
        pairs, decode_weights(stream(tmp_path / "dense"), folder), strict=True
    ):
        assert same_bits(x, loaded)
        assert same_bits(stored[1], loaded)


@pytest.mark.parametrize("shards", [None, "20kB"])
def test_parts_of_sparse_tensors_are_joined(tmp_path, weights, shards):
    save(weights, tmp_path / "parts", dialect="compressed-tensors", max_shard_size=shards)
    assert any(name.endswith(".bitmask") for name, _ in stream(tmp_path / "parts"))
    loaded = decode(tmp_path / "parts", sparse=True)
    assert loaded.keys() == weights.keys()
    assert all(same_bits(loaded[name], x) for name, x in weights.items())


def test_parts_are_joined_in_any_order(tmp_path, weights):
    save(weights, tmp_path / "parts", dialect="compressed-tensors")
    folder = Folder("name", lambda: None)
    for order in (1, -1):
        names = sorted(stream(tmp_path / "parts"), key=lambda x: x[0].rpartition(".")[2])[::order]
        loaded = dict(decode_weights(iter(names), folder, sparse=True))
        assert all(same_bits(loaded[name], x) for name, x in weights.items())


def use_transposed(name, x):
    return Plan(Trellis(transposed=True)) if x.dim() == 2 else None


PRESETS = ["lossless", "lossless-max", "sparse", "extreme", use_trellis, use_transposed]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_rank_gets_the_rows_and_columns_that_it_uses(tmp_path, preset, inference):
    torch.manual_seed(0)
    weights = {"a": torch.randn(512, 768).bfloat16(), "experts": torch.randn(4, 96, 64)}
    weights["a"][weights["a"] < 0] = 0
    save(weights, tmp_path / "small", preset=preset, max_shard_size=None)
    expected = slimtensors.load(tmp_path / "small")
    with torch.inference_mode(inference):
        loaded = decode(tmp_path / "small", partial=True)
        assert any(type(x) is DeferredTensor for x in loaded.values())
        check_rows(loaded, expected)


def check_rows(loaded, expected):
    for name, x in expected.items():
        found = loaded[name]
        assert (found.shape, found.dtype, found.device) == (x.shape, x.dtype, x.device)
        half, columns = len(x) // 2, x.shape[1] // 2
        assert same_bits(found.narrow(0, half, half), x[half:])
        assert same_bits(found[1:2], x[1:2])
        assert same_bits(found[2], x[2])
        assert same_bits(found[half:], x[half:])
        assert same_bits(torch.ops.aten.slice(found, 0, half), x[half:])
        assert same_bits(found[::2], x[::2])
        assert same_bits(found.narrow(1, columns, columns), x[:, columns:])
        assert same_bits(found.t() if x.dim() == 2 else found.mT, x.mT)
        assert same_bits(torch.empty_like(x).copy_(found), x)
        assert same_bits(found.narrow(0, 0, half), x[:half])


def test_rows_that_a_rank_does_not_use_are_not_decoded(tmp_path):
    torch.manual_seed(0)
    weight = torch.randn(2048, 1024).bfloat16()
    save({"a": weight}, tmp_path / "small", max_shard_size=None)
    (file,) = (tmp_path / "small").glob("*.safetensors")
    damage(file, find_entry(file, "a")[1] - 1000)  # in the last rows
    loaded = decode(tmp_path / "small", partial=True)["a"]
    assert same_bits(loaded.narrow(0, 0, 1024), weight[:1024])
    with pytest.raises(CorruptFileError, match=f"{file.name}: a: "):
        loaded.narrow(0, 1024, 1024)


def test_a_missing_part_is_reported(tmp_path, weights):
    save(weights, tmp_path / "parts", dialect="compressed-tensors")
    items = [x for x in stream(tmp_path / "parts") if x[0] != "model.layers.0.mlp.weight.bitmask"]
    with pytest.raises(FormatError, match=r"layers\.0\.mlp\.weight: parts not found: .*bitmask"):
        list(decode_weights(items, Folder("name", lambda: None), sparse=True))


def find_entry(path, name):
    """The range of a tensor in its file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + size])[name]["data_offsets"]
    return 8 + size + begin, 8 + size + end


def damage(path, position):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


@pytest.mark.hostile
@pytest.mark.parametrize("where", ["magic", "header", "data"])
def test_a_damaged_blob_is_reported_with_its_file(tmp_path, weights, where):
    save(weights, tmp_path / "small", max_shard_size=None)
    name = "model.embed.weight"
    (file,) = (tmp_path / "small").glob("*.safetensors")
    begin, end = find_entry(file, name)
    damage(file, {"magic": begin, "header": begin + 20, "data": end - 100}[where])
    with pytest.raises(CorruptFileError, match=f"{file.name}: {name}: .*(damaged|mismatch)"):
        decode(tmp_path / "small")


@pytest.mark.hostile
def test_a_damaged_part_or_plain_tensor_is_reported_with_its_file(tmp_path, weights):
    save(weights, tmp_path / "parts", dialect="compressed-tensors", max_shard_size=None)
    (file,) = (tmp_path / "parts").glob("*.safetensors")
    for part, name in [
        ("model.layers.0.mlp.weight.compressed", "model.layers.0.mlp.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ]:
        raw = file.read_bytes()
        damage(file, find_entry(file, part)[0])
        with pytest.raises(CorruptFileError, match=f"{file.name}: {name}: .*damaged"):
            decode(tmp_path / "parts", sparse=True)
        file.write_bytes(raw)


@pytest.mark.hostile
@pytest.mark.parametrize("partial", [False, True])
def test_a_damaged_plain_tensor_before_all_blobs_is_reported(tmp_path, partial):
    save({"a": torch.ones(16), "b": torch.zeros(64, 64)}, tmp_path / "small", max_shard_size=None)
    (file,) = (tmp_path / "small").glob("*.safetensors")
    assert [name for name, x in stream(tmp_path / "small") if x.dtype is torch.float32] == ["a"]
    damage(file, find_entry(file, "a")[0])
    with pytest.raises(CorruptFileError, match=f"{file.name}: a: .*damaged"):
        decode(tmp_path / "small", partial=partial)


@pytest.mark.hostile
def test_a_truncated_shard_is_reported_with_its_name(tmp_path, weights):
    save(weights, tmp_path / "small")
    file = sorted((tmp_path / "small").glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CorruptFileError, match=file.name):
        decode(tmp_path / "small")


def test_bytes_of_others_are_not_taken_for_damaged_blobs(tmp_path):
    weights = {"absmax": torch.arange(256, dtype=torch.uint8), "weight": torch.randn(8, 8)}
    save(weights, tmp_path / "dense", preset="dense", max_shard_size=None)
    loaded = dict(
        decode_weights(stream(tmp_path / "dense"), Folder("name", lambda: tmp_path / "nowhere"))
    )
    assert all(same_bits(loaded[name], x) for name, x in weights.items())


def resident_bytes(path):
    """Bytes of a mapped file that count as memory of this process."""
    total, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            is_file = line.endswith(str(path))
        elif is_file and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_pages_of_decoded_tensors_are_released(tmp_path):
    torch.manual_seed(0)
    weights = {f"weight{i}": torch.randn(1024, 1024).bfloat16() for i in range(4)}
    save(weights, tmp_path / "small", max_shard_size=None)
    (path,) = (tmp_path / "small").glob("*.safetensors")
    decoded = decode_weights(stream(tmp_path / "small"), Folder("name", lambda: None))
    for name, x in decoded:
        assert same_bits(x, weights[name])
        if name == "weight3":
            assert resident_bytes(path) < path.stat().st_size / 8


def test_memory_is_used_again_only_after_its_last_view():
    pool, spec = BufferPool(), Spec(torch.bfloat16, (1024, 1024))
    first = pool.take(spec)
    address, view = first.data_ptr(), first[5:]
    del first
    second = pool.take(spec)
    assert second.data_ptr() != address
    del view
    assert pool.take(spec).data_ptr() == address
    assert pool.take(Spec(torch.float32, (3,))).shape == (3,)


@pytest.fixture
def config(tmp_path):
    def read(folder):
        return json.loads((folder / "config.json").read_text())["quantization_config"]

    return read


def test_a_section_from_before_compression_is_restored(tmp_path, config):
    source = tmp_path / "quantized"
    save({"a.weight": torch.randn(64, 64).bfloat16()}, source, preset="dense", max_shard_size=None)
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense"}
    for before in ({}, {"quantization_config": section}):
        (source / "config.json").write_text(json.dumps({"model_type": "llama", **before}))
        compress_folder(source, tmp_path / "small", replace=True)
        compressed = config(tmp_path / "small")
        assert compressed["quant_method"] == "slimtensors"
        assert restore_section(compressed) == before.get("quantization_config", {})


def test_sections_of_others_are_left_alone():
    assert restore_section({"quant_method": "gptq", "bits": 4}) is None
    assert restore_section({"quant_method": "compressed-tensors", "config_groups": {}}) is None


def test_a_section_of_sparse_parts_is_recognized(tmp_path, config, weights):
    source = save(weights, tmp_path / "dense", preset="dense", max_shard_size=None)
    (source / "config.json").write_text('{"model_type": "llama"}')
    compress_folder(source, tmp_path / "parts", dialect="compressed-tensors")
    section = config(tmp_path / "parts")
    assert section["quant_method"] == "compressed-tensors"
    assert restore_section(section) == {}
    assert vllm.has_sparse_parts(SimpleNamespace(quantization_config=section))
    assert not vllm.has_sparse_parts(SimpleNamespace(quantization_config={"quant_method": "gptq"}))
    assert not vllm.has_sparse_parts(SimpleNamespace(quantization_config=None))


@pytest.fixture
def delta(tmp_path, weights):
    """A folder with a delta, and the weights of its model: changed, equal, and new ones."""
    moved = {name: x * 1.01 if "mlp" in name else x for name, x in weights.items()}
    del moved["model.codes"]
    moved["model.added"] = torch.ones(7)
    for name, table in (("base", weights), ("new", moved)):
        folder = save(table, tmp_path / name, preset="dense", max_shard_size=None)
        (folder / "config.json").write_text('{"model_type": "llama"}')
    slimtensors.folder.diff_folder(tmp_path / "new", tmp_path / "base", tmp_path / "delta")
    return tmp_path / "delta", moved


@pytest.mark.parametrize("partial", [False, True])
def test_the_stream_of_a_delta_is_that_of_its_model(delta, config, partial):
    folder, expected = delta
    assert restore_section(config(folder)) == {}
    assert len(list(stream(folder))) < len(expected)
    loaded = decode(folder, partial=partial)
    assert loaded.keys() == expected.keys()
    assert all(same_bits(loaded[name].clone(), x) for name, x in expected.items())


def test_a_delta_without_changes_is_the_base(delta, tmp_path, weights):
    slimtensors.folder.diff_folder(tmp_path / "base", tmp_path / "base", tmp_path / "equal")
    assert not list(stream(tmp_path / "equal"))
    loaded = decode(tmp_path / "equal")
    assert all(same_bits(loaded[name], x) for name, x in weights.items())


def test_other_sources_of_weights_follow_those_of_a_delta(delta):
    folder, expected = delta
    names = [*stream(folder), ("encoder.weight", torch.ones(3))]
    loaded = dict(decode_weights(names, Folder("name", lambda: folder)))
    assert list(loaded) == [*expected, "encoder.weight"]


def test_the_base_of_a_delta_may_be_named(delta, tmp_path):
    folder, expected = delta
    (tmp_path / "base").rename(tmp_path / ".elsewhere")
    with pytest.raises(MismatchError, match="its base 'base' was not found"):
        decode(folder)
    named = Folder("name", lambda: folder, tmp_path / ".elsewhere")
    loaded = dict(decode_weights(stream(folder), named))
    assert all(same_bits(loaded[name], x) for name, x in expected.items())


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.28.0", True), ("0.32.1+cpu", True), ("0.27.3", False), ("0.33.0", False), ("1.0", False)],
)
def test_the_tested_range_is_known(version, tested):
    assert is_tested(version) is tested


def test_without_vllm_the_plug_in_logs_one_line_and_raises_nothing(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    (point,) = entry_points(group="vllm.general_plugins", name="slimtensors")
    point.load()()
    point.load()()  # vLLM may load plug-ins several times
    (record,) = [r for r in caplog.records if r.name.startswith("slimtensors")]
    assert record.levelno == logging.WARNING
    assert "slimtensors is disabled in vLLM (unknown version)" in record.getMessage()
    assert "\n" not in record.getMessage()
