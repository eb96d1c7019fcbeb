import json
from pathlib import Path

import jsonschema
import pytest
import torch
from models import CONFIG, pruned, write_folder
from safetensors.torch import save_file

import slimtensors
from slimtensors.cli import main
from slimtensors.cli.console import print_json

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


def run(*arguments):
    return main([str(argument) for argument in arguments])


def schema(name):
    found = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def parse_valid(text, name):
    """Return the JSON of `text` after checking it against a schema."""
    data = json.loads(text)
    jsonschema.validate(data, schema(name), jsonschema.Draft202012Validator)
    return data


@pytest.fixture
def source(tmp_path):
    x = pruned(64, 64)
    tensors = {
        "a.weight": x,
        "b|c": torch.ones(8, 8),
        "none": torch.empty(0, 3),
        "0-d": torch.tensor(1, dtype=torch.int64),
        "odd": torch.eye(40, dtype=torch.complex128),
        "tied": x,
    }
    slimtensors.save(tensors, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def test_every_schema_is_strict():
    for path in SCHEMAS.glob("*.json"):
        pending = [schema(path.stem)]
        while pending:
            at = pending.pop()
            if isinstance(at, dict):
                assert at.get("type") != "object" or "additionalProperties" in at, path
                pending += at.values()
            elif isinstance(at, list):
                pending += at
    known = {"summary", "verify", "codecs", "bench", "run", "verify-run", "repair", "env"}
    known |= {"report", "recipe-report", "fit-report", "pool"}
    known |= {"sync-publish", "sync-follow", "sync-list"}
    assert {path.stem for path in SCHEMAS.glob("*.json")} == known


def test_inspect_json_matches_its_schema(source, capsys):
    assert run("inspect", source, "--json") == 0
    data = parse_valid(capsys.readouterr().out, "summary")
    assert data["files"] == ["x.safetensors"]
    names = [t["name"] for t in data["tensors"]]
    assert names == ["a.weight", "b|c", "none", "0-d", "odd", "tied"]
    assert data["tensors"][0]["codec"] == "bitmask(values=huffman)"
    assert data["tensors"][5]["codec"] == "tied"
    assert data["tensors"][5]["note"] == "tied to a.weight"
    assert sum(t["stored_bytes"] for t in data["tensors"]) == data["stored_bytes"]


@pytest.mark.parametrize("preset", ["sparse", "lossless", "extreme", "dense"])
def test_the_parts_of_a_tensor_add_up_to_its_size(source, tmp_path, capsys, preset):
    assert run("compress", source, "-o", tmp_path / "y", "--preset", preset, "--json") == 0
    written = parse_valid(capsys.readouterr().out, "summary")
    assert run("inspect", tmp_path / "y", "--json", "--bound") == 0
    data = parse_valid(capsys.readouterr().out, "summary")
    for tensor, expected in zip(data["tensors"], written["tensors"], strict=True):
        assert sum(tensor["parts"].values()) == tensor["stored_bytes"]
        assert tensor["parts"] == expected["parts"]
        assert expected["bound"] is None
        assert (tensor["bound"] is None) == (tensor["codec"] == "tied")
    codecs = {"sparse": {"mask", "values", "header"}, "dense": {"data"}}
    assert preset not in codecs or data["tensors"][0]["parts"].keys() == codecs[preset]
    assert ("scale" in data["tensors"][0]["parts"]) == (preset == "extreme")


def test_inspect_shows_parts_and_bounds(source, capsys):
    assert run("inspect", source, "--parts", "--bound", "-T", "1") == 0
    head, first, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["bits/item", "bound"]
    bits, bound = map(float, first.split()[-2:])
    assert 0 < bound < bits
    parts = ["mask", "values.chunks", "values.data", "header"]
    assert [line.split()[0] for line in lines[:4]] == parts
    assert float(lines[-1].split()[-1]) > 0


def test_the_parts_in_compressed_tensors_are_its_tensors(tmp_path, capsys):
    x = {"a.weight": pruned(64, 64), "b": torch.ones(3)}
    slimtensors.save(x, tmp_path / "x", preset="sparse", dialect="compressed-tensors")
    assert run("inspect", tmp_path / "x", "--json", "--bound") == 0
    first, second = parse_valid(capsys.readouterr().out, "summary")["tensors"]
    assert first["parts"].keys() == {"shape", "row_offsets", "compressed", "bitmask"}
    assert sum(first["parts"].values()) == first["stored_bytes"]
    assert second["parts"] == {"data": 12}
    assert second["bound"] == 0


def test_compress_and_decompress_json_matches_its_schema(source, tmp_path, capsys):
    assert run("compress", source, "-o", tmp_path / "y", "--json") == 0
    data = parse_valid(capsys.readouterr().out, "summary")
    assert data["files"] == ["y"]
    assert run("compress", source, "-o", tmp_path / "y", "--dry-run", "--json") == 0
    estimate = parse_valid(capsys.readouterr().out, "summary")
    assert estimate["files"] == []
    assert estimate["stored_bytes"] == data["stored_bytes"]
    assert run("decompress", tmp_path / "y", "-o", tmp_path / "z", "--json") == 0
    back = parse_valid(capsys.readouterr().out, "summary")
    assert {t["codec"] for t in back["tensors"]} == {"plain", "dense", "tied"}


def test_json_is_printed_even_if_quiet(source, tmp_path, capsys):
    assert run("compress", source, "-o", tmp_path / "y", "--json", "-q") == 0
    parse_valid(capsys.readouterr().out, "summary")


def test_verify_json_matches_its_schema(source, tmp_path, capsys):
    assert run("verify", source, "--json") == 0
    data = parse_valid(capsys.readouterr().out, "verify")
    assert data == {"ok": True, "tensors": 6, "damaged": {}, "different": {}}
    save_file({"a.weight": pruned(64, 64) + 1, "new": torch.ones(3)}, tmp_path / "y")
    assert run("verify", source, "--against", tmp_path / "y", "--json") == 1
    data = parse_valid(capsys.readouterr().out, "verify")
    assert data["ok"] is False
    assert data["different"]["a.weight"] == "4096 of 4096 items differ"
    assert data["different"].keys() == {"a.weight", "b|c", "none", "0-d", "odd", "tied", "new"}


@pytest.mark.parametrize("where", ["header", "payload", "plain"])
def test_verify_names_all_damaged_tensors(source, capsys, where):
    raw = bytearray(source.read_bytes())
    at = {
        "header": raw.index(b"SLIM") + 30,
        "payload": raw.index(b"SLIM") + 500,
        "plain": raw.index(torch.ones(8, 8).numpy().tobytes()),
    }[where]
    raw[at] ^= 1
    source.write_bytes(raw)
    assert run("verify", source, "--json") == 3
    captured = capsys.readouterr()
    data = parse_valid(captured.out, "verify")
    assert data["ok"] is False
    assert data["damaged"].keys() in ({"a.weight", "tied"}, {"odd"}, {"b|c"})
    assert len(captured.err.splitlines()) == len(data["damaged"])
    assert run("verify", source) == 3
    captured = capsys.readouterr()
    assert captured.out == f"damaged: {len(data['damaged'])} of 6 tensors\n"
    assert all(line.startswith(f"slimtensors: {source}: ") for line in captured.err.splitlines())


def test_codecs_json_matches_its_schema(capsys):
    assert run("codecs", "--json") == 0
    data = parse_valid(capsys.readouterr().out, "codecs")
    assert {"bitmask", "bitmask24", "dense"} <= {codec["name"] for codec in data["codecs"]}


def test_codecs_prints_one_line_per_codec(capsys):
    assert run("codecs") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["codec", "options", "about"]
    assert [line.split()[0] for line in lines] == sorted(slimtensors.codecs.names())
    assert all(line.endswith(".") for line in lines)


def test_inspect_prints_a_table(source, capsys):
    assert run("inspect", source) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        *["tensor", "dtype", "shape", "codec", "stored", "dense", "bits/item"]
    ]
    assert lines[1].split()[:4] == ["a.weight", "bfloat16", "64x64", "bitmask(values=huffman)"]
    assert "scalar" in next(line for line in lines if line.startswith("0-d"))
    assert "tied to a.weight" in next(line for line in lines if line.startswith("tied"))
    assert lines[-1].startswith("total")
    assert all(line == line.rstrip() for line in lines)


def markdown_tables(text):
    """Return the rows of every table as lists of cells."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    for rows in blocks:
        assert set(rows[1]) <= set("|:- ")
        assert len({row.replace("\\|", "").count("|") for row in rows}) == 1
    return [[row.strip("| ").split(" | ") for row in [rows[0], *rows[2:]]] for rows in blocks]


def test_inspect_prints_a_block_for_a_model_card(source, capsys):
    assert run("inspect", source, "--markdown") == 0
    text = capsys.readouterr().out
    _, front, rest = text.split("---\n", 2)
    assert "# base_model: OWNER/NAME\nbase_model_relation: quantized\n" in front
    sizes, listing = markdown_tables(text)
    assert sizes[0][0] == "stored as"
    assert [row[0] for row in sizes[1:]] == ["bitmask", "plain", "total"]
    assert {row[-1] for row in sizes[1:]} == {"none"}
    assert listing[0][:2] == ["tensor", "dtype"]
    assert len(listing) == 1 + 6 + 1
    assert "<details>" in rest


def test_a_model_card_names_its_base_and_the_largest_error(tmp_path, capsys):
    source = write_folder(tmp_path / "model", config=CONFIG | {"_name_or_path": "some/llama"})
    assert run("compress", source, "-o", tmp_path / "small", "--preset", "extreme", "-q") == 0
    assert run("inspect", tmp_path / "small", "--markdown") == 0
    text = capsys.readouterr().out
    assert "\nbase_model: some/llama\nbase_model_relation: quantized\n" in text
    sizes, _ = markdown_tables(text)
    (lossy,) = (row for row in sizes if row[0] == "int")
    assert 0 < float(lossy[-1].rstrip("%")) < 5
    assert float(sizes[-1][4]) < 16


def test_json_and_markdown_are_mutually_exclusive(source, capsys):
    with pytest.raises(SystemExit) as usage:
        run("inspect", source, "--json", "--markdown")
    assert usage.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb", ["compress", "decompress", "inspect", "verify", "bench", "codecs", "demo", ""]
)
def test_every_verb_has_help(verb, capsys):
    with pytest.raises(SystemExit) as done:
        main([verb, "--help"] if verb else ["--help"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    assert ("examples:" if verb else "Exit codes:") in out


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.strip() == slimtensors.__version__


def test_diff_reports_how_much_the_base_matches(tmp_path, capsys):
    slimtensors.save({"x": torch.ones(64, 64), "y": torch.ones(8)}, tmp_path / "new")
    slimtensors.save({"x": torch.zeros(64, 64)}, tmp_path / "base")
    words = ["diff", tmp_path / "new", "--base", tmp_path / "base"]
    assert run(*words, "-o", tmp_path / "a") == 0
    assert "1 of 2 tensors match the base (100% of bytes)\n" in capsys.readouterr().out
    assert run(*words, "-o", tmp_path / "b", "--json") == 0
    found = parse_valid(capsys.readouterr().out, "summary")["base"]
    assert (found["tensors"], found["matched"]) == (2, 1)
    words = ["diff", tmp_path / "base", "--base", tmp_path / "empty"]
    slimtensors.save({"z": torch.zeros(3)}, tmp_path / "empty")
    assert run(*words, "-o", tmp_path / "c") == 1
    assert "have little in common: 0 of 1 tensors" in capsys.readouterr().err
    assert run(*words, "-o", tmp_path / "c", "--force") == 0


def test_json_has_no_numbers_that_json_lacks(capsys):
    print_json({"a": [float("nan"), {"b": (float("inf"), -float("inf"), 1.5)}], "c": "NaN"})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": [None, {"b": [None, None, 1.5]}], "c": "NaN"}
