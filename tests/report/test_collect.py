"""Reports agree with the files they describe."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import jsonschema
import pytest
import torch
from models import CONFIG, pruned, weights, write_folder
from torch import nn

import slimtensors
from slimtensors.checkpoint import checkpointing
from slimtensors.cli import main
from slimtensors.errors import CorruptFileError, MismatchError, UnsupportedVersionError
from slimtensors.folder.quantize import quantize_folder
from slimtensors.layerwise.report import LayerReport
from slimtensors.quantization import QuantizationConfig
from slimtensors.recipe import LayerState
from slimtensors.report import Report, collect, collect_run, is_report, read_report, write_report
from slimtensors.tensor import DTYPES

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/report.json").read_text())


def run(*arguments):
    return main([str(argument) for argument in arguments])


def check_json(report):
    """Return the JSON of a report after checking its schema and round trip."""
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    jsonschema.validate(data, SCHEMA, jsonschema.Draft202012Validator)
    assert Report.from_json(data).to_json() == report.to_json()
    return data


def single_variant(report):
    """Return the only variant of a report, and its tensors by name."""
    (variant,) = report.variants
    return variant, {x.stored.name: x for x in variant.tensors}


def test_a_report_agrees_with_inspect(tmp_path):
    x = weights()
    x["tied"] = x["model.layers.0.mlp.weight"]
    slimtensors.save(x, tmp_path / "x")
    report = collect(tmp_path / "x")
    check_json(report)
    variant, tensors = single_variant(report)
    summary = slimtensors.inspect(tmp_path / "x")
    assert variant.stored_bytes == summary.stored_bytes
    assert variant.dense_bytes == summary.dense_bytes
    assert [t.name for t in summary.tensors] == list(tensors)
    for stored in summary.tensors:
        found = tensors[stored.name].stored
        same = ("codec", "shape", "dtype", "stored_bytes", "parts", "note")
        assert all(getattr(found, key) == getattr(stored, key) for key in same)
    assert variant.is_exact
    assert variant.error == 0


def test_sparsity_and_histograms_describe_the_values(tmp_path):
    x = pruned(300, 400, keep=0.25)
    slimtensors.save({"x": x, "ones": torch.ones(50)}, tmp_path / "x")
    _, tensors = single_variant(collect(tmp_path / "x"))
    assert tensors["x"].sparsity == pytest.approx((x == 0).float().mean().item())
    shown = tensors["x"].weights
    assert sum(shown.counts) > 1000
    assert shown.low < -1 < 1 < shown.high
    middle = shown.counts[len(shown.counts) // 2]
    assert middle > 5 * shown.counts[2], "a normal distribution peaks in the middle"
    assert tensors["ones"].weights is None


def test_errors_are_measured_against_the_original(tmp_path):
    x = {"a.weight": torch.randn(64, 64), "b": torch.ones(7)}
    slimtensors.save(x, tmp_path / "x", preset="dense")
    slimtensors.save(x, tmp_path / "y", preset="extreme")
    variant, tensors = single_variant(collect(tmp_path / "y", against=tmp_path / "x"))
    back = slimtensors.load(tmp_path / "y")
    error = (back["a.weight"] - x["a.weight"]).norm() / x["a.weight"].norm()
    assert tensors["a.weight"].stored.error == pytest.approx(error.item(), rel=1e-4)
    assert tensors["a.weight"].is_exact is False
    assert tensors["a.weight"].errors is not None
    assert tensors["b"].is_exact is True
    assert 0 < variant.error <= error
    recorded, _ = single_variant(collect(tmp_path / "y"))
    assert recorded.error == pytest.approx(variant.error, rel=0.02), "the file records its error"


def test_another_model_is_refused_as_original(tmp_path):
    slimtensors.save({"a": torch.ones(3)}, tmp_path / "x")
    slimtensors.save({"b": torch.ones(3)}, tmp_path / "y")
    slimtensors.save({"a": torch.ones(4)}, tmp_path / "z")
    for other in ("y", "z"):
        with pytest.raises(MismatchError, match=f"{other}: "):
            collect(tmp_path / "x", against=tmp_path / other)
    assert (
        run("inspect", tmp_path / "x", "--html", tmp_path / "p", "--against", tmp_path / "y") == 1
    )
    assert not (tmp_path / "p").exists()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_of_every_dtype_are_collected(tmp_path):
    odd = {str(dtype): torch.zeros(16, dtype=torch.uint8).view(dtype) for dtype in DTYPES.values()}
    odd |= {
        "nan": torch.tensor([math.nan, math.inf, 1.0, 2.0]),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(3.0),
        "whole": torch.arange(9),
        "mask": torch.tensor([True, False]),
        "q": torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8),
    }
    slimtensors.save(odd, tmp_path / "x")
    check_json(collect(tmp_path / "x"))
    check_json(collect(tmp_path / "x", against=tmp_path / "x"))


def test_layers_stored_in_parts_are_shown_as_one_tensor(tmp_path):
    table = {
        "a.weight": torch.randn(64, 128),
        "a.bias": torch.zeros(64),
        "lm_head.weight": torch.randn(8, 128),
    }
    source = write_folder(tmp_path / "m", table=table)
    config = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
    quantize_folder(source, tmp_path / "q", config)
    variant, tensors = single_variant(collect(tmp_path / "q", against=source))
    assert tensors.keys() == table.keys()
    a = tensors["a.weight"]
    assert (a.stored.codec, a.stored.shape) == ("pack-quantized", (64, 128))
    assert a.stored.parts.keys() == {"weight_packed", "weight_scale", "weight_shape"}
    assert a.plan["codec"]["num_bits"] == 4
    assert 0.01 < a.stored.error < 0.2
    assert variant.stored_bytes == slimtensors.inspect(tmp_path / "q").stored_bytes
    alone, _ = single_variant(collect(tmp_path / "q"))
    assert alone.is_exact is None, "unknown without the original"
    assert alone.error is None


def test_formats_of_other_libraries_are_shown_as_stored(tmp_path):
    config = CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    source = write_folder(tmp_path / "m", config=config, table={"a.qweight": torch.ones(8, 8)})
    _, tensors = single_variant(collect(source))
    assert tensors["a.qweight"].stored.codec == "plain"


def write_run(folder, saves=5):
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with checkpointing(folder, model, optimizer, every=1, async_=False) as ckpt:
        for _ in range(saves):
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            ckpt.step(loss=1.5)


def test_a_run_lists_its_steps_and_the_newest_tensors(tmp_path):
    write_run(tmp_path / "run")
    report = collect_run(tmp_path / "run")
    check_json(report)
    assert [point.step for point in report.checkpoints] == [1, 2, 3, 4, 5]
    assert report.checkpoints[0].base is None
    assert any(point.base for point in report.checkpoints)
    assert all(point.metrics == {"loss": 1.5} for point in report.checkpoints)
    variant, tensors = single_variant(report)
    assert tensors["model.weight"].stored.shape == (64, 64)
    assert variant.is_exact
    assert all(point.dense_bytes == variant.dense_bytes for point in report.checkpoints)


def test_reports_are_written_and_read(tmp_path):
    slimtensors.save(weights(), tmp_path / "x")
    report = collect(tmp_path / "x")
    write_report(report, tmp_path / "r.json")
    assert is_report(tmp_path / "r.json")
    assert not is_report(tmp_path / "x")
    assert read_report(tmp_path / "r.json").to_json() == report.to_json()
    assert run("inspect", tmp_path / "r.json", "--html", tmp_path / "p.html") == 0
    assert (tmp_path / "p.html").exists()


def test_malformed_reports_are_refused(tmp_path):
    path = tmp_path / "r.json"
    good = Report("t", "now", "1").to_json()
    path.write_text("{")
    with pytest.raises(CorruptFileError, match=r"r\.json: invalid JSON"):
        read_report(path)
    for bad in (
        [],
        {},
        good | {"variants": [1]},
        good | {"variants": [{}]},
        good | {"checkpoints": [{}]},
    ):
        path.write_text(json.dumps(bad))
        with pytest.raises(
            CorruptFileError, match=r"r\.json: (not a slimtensors|incomplete) report"
        ):
            read_report(path)
    path.write_text(json.dumps(good | {"version": 2}))
    with pytest.raises(UnsupportedVersionError, match="upgrade slimtensors"):
        read_report(path)


RECIPE = {
    "steps": [
        {
            "modifier": "GPTQ",
            "layers": [LayerReport("up", "gptq", 0.01, 0.02, 1e-3, 0.99, 64, 0.5).to_json()],
            "notes": ["few tokens"],
            "structure": None,
            "seconds": 0.5,
        }
    ],
    "layers": [asdict(LayerState("up", 4096, 0.5, "2:4", 4.25, is_stored=True))],
    "notes": [],
    "quality": {"cosine": 0.99, "kl": 0.01, "perplexity": [5.0, 5.5]},
    "format": "pack-quantized",
    "stored_bytes": 2304,
    "sparsity": 0.5,
}


def test_the_recipe_report_of_a_folder_is_included(tmp_path):
    slimtensors.save(weights(), tmp_path / "model.safetensors")
    assert collect(tmp_path).recipe is None
    (tmp_path / "report.json").write_text(json.dumps(RECIPE))
    assert check_json(collect(tmp_path))["recipe"] == RECIPE
    (tmp_path / "report.json").write_text(json.dumps(RECIPE | {"sparsity": math.nan}))
    assert check_json(collect(tmp_path))["recipe"]["sparsity"] is None
    for text in ("{", "[]", '{"steps": 3}'):
        (tmp_path / "report.json").write_text(text)
        assert collect(tmp_path).recipe is None


def test_incomplete_recipe_reports_are_refused(tmp_path, capsys):
    for bad in ({"steps": [{}]}, {"layers": [{}]}, {"layers": 3}):
        (tmp_path / "report.json").write_text(json.dumps(RECIPE | bad))
        assert run("inspect", tmp_path / "report.json", "--html", tmp_path / "p.html") == 3
        assert "incomplete recipe report" in capsys.readouterr().err
    (tmp_path / "report.json").write_text(json.dumps(RECIPE))
    command = ["inspect", tmp_path / "report.json", "--html", tmp_path / "p.html"]
    assert run(*command, "--only", "up") == 2
    assert "apply to models only" in capsys.readouterr().err
    assert run("inspect", tmp_path / "report.json") == 2
    assert "use --html FILE to make a page of it" in capsys.readouterr().err


def test_a_page_is_written_atomically_and_replaces_only_with_force(tmp_path, capsys):
    slimtensors.save(weights(), tmp_path / "x")
    assert run("inspect", tmp_path / "x", "--html", tmp_path / "p.html", "--only", "*mlp*") == 0
    assert "p.html: open it in a browser" in capsys.readouterr().out
    before = (tmp_path / "p.html").read_text()
    assert "norm.weight" not in before
    assert run("inspect", tmp_path / "x", "--html", tmp_path / "p.html") == 2
    assert (tmp_path / "p.html").read_text() == before
    assert run("inspect", tmp_path / "x", "--html", tmp_path / "p.html", "-f") == 0
    assert "norm.weight" in (tmp_path / "p.html").read_text()
    raw = bytearray((tmp_path / "x").read_bytes())
    raw[-1000] ^= 1
    (tmp_path / "x").write_bytes(raw)
    assert run("inspect", tmp_path / "x", "--html", tmp_path / "q.html") == 3
    assert run("inspect", tmp_path / "x", "--html", tmp_path / "no" / "q.html") != 0
    assert run("inspect", tmp_path / "x", "-f") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.html", "x"]
