"""`compress --quantize` and `convert` on tiny model folders of several families."""

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
import torch
from quantized_models import IDS, auto, config_of, loaded_by_them, logits, make
from safetensors.torch import load_file, save_file
from strategies import aligned, same_bits

import slimtensors
from slimtensors import ModelCompressor
from slimtensors.cli import main
from slimtensors.errors import ConfigError
from slimtensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    freeze_module_quantization,
)
from slimtensors.quantization.fused import group_fused
from slimtensors.recipe.calibration import Calibration
from slimtensors.transformers.calibrate import calibrate_folder

CASES = [
    ("llama", "W4A16"),
    ("llama", "W3A16"),
    ("llama", "NVFP4A16"),
    ("llama", "MXFP4A16"),
    ("llama", "FP8_DYNAMIC"),
    ("mixtral", "W4A16"),
    ("bert", "W8A8"),
    ("opt", "W4A16_ASYM"),
]


def run(*arguments):
    return main([str(argument) for argument in arguments])


def section(folder):
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


def ignore_options(family):
    layers = ["cls.predictions.decoder"] if family == "bert" else ["lm_head"]
    return [word for layer in layers for word in ("--ignore", layer)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    written = {}

    def folder(family, **options):
        if family not in written:
            written[family] = root / family
            make(family).save_pretrained(written[family], max_shard_size="150kB")
        return written[family]

    return folder


@pytest.fixture
def quantized(folders, tmp_path):
    def quantize(family, scheme, *options):
        out = tmp_path / f"{family}-{scheme}"
        words = ["--quantize", scheme, *ignore_options(family), *options]
        assert run("compress", folders(family), *words, "-o", out, "-q") == 0
        return out

    return quantize


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_a_folder_equals_the_compressed_quantized_model(quantized, family, scheme):
    folder = quantized(family, scheme)
    model, config = make(family), config_of(scheme, family)
    apply_quantization_config(model, config)
    model.apply(freeze_module_quantization)
    expected = ModelCompressor(quantization_config=config).compress(model)
    stored = slimtensors.load(folder)
    names = {name for name in expected if is_part(name, expected)}
    assert names == {name for name in stored if is_part(name, stored)}
    # Folders share the global scales of fused layers; modules are frozen one by one.
    layers = {name.rpartition(".")[0] for name in names}
    fused = {layer for group in group_fused(layers) for layer in group}
    for name in names:
        if scheme == "NVFP4A16" and name.rpartition(".")[0] in fused:
            continue
        assert same_bits(stored[name], expected[name]), name


def is_part(name, state):
    """Return True if a tensor belongs to a quantized weight."""
    return "weight_" in name or name.removesuffix("weight") + "weight_scale" in state


@pytest.mark.slow
@pytest.mark.parametrize(("family", "scheme"), [("llama", "W4A16"), ("mixtral", "W4A16")])
def test_transformers_computes_the_same_from_codes_and_dense_weights(
    quantized, tmp_path, family, scheme
):
    folder, dense = quantized(family, scheme), tmp_path / "dense"
    assert run("convert", folder, "--to", "dense", "-o", dense, "-q") == 0
    assert section(dense) is None
    models = [aligned(auto(family).from_pretrained(path).eval()) for path in (folder, dense)]
    with torch.no_grad():
        theirs, ours = (model(input_ids=IDS).logits for model in models)
    assert same_bits(theirs, ours)


@pytest.mark.parametrize(
    "scheme", ["W4A16", "W4A16_ASYM", "W3A16", "W8A16", "NVFP4A16", "MXFP8A16"]
)
def test_codes_round_trip_through_the_slim_dialect(quantized, tmp_path, scheme):
    folder = quantized("llama", scheme)
    slim, dense, back = (tmp_path / name for name in ("slim", "dense", "back"))
    assert run("convert", folder, "--to", "slim", "-o", slim, "-q") == 0
    assert run("convert", folder, "--to", "dense", "-o", dense, "-q") == 0
    assert run("convert", slim, "--to", "compressed-tensors", "-o", back, "-q") == 0
    assert section(slim)["quant_method"] == "slimtensors"
    assert slimtensors.inspect(slim).stored_bytes < slimtensors.inspect(folder).stored_bytes
    numbers = slimtensors.load(slim)
    assert all(same_bits(x, numbers[name]) for name, x in slimtensors.load(dense).items())
    for name, x in slimtensors.load(folder).items():
        assert same_bits(slimtensors.load(back)[name], x), name
    assert section(back)["format"] == section(folder)["format"]


def test_the_slim_dialect_compresses_codes_and_sparse_codes_by_mask(folders, tmp_path):
    source, small, dense = folders("llama"), tmp_path / "small", tmp_path / "dense"
    words = ["--quantize", "W4A16", "--dialect", "slim", "-q"]
    assert run("compress", source, *words, "-o", small) == 0
    assert run("decompress", small, "-o", dense, "-q") == 0
    plans = {name: str(slimtensors.open(small).plan(name)) for name in slimtensors.open(small)}
    assert plans["model.layers.0.mlp.up_proj.weight"] == "quantized(q=huffman)"
    assert plans["lm_head.weight"] == "huffman"
    model = make("llama")
    with torch.no_grad():
        for x in model.parameters():
            x[torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.8] = 0
    model.save_pretrained(tmp_path / "pruned")
    assert run("compress", tmp_path / "pruned", *words, "-o", tmp_path / "both") == 0
    plan = slimtensors.open(tmp_path / "both").plan("model.layers.0.mlp.up_proj.weight")
    assert str(plan).startswith("quantized(q=bitmask(")
    zeros = slimtensors.load(tmp_path / "both")["model.layers.0.mlp.up_proj.weight"] == 0
    pruned = load_file(tmp_path / "pruned" / "model.safetensors")
    assert (zeros >= (pruned["model.layers.0.mlp.up_proj.weight"] == 0)).all()


def test_lossless_coding_of_a_quantized_folder_round_trips(quantized, tmp_path):
    folder = quantized("llama", "W4A16")
    assert run("compress", folder, "-o", tmp_path / "slim", "--preset", "lossless", "-q") == 0
    assert run("convert", tmp_path / "slim", "--to", "dense", "-o", tmp_path / "dense", "-q") == 0
    assert run("convert", folder, "--to", "dense", "-o", tmp_path / "wanted", "-q") == 0
    dense, wanted = (slimtensors.load(tmp_path / name) for name in ("dense", "wanted"))
    assert dense.keys() == wanted.keys()
    assert all(same_bits(dense[name], x) for name, x in wanted.items())


@pytest.mark.parametrize("to", ["dense", "slim"])
@pytest.mark.parametrize("part", ["packed", "scale", "shape"])
def test_a_layer_with_a_missing_part_is_refused(quantized, tmp_path, capsys, part, to):
    folder = quantized("llama", "W4A16", "--max-shard-size", "1GB")
    (file,) = folder.glob("*.safetensors")
    layer = "model.layers.0.mlp.up_proj"
    rest = {name: x for name, x in load_file(file).items() if name != f"{layer}.weight_{part}"}
    for path in folder.glob("model*"):
        path.unlink()
    save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
    assert run("convert", folder, "--to", to, "-o", tmp_path / "out") == 3
    message = "no weight or weight_packed" if part == "packed" else f"weight_{part} is missing"
    error = capsys.readouterr().err.replace("/model.safetensors", "")
    assert f"{folder}: {layer}: {message}" in error
    assert not (tmp_path / "out").exists()


def test_the_output_contains_the_error(folders, tmp_path, capsys):
    assert run("compress", folders("llama"), "--quantize", "W4A16", "-o", tmp_path / "out") == 0
    assert "14 rounded, relative error 0.1" in capsys.readouterr().out


def test_gptq_runs_with_a_calibration_text(folders, tmp_path, capsys):
    source = folders("llama")
    _tokenizer().save_pretrained(source)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i * i % 90}" for i in range(2000)))
    words = ["compress", source, "--quantize", "W4A16", "--calibration", text]
    out = tmp_path / "out"
    assert run(*words, "--method", "gptq", "--work", tmp_path / "work", "-o", out) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("dense: 1 of 15 linear layers with 3.8% of the parameters (ignored: 1)")
    (layer,) = json.loads((out / "quantization_report.json").read_text())["dense_layers"]
    assert layer == {"name": "lm_head", "reason": "ignored", "parameters": 96 * 128}
    assert section(out)["format"] == "pack-quantized"
    assert run(*words, "--dialect", "slym", "-o", tmp_path / "none") == 2
    small = tmp_path / "new" / "s"
    assert run(*words, "--method", "gptq", "--dialect", "slim", "-o", small, "-q") == 0
    dense = tmp_path / "dense"
    assert run("convert", out, "--to", "dense", "-o", dense, "-q") == 0
    slim = slimtensors.load(small)
    assert all(same_bits(slim[name], x) for name, x in slimtensors.load(dense).items())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"text.txt", "work", "out", "new", "dense"}
    lines = tmp_path / "text.jsonl"
    lines.write_text(json.dumps({"text": text.read_text()}) + "\n")
    words[-1] = lines
    assert run(*words, "--method", "gptq", "-o", tmp_path / "again", "-q") == 0
    again = slimtensors.load(tmp_path / "again")
    assert all(same_bits(again[name], x) for name, x in slimtensors.load(out).items())
    assert [path.name for path in small.parent.iterdir()] == ["s"]


def test_too_little_data_is_logged_and_empty_data_refused_first(folders, tmp_path, caplog):
    source, out = folders("llama"), tmp_path / "out"
    _tokenizer().save_pretrained(source)
    config = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
    how = Calibration(samples=2, length=8)
    calibrate_folder(source, out, config, ["w1 w2 w3 w4 w5 w6 w7 w8"], calibration=how)
    assert [
        (x.levelname, x.getMessage()) for x in caplog.records if "samples" in x.getMessage()
    ] == [("WARNING", f"{source}: 1 samples of calibration data, not 2")]
    nowhere = tmp_path / "nowhere"
    with pytest.raises(ConfigError, match="data is empty"):
        calibrate_folder(nowhere, out, config, [])
    with pytest.raises(ConfigError, match="evaluate; use oneshot"):
        calibrate_folder(nowhere, out, config, ["w1"], calibration=Calibration(evaluate=["w1"]))


def test_calibration_logs_that_transformers_cannot_load_the_result(folders, tmp_path, caplog):
    source = folders("llama")
    _tokenizer().save_pretrained(source)
    config = QuantizationConfig.preset("W4A16_ASYM", ignore=["lm_head"])
    how = Calibration(samples=1, length=8)
    calibrate_folder(source, tmp_path / "out", config, ["w1 w2 w3 w4 w5 w6 w7 w8"], calibration=how)
    assert "transformers cannot load LlamaForCausalLM" in caplog.text
    assert "zero points of asymmetric weights are packed" in caplog.text


def test_weights_that_are_not_finite_are_refused_before_calibration(folders, tmp_path):
    source = shutil.copytree(folders("llama"), tmp_path / "source")
    _tokenizer().save_pretrained(source)
    names = [f"model.layers.{i}.mlp.up_proj" for i in (0, 1)]
    for file in source.glob("*.safetensors"):
        weights = load_file(file)
        for name in weights.keys() & {f"{name}.weight" for name in names}:
            weights[name][0, 0] = float("inf")
        save_file(weights, file, {"format": "pt"})
    config = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
    with pytest.raises(ConfigError, match=f"{', '.join(names)}: NaN or infinity"):
        calibrate_folder(source, tmp_path / "out", config, ["w1 w2"])
    (source / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"config\.json has no 'architectures'"):
        calibrate_folder(source, tmp_path / "out", config, ["w1 w2"])


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(95)} | {"?": 95}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quantize", "W4A17"], "W4A16"),
        (["--quantize", "W4A16", "--ignore", "re:.*"], "no layer matches Linear"),
        (["--quantize", "FP8"], "need calibration data"),
        (["--quantize", "W4A16", "--method", "gptq"], "--calibration"),
        (["--quantize", "W4A16", "--preset", "sparse"], "cannot be combined with --preset"),
        (["--quantize", "W4A16", "--only", "*"], "--ignore"),
        (["--method", "gptq"], "requires --quantize"),
        (["--group-size", "32"], "--group-size requires --quantize"),
        (["--quantize", "W8A8", "--group-size", "32"], "W8A8: weights have one scale per channel"),
        (["--quantize", "FP8_BLOCK", "--group-size", "32"], "one scale per block, not per group"),
        (["--quantize", "NVFP4A16", "--group-size", "32"], "NVFP4A16: the group size of"),
        (["--quantize", "MXFP4A16", "--group-size", "channel"], "MXFP4A16: the group size of"),
        (["--quantize", "W4A16", "--group-size", "48"], "not divisible by group_size 48"),
    ],
)
def test_invalid_options_are_refused(folders, tmp_path, capsys, words, message):
    out = tmp_path / "out"
    assert run("compress", folders("llama"), *words, "-o", out) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_all_layers_that_cannot_be_quantized_are_named_at_once(folders, tmp_path, capsys):
    words = ["--quantize", "W4A16", "--group-size", "256", "-o", tmp_path / "out"]
    assert run("compress", folders("llama"), *words) == 2
    message = capsys.readouterr().err
    assert "12 layers cannot be quantized; change the scheme or add to ignore:" in message
    assert "128 columns are not divisible by group_size 256" in message
    assert "down_proj" not in message, "it has 256 columns"
    for layer in ("mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj", "self_attn.o_proj"):
        assert f"model.layers.*.{layer} (2)" in message


@pytest.mark.parametrize(
    ("size", "args"),
    [
        ("32", {"strategy": "group", "group_size": 32}),
        ("channel", {"strategy": "channel", "group_size": None}),
        ("-1", {"strategy": "channel", "group_size": None}),
    ],
)
def test_the_group_size_replaces_that_of_the_scheme(quantized, size, args):
    folder = quantized("llama", "W8A16", "--group-size", size)
    (group,) = section(folder)["config_groups"].values()
    assert args.items() <= group["weights"].items()
    scale = slimtensors.load(folder)["model.layers.0.mlp.down_proj.weight_scale"]
    assert scale.shape == (128, 256 // (args["group_size"] or 256))
    theirs = loaded_by_them("llama", folder)
    ours = make("llama")
    config = QuantizationConfig.preset(
        "W8A16", ignore=["lm_head"], group_size=args["group_size"] or -1
    )
    apply_quantization_config(ours, config)
    ours.apply(freeze_module_quantization)
    assert same_bits(logits(theirs), logits(ours))


@pytest.mark.parametrize("size", ["0", "-2", "1.5", "chanel"])
def test_an_invalid_group_size_is_refused(folders, tmp_path, capsys, size):
    words = ["--quantize", "W4A16", "--group-size", size, "-o", tmp_path / "out"]
    assert run("compress", folders("llama"), *words) == 2
    message = f"--group-size must be a positive number or 'channel', got '{size}'"
    assert message in capsys.readouterr().err


def test_the_group_size_of_a_config_file_is_not_replaced(folders, tmp_path, capsys):
    config = write_config(tmp_path / "a.json", {"a": {"targets": ["Linear"], "weights": _W4}})
    words = ["--quantize", config, "--group-size", "64", "-o", tmp_path / "out"]
    assert run("compress", folders("llama"), *words) == 2
    assert f"--group-size applies to presets; set it in {config}" in capsys.readouterr().err


def write_config(path, groups, **more):
    path.write_text(json.dumps({"config_groups": groups, "ignore": ["lm_head"], **more}))
    return path


_W4 = {"num_bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"targets": ["Linear", "Embedding"], "weights": _W4}, "no layer matches Embedding"),
        (
            {"targets": ["Linear", "re:.*dwn_proj"], "weights": _W4},
            "no layer matches re:.*dwn_proj",
        ),
        (
            {"targets": ["Linear"], "weights": _W4, "format": "pack-quantised"},
            "did you mean 'pack-quantized'?",
        ),
        (
            {"targets": ["Linear"], "weights": _W4, "format": "nvfp4-pack-quantized"},
            "does not fit its codes; use int-quantized",
        ),
        ({"targets": ["Linear"], "weights": _W4 | {"actorder": "group"}}, "gptq"),
    ],
)
def test_an_unsupported_config_is_refused(folders, tmp_path, capsys, group, message):
    source, config = folders("llama"), write_config(tmp_path / "scheme.json", {"a": group})
    assert run("compress", source, "--quantize", config, "-o", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"{source}: a: " in error or f"{config}: quantization_config: a: " in error
    assert not (tmp_path / "out").exists()


def test_an_ignored_layer_that_does_not_exist_is_logged(folders, tmp_path, caplog):
    words = ["--quantize", "W4A16", "-q", "-o", tmp_path / "out"]
    assert run("compress", folders("llama"), *words, "--ignore", "lm_haed") == 0
    assert "'lm_haed' in ignore matches no layer" in caplog.text
    caplog.clear()
    assert run("compress", folders("bert"), *words, "--force") == 0
    assert not caplog.text


def test_overlapping_groups_are_written_layer_by_layer(folders, tmp_path):
    groups = {
        "all": {"targets": ["Linear"], "weights": _W4},
        "down": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "strategy": "channel"}},
    }
    config, out = write_config(tmp_path / "scheme.json", groups), tmp_path / "out"
    assert run("compress", folders("llama"), "--quantize", config, "-o", out, "-q") == 0
    targets = {name: group["targets"] for name, group in section(out)["config_groups"].items()}
    assert targets["down"] == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert len(targets["all"]) == 12
    assert not set(targets["all"]) & set(targets["down"])


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("W8A16", None),
        ("FP8_DYNAMIC", None),
        ("MXFP4A16", None),
        ("MXFP6A16", None),
        ("FP8_BLOCK", "transformers cannot load experts in float-quantized"),
        ("MXFP8A16", "transformers cannot load experts in mxfp8-quantized"),
    ],
)
def test_experts_stay_dense_in_formats_that_transformers_cannot_load(
    quantized, tmp_path, scheme, reason
):
    folder, dense = quantized("mixtral", scheme), tmp_path / "dense"
    report = json.loads((folder / "quantization_report.json").read_text())
    reasons = [x["reason"] for x in report["dense_layers"] if ".experts." in x["name"]]
    assert reasons == ([reason] * 24 if reason else [])
    assert run("convert", folder, "--to", "dense", "-o", dense, "-q") == 0
    theirs, ours = (loaded_by_them("mixtral", path).state_dict() for path in (folder, dense))
    experts = [name for name in ours if ".experts." in name]
    assert len(experts) == 4
    assert all(same_bits(theirs[name], ours[name]) for name in experts)


def test_experts_that_transformers_would_load_wrong_stay_dense(quantized, caplog):
    folder = quantized("mixtral", "NVFP4A16")
    report = json.loads((folder / "quantization_report.json").read_text())
    reasons = {x["reason"] for x in report["dense_layers"] if ".experts." in x["name"]}
    assert reasons == {"transformers cannot load experts in nvfp4-pack-quantized"}
    assert "transformers cannot load MixtralForCausalLM" in caplog.text


def write_stack(folder, name):
    """Write a folder with one layer and a stack of experts, of a type that nobody knows."""
    folder.mkdir()
    stack = torch.ones(4, 128, 128)
    tensors = {"layers.0.q_proj.weight": stack[0].clone(), name: stack}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "any"}')
    return folder


def test_stacked_experts_stay_dense_with_a_line(tmp_path, capsys):
    source = write_stack(tmp_path / "stacked", "layers.0.mlp.experts.gate_up_proj")
    out = tmp_path / "out"
    assert run("compress", source, "--quantize", "W4A16", "-o", out) == 0
    line = "dense: 1 of 2 linear layers with 80.0% of the parameters (stacked experts: 1); "
    assert line in capsys.readouterr().out
    assert "layers.0.mlp.experts" in section(out)["ignore"]


def test_a_target_that_names_stacked_experts_is_refused(tmp_path, capsys):
    source = write_stack(tmp_path / "stacked", "layers.0.mlp.experts.gate_up_proj")
    group = {"targets": ["Linear", "re:.*experts"], "weights": _W4}
    config = write_config(tmp_path / "a.json", {"a": group})
    assert run("compress", source, "--quantize", config, "-o", tmp_path / "out") == 2
    message = "layers.0.mlp.experts.gate_up_proj: stacked experts that a target names"
    assert message in capsys.readouterr().err


def test_layers_that_stay_dense_are_listed_in_json_and_in_the_folder(folders, tmp_path, capsys):
    out, small = tmp_path / "out", tmp_path / "small"
    words = ["--quantize", "W4A16", "--ignore", "re:.*v_proj", "--ignore", "lm_head"]
    assert run("compress", folders("mixtral"), *words, "-o", out, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    schema = Path(__file__).parents[2] / "docs" / "schemas" / "summary.json"
    jsonschema.validate(summary, json.loads(schema.read_text()), jsonschema.Draft202012Validator)
    found = summary["quantization"]
    specs = slimtensors.open(folders("mixtral"))
    assert found["parameters"] == sum(specs.spec(name).numel for name in specs)
    quantized = {n.removesuffix("_packed") for n in slimtensors.open(out) if n.endswith("_packed")}
    assert found["quantized_parameters"] == sum(specs.spec(name).numel for name in quantized)
    assert found["linear_layers"] == len(quantized) + len(found["dense_layers"])
    layers = [f"model.layers.{i}" for i in range(2)]
    assert {x["name"]: (x["reason"], x["parameters"]) for x in found["dense_layers"]} == {
        "lm_head": ("ignored", 96 * 128),
        **{f"{layer}.self_attn.v_proj": ("ignored", 64 * 128) for layer in layers},
        **{f"{layer}.mlp.gate": ("router", 4 * 128) for layer in layers},
    }
    assert json.loads((out / "quantization_report.json").read_text()) == found
    assert run("compress", out, "-o", small, "-q") == 0
    assert run("inspect", small, "--html", tmp_path / "page.html") == 0
    assert '"reason":"router"' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_a_dense_copy_does_not_list_dense_layers(folders, tmp_path, dialect):
    words = ["--quantize", "W4A16", "--dialect", dialect, "-q"]
    small, dense = tmp_path / "small", tmp_path / "dense"
    assert run("compress", folders("llama"), *words, "-o", small) == 0
    assert (small / "quantization_report.json").exists()
    assert run("convert", small, "--to", "dense", "-o", dense, "-q") == 0
    assert not (dense / "quantization_report.json").exists()


@pytest.mark.slow
def test_a_tied_output_layer_is_ignored_by_default(folders, tmp_path):
    folder, dense = tmp_path / "bert", tmp_path / "dense"
    assert run("compress", folders("bert"), "--quantize", "W4A16", "-o", folder, "-q") == 0
    assert run("convert", folder, "--to", "dense", "-o", dense, "-q") == 0
    models = [aligned(auto("bert").from_pretrained(path).eval()) for path in (folder, dense)]
    with torch.no_grad():
        theirs, ours = (model(input_ids=IDS).logits for model in models)
    assert same_bits(theirs, ours)


@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4A16", "MXFP4A16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dense_weights_are_rounded_once_to_the_dtype_of_the_model(tmp_path, dtype, scheme):
    make("llama", dtype).save_pretrained(tmp_path / "model")
    words = ["-q", "-o", tmp_path / "codes"]
    assert run("compress", tmp_path / "model", "--quantize", scheme, *words) == 0
    for to in ("dense", "slim"):
        assert run("convert", tmp_path / "codes", "--to", to, "-o", tmp_path / to, "-q") == 0
    slim = slimtensors.load(tmp_path / "slim")
    for name, x in slimtensors.load(tmp_path / "dense").items():
        assert x.dtype is dtype
        assert same_bits(x, slim[name]), name


def test_converting_to_slim_logs_that_activation_schemes_are_dropped(quantized, tmp_path, caplog):
    words = ["--to", "slim", "-q", "-o"]
    assert run("convert", quantized("llama", "W4A16"), *words, tmp_path / "weights") == 0
    assert not caplog.text
    assert run("convert", quantized("llama", "W8A8"), *words, tmp_path / "both") == 0
    assert "quantization of activations and caches is not kept" in caplog.text


def test_codes_require_a_config(folders, tmp_path, capsys):
    source, slim = tmp_path / "bare", tmp_path / "slim"
    shutil.copytree(folders("llama"), source)
    (source / "config.json").unlink()
    words = ["compress", source, "--quantize", "W4A16", "-q"]
    assert run(*words, "-o", tmp_path / "out") == 2
    assert f"{source}: config.json not found" in capsys.readouterr().err
    assert run(*words, "-o", slim, "--dialect", "slim") == 0
    assert run("convert", slim, "--to", "compressed-tensors", "-o", tmp_path / "out") == 2
    assert f"{slim}: config.json not found" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized by gptq"),
        ({"quantization_config": {"config_groups": {}, "formt": "x"}}, "'format'"),
        ({"dtype": "float99"}, "unknown dtype 'float99'"),
    ],
)
def test_errors_about_a_config_name_the_folder(folders, tmp_path, capsys, wrong, message):
    source = tmp_path / "model"
    shutil.copytree(folders("llama"), source)
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | wrong))
    assert run("convert", source, "--to", "dense", "-o", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"{source}: " in error


def test_calibration_without_a_tokenizer_or_a_token_is_refused(tmp_path, capsys):
    source, text = tmp_path / "model", tmp_path / "text.txt"
    make("llama").save_pretrained(source)
    text.write_text("w1 w2")
    words = ["compress", source, "--quantize", "W4A16", "--calibration", text]
    assert run(*words, "-o", tmp_path / "out") == 2
    assert f"{source}: calibration needs a tokenizer" in capsys.readouterr().err
    text.write_text("  \n")
    _tokenizer().save_pretrained(source)
    assert run(*words, "-o", tmp_path / "out") == 2
    assert f"{text}: the file is empty" in capsys.readouterr().err


def test_a_quantized_folder_is_not_quantized_again(quantized, tmp_path, capsys):
    folder = quantized("llama", "W4A16")
    assert run("compress", folder, "--quantize", "W4A16", "-o", tmp_path / "again") == 2
    assert "convert --to dense" in capsys.readouterr().err
    assert run("convert", folder, "--to", "compressed-tensors", "-o", tmp_path / "again") == 2


def test_a_model_with_transposed_weights_is_refused(folders, tmp_path, capsys):
    source = tmp_path / "gpt2"
    make("llama").save_pretrained(source)
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gpt2"}))
    assert run("compress", source, "--quantize", "W4A16", "-o", tmp_path / "out") == 2
    assert "quantize_model" in capsys.readouterr().err


def test_a_config_without_dtype_keeps_the_dtype_of_the_weights(tmp_path):
    source, small, dense = tmp_path / "model", tmp_path / "small", tmp_path / "dense"
    make("llama", torch.float32).save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    assert run("compress", source, "--quantize", "W4A16", "-o", small, "-q") == 0
    assert run("convert", small, "--to", "dense", "-o", dense, "-q") == 0
    assert {x.dtype for x in slimtensors.load(dense).values()} == {torch.float32}
