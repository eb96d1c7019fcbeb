import json
from pathlib import Path

import pytest
import torch
from models import CONFIG, pruned, weights, write_folder, write_shards
from safetensors.torch import load_file, save_file
from strategies import same_bits

import slimtensors
from slimtensors.cli import main
from slimtensors.folder.config_json import parse_sparsity

DIALECTS = ["slim", "compressed-tensors"]
GOLDEN_CONFIG = {"model_type": "llama"}


def run(*arguments):
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as usage:
        return usage.code


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def other_files(folder):
    """Return all files but weights, index and config.json."""
    return {
        name: data
        for name, data in files(folder).items()
        if not name.endswith((".safetensors", ".index.json")) and name != "config.json"
    }


def config(folder):
    return json.loads((folder / "config.json").read_text())


def round_trip(source, tmp_path, dialect="slim", *options):
    small, back = tmp_path / "small", tmp_path / "back"
    before = files(source)
    assert run("compress", source, "-o", small, "--dialect", dialect, *options, "-q") == 0
    assert run("decompress", small, "-o", back, "-q") == 0
    assert files(source) == before
    assert {path.name for path in tmp_path.iterdir()} == {source.name, "small", "back"}
    return small, back


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_folder_round_trips(tmp_path, dialect, shards):
    source = write_folder(tmp_path / "model", shards=shards)
    small, back = round_trip(source, tmp_path, dialect)
    assert slimtensors.verify(small, against=source)
    assert slimtensors.verify(back, against=source)
    assert config(back) == CONFIG
    assert other_files(small) == other_files(back) == other_files(source)
    assert len(other_files(source)) == 3
    assert files(small).keys() == files(back).keys() == files(source).keys()
    if shards > 1:
        index = "model.safetensors.index.json"
        want = json.loads((source / index).read_text())["weight_map"]
        assert json.loads((back / index).read_text())["weight_map"] == want
        if dialect == "slim":
            assert json.loads((small / index).read_text())["weight_map"] == want
    for name, x in weights().items():
        home = "model.safetensors" if shards == 1 else want[name]
        assert same_bits(load_file(back / home)[name], x)
    before = sum(p.stat().st_size for p in source.glob("*.safetensors"))
    assert sum(p.stat().st_size for p in small.glob("*.safetensors")) < before / 2


def test_a_slim_folder_is_described_in_its_config(tmp_path):
    small, _ = round_trip(write_folder(tmp_path / "model"), tmp_path, "slim")
    found = config(small)
    section = found["quantization_config"]
    assert section["quant_method"] == "slimtensors"
    assert section["preset"] == "lossless"
    assert section["codecs"] == {"bitmask(values=huffman)": 4}
    assert 3 < section["bits_per_weight"] < 8
    assert found["sparsity_config"].keys() == {"format", "sparsity_structure", "global_sparsity"}
    assert found["sparsity_config"]["format"] == "sparse_bitmask"
    assert 0.7 < float(found["sparsity_config"]["global_sparsity"]) < 0.9
    assert {key: found[key] for key in CONFIG} == CONFIG


def test_a_compressed_tensors_config_has_what_its_loaders_expect(tmp_path):
    small, _ = round_trip(write_folder(tmp_path / "model"), tmp_path, "compressed-tensors")
    found = config(small)
    assert found["quantization_config"]["quant_method"] == "compressed-tensors"
    section = found["quantization_config"]["sparsity_config"]
    assert section["format"] == "sparse-bitmask"
    assert parse_sparsity(section) == parse_sparsity(found["sparsity_config"])
    assert "slimtensors" in found["transformers_weights"], "a sentence that stops other loaders"


def test_a_2_of_4_sparse_folder_is_described_in_its_config(tmp_path):
    x = torch.randn(64, 64)
    x.view(-1, 4)[:, :2] = 0
    source = write_folder(tmp_path / "model", table={"a.weight": x, "b.weight": x.clone()})
    small, back = round_trip(source, tmp_path, "slim", "--preset", "sparse")
    assert config(small)["sparsity_config"] == {
        "format": "sparse_24_bitmask",
        "sparsity_structure": "2:4",
        "global_sparsity": "0.5",
    }
    assert config(back) == CONFIG


SECTIONS = [
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"sparsity_config": {"format": "dense_sparsity", "global_sparsity": 0.8}},
    {
        "quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"},
        "sparsity_config": {"format": "dense_sparsity"},
    },
    {"quantization_config": None},
    {"quantization_config": {}},
]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("sections", SECTIONS)
def test_earlier_config_sections_are_restored(tmp_path, dialect, sections):
    source = write_folder(tmp_path / "model", config=CONFIG | sections)
    _, back = round_trip(source, tmp_path, dialect)
    assert config(back) == CONFIG | sections


@pytest.mark.parametrize("sections", SECTIONS)
def test_the_config_is_unchanged_if_nothing_was_compressed(tmp_path, sections):
    source = write_folder(tmp_path / "model", config=CONFIG | sections, table={"x": torch.ones(5)})
    small, back = round_trip(source, tmp_path)
    assert config(small) == config(back) == CONFIG | sections


def test_compressing_twice_and_decompressing_once_restores_the_config(tmp_path):
    source = write_folder(tmp_path / "model")
    run("compress", source, "-o", tmp_path / "once", "-q")
    run("compress", tmp_path / "once", "-o", tmp_path / "twice", "--dialect", DIALECTS[1], "-q")
    run("decompress", tmp_path / "twice", "-o", tmp_path / "back", "-q")
    assert slimtensors.verify(tmp_path / "back", against=source)
    assert config(tmp_path / "back") == CONFIG


@pytest.mark.parametrize(
    "before",
    [
        {"sparsity_config": {"format": "sparse-bitmask", "global_sparsity": 0.5}},  # 0.3
        {"compression_config": {"sparsity_config": {"format": "sparse-bitmask"}}},  # 0.6
        {
            "quantization_config": {  # 0.14
                "quant_method": "compressed-tensors",
                "version": "0.14.0.1",
                "sparsity_config": {"format": "sparse-bitmask"},
                "transform_config": {},
            }
        },
    ],
)
def test_decompressing_a_compressed_tensors_folder_removes_stale_sections(tmp_path, before):
    source = write_folder(tmp_path / "model", config=CONFIG | before)
    slimtensors.save_compressed(weights(), source / "model.safetensors")
    assert run("decompress", source, "-o", tmp_path / "back", "-q") == 0
    assert config(tmp_path / "back") == CONFIG


def test_a_folder_without_config_round_trips(tmp_path):
    source = write_folder(tmp_path / "model", config=None)
    small, back = round_trip(source, tmp_path)
    assert not (small / "config.json").exists()
    assert other_files(back) == other_files(source)


@pytest.mark.parametrize("text", ["{", "[]", "3", "null", '"text"'])
def test_a_config_that_is_not_an_object_is_refused_without_leftovers(tmp_path, capsys, text):
    source = write_folder(tmp_path / "model")
    (source / "config.json").write_text(text)
    assert run("compress", source, "-o", tmp_path / "small", "-q") == 2
    assert "config.json" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("wrong", [3, "text", [1], None, [["a", 1]]])
def test_a_malformed_earlier_section_is_refused(tmp_path, capsys, wrong):
    source = write_folder(tmp_path / "model")
    run("compress", source, "-o", tmp_path / "small", "-q")
    written = config(tmp_path / "small")
    written["quantization_config"]["before"] = wrong
    (tmp_path / "small" / "config.json").write_text(json.dumps(written))
    assert run("decompress", tmp_path / "small", "-o", tmp_path / "back", "-q") in (2, 3)
    assert "config.json" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "small"]


def test_a_model_in_a_subfolder_is_copied_unchanged(tmp_path):
    source = write_folder(tmp_path / "model")
    (source / "unet").mkdir()
    write_shards(source / "unet", weights(), 2, stem="diffusion_pytorch_model")
    small, back = round_trip(source, tmp_path)
    unet = {name: data for name, data in files(source).items() if name.startswith("unet/")}
    assert len(unet) == 3
    for folder in (small, back):
        assert unet.items() <= files(folder).items()


def test_an_index_of_one_file_stays_loadable(tmp_path):
    source = write_folder(tmp_path / "model", shards=1)
    (source / "model.safetensors").unlink()
    write_shards(source, weights(), 1)
    small, back = round_trip(source, tmp_path)
    for folder in (small, back):
        assert slimtensors.verify(folder, against=source)
        names = files(folder).keys()
        assert "model.safetensors" in names or "model.safetensors.index.json" in names


def test_the_source_may_be_an_index(tmp_path):
    source = write_folder(tmp_path / "model", shards=3)
    index = source / "model.safetensors.index.json"
    assert run("compress", index, "-o", tmp_path / "small", "-q") == 0
    assert slimtensors.verify(tmp_path / "small", against=source)
    assert other_files(tmp_path / "small") == other_files(source)
    assert config(tmp_path / "small")["quantization_config"]["codecs"] == {
        "bitmask(values=huffman)": 4
    }


def test_the_index_of_a_variant_selects_the_variant(tmp_path):
    source = write_folder(tmp_path / "model")
    variant = {name: x.half() for name, x in weights().items()}
    write_shards(source, variant, 2, stem="model.fp16")
    index = source / "model.fp16.safetensors.index.json"
    assert run("compress", index, "-o", tmp_path / "small", "-q") == 0
    written = tmp_path / "small" / "model.fp16-00001-of-00002.safetensors"
    assert "bitmask(values=huffman)" in {t.codec for t in slimtensors.inspect(written).tensors}
    assert {t.dtype for t in slimtensors.inspect(written).tensors} == {"float16"}


def test_shards_in_a_subfolder_are_not_copied_as_well(tmp_path):
    source = write_folder(tmp_path / "model", shards=2)
    index = source / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    (source / "parts").mkdir()
    for name in set(table["weight_map"].values()):
        (source / name).rename(source / "parts" / name)
    table["weight_map"] = {key: f"parts/{name}" for key, name in table["weight_map"].items()}
    index.write_text(json.dumps(table))
    small, back = round_trip(source, tmp_path)
    assert slimtensors.verify(back, against=source)
    assert len(list(small.rglob("*.safetensors"))) == 2


def test_tied_tensors_of_a_folder_stay_tied(tmp_path):
    source = write_folder(tmp_path / "model")
    x = pruned(64, 64)
    slimtensors.save({"a": x, "b": x}, source / "model.safetensors", preset="dense")
    small, back = round_trip(source, tmp_path)
    for folder in (small, back):
        loaded = slimtensors.load(folder)
        assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_an_existing_folder_is_refused_without_force_and_replaced_with_it(tmp_path, capsys):
    source = write_folder(tmp_path / "model")
    target = tmp_path / "small"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    for verb in ("compress", "decompress"):
        assert run(verb, source, "-o", target) == 2
        assert (
            capsys.readouterr().err
            == f"slimtensors: {target} already exists; use -f to replace it\n"
        )
        assert [path.name for path in target.iterdir()] == ["mine.txt"]
    assert run("compress", source, "-o", target, "-f", "-q") == 2  # not a model folder
    assert "contains files but no model" in capsys.readouterr().err
    slimtensors.save({"old": torch.ones(3)}, target)
    assert run("compress", source, "-o", target, "-f", "-q") == 0
    assert slimtensors.verify(target, against=source)
    assert not (target / "mine.txt").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "small"}


def test_a_folder_that_contains_the_source_is_not_replaced(tmp_path, capsys):
    source = write_folder(tmp_path / "models" / "one")
    assert run("compress", source, "-o", tmp_path / "models", "-f") == 2
    assert f"contains the source {source}" in capsys.readouterr().err
    assert slimtensors.load(source)


def test_a_symlink_to_a_folder_stays_a_symlink(tmp_path):
    source, real = write_folder(tmp_path / "model"), write_folder(tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    assert run("compress", source, "-o", tmp_path / "link", "-f", "-q") == 0
    assert (tmp_path / "link").is_symlink()
    assert slimtensors.verify(real, against=source)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "real", "link"}


@pytest.mark.parametrize("moment", [1, 2])
def test_the_old_folder_survives_an_interrupt_between_two_renames(tmp_path, monkeypatch, moment):
    source, target = write_folder(tmp_path / "model"), write_folder(tmp_path / "target")
    want = files(target)
    rename, count = Path.rename, 0

    def rename_or_interrupt(self, other):
        nonlocal count
        count += 1
        if count == moment:
            raise KeyboardInterrupt
        return rename(self, other)

    monkeypatch.setattr("slimtensors.storage.atomic._exchange", lambda a, b: False)
    monkeypatch.setattr(Path, "rename", rename_or_interrupt)
    assert run("compress", source, "-o", target, "-f", "-q") == 130
    monkeypatch.undo()
    assert files(target) == want
    assert {path.name for path in tmp_path.iterdir()} == {"model", "target"}


def test_a_glob_that_matches_nothing_is_an_error(tmp_path, capsys):
    source = write_folder(tmp_path / "model")
    for verb in ("compress", "decompress", "inspect"):
        to = [] if verb == "inspect" else ["-o", tmp_path / "x"]
        assert run(verb, source, "--only", "typo*", *to) == 2
        assert "'typo*' matches no tensor" in capsys.readouterr().err


def test_a_folder_does_not_replace_a_file(tmp_path, capsys):
    source = write_folder(tmp_path / "model")
    (tmp_path / "file").write_text("mine")
    assert run("compress", source, "-o", tmp_path / "file", "-f") == 2
    assert "is a file, not a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    source = write_folder(tmp_path / "model", shards=3)
    assert run("compress", source, "-o", tmp_path / "small", "--dry-run", "--json") == 0
    estimate = json.loads(capsys.readouterr().out)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert run("compress", source, "-o", tmp_path / "small", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert estimate["files"] == []
    assert len(result["files"]) == 3
    for key in ("dense_bytes", "stored_bytes"):
        assert estimate[key] == result[key]
    sizes = [{t["name"]: t["stored_bytes"] for t in s["tensors"]} for s in (estimate, result)]
    assert sizes[0] == sizes[1]


def test_shards_can_be_resized(tmp_path):
    source = write_folder(tmp_path / "model", shards=3)
    arguments = ("--max-shard-size", "1GB", "-q")
    assert run("compress", source, "-o", tmp_path / "small", *arguments) == 0
    assert [p.name for p in (tmp_path / "small").glob("*.safetensors*")] == ["model.safetensors"]
    assert slimtensors.verify(tmp_path / "small", against=source)
    assert other_files(tmp_path / "small") == other_files(source)


def test_only_some_tensors_of_a_folder_are_compressed(tmp_path):
    source = write_folder(tmp_path / "model", shards=2)
    assert run("compress", source, "-o", tmp_path / "small", "--only", "*.1.*", "-q") == 0
    codecs = {t.name: t.codec for t in slimtensors.inspect(tmp_path / "small").tensors}
    assert [name for name, codec in codecs.items() if codec != "plain"] == [
        "model.layers.1.mlp.weight"
    ]


def test_an_unusual_file_name_is_kept(tmp_path):
    source = write_folder(tmp_path / "model")
    (source / "model.safetensors").rename(source / "adapter_model.safetensors")
    small, back = round_trip(source, tmp_path)
    assert files(small).keys() == files(back).keys() == files(source).keys()


def test_a_second_weights_file_is_copied_unchanged(tmp_path):
    source = write_folder(tmp_path / "model")
    save_file({"x": torch.zeros(99)}, source / "consolidated.safetensors")
    small, _ = round_trip(source, tmp_path)
    name = "consolidated.safetensors"
    assert (small / name).read_bytes() == (source / name).read_bytes()


def test_an_unwritable_url_is_named(tmp_path, monkeypatch, capsys):
    source = write_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for given in (source, source / "model.safetensors"):
        assert run("compress", given, "-o", "nosuch://bucket/small") == 2
        assert "nosuch://bucket/small" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
