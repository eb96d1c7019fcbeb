"""Folders of slimtensors in the real vLLM, compared with the dense folder that it loads alone."""

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm_engine.engine import PROMPTS, EngineError, choose_method, in_fork

import slimtensors

OLDEST = ("llama", "mixtral")
MODELS = [
    *(pytest.param(name, marks=pytest.mark.oldest) for name in OLDEST),
    *("tied", "qwen3", "qwen3-moe"),
]


@pytest.mark.parametrize("name", MODELS)
def test_a_dense_folder_loads_as_without_the_plug_in(loaded, name):
    without = loaded(name, plugins="none")
    assert without["ranks"][0]["loader"] == "DefaultModelLoader"
    with_plugin = loaded(name, answers=False)
    assert with_plugin["ranks"][0]["loader"] == "SlimLoader"
    assert with_plugin["ranks"][0]["hash"] == without["ranks"][0]["hash"]


@pytest.mark.parametrize("name", MODELS)
def test_a_lossless_folder_loads_bit_for_bit_and_answers_the_same(loaded, name):
    dense, small = loaded(name, plugins="none"), loaded(f"{name}-lossless")
    assert small["ranks"][0]["hash"] == dense["ranks"][0]["hash"]
    assert small["ranks"][0]["methods"] == dense["ranks"][0]["methods"]
    assert small["tokens"] == dense["tokens"]
    assert small["logprobs"] == dense["logprobs"]


SAME = {
    "llama": ("llama-lossless-max", "llama-shards"),
    "pruned": (
        "pruned-slim",
        "pruned-slim-shards",
        "pruned-compressed-tensors",
        "pruned-compressed-tensors-shards",
    ),
    "pruned24": (
        "pruned24-slim",
        "pruned24-slim-shards",
        "pruned24-compressed-tensors",
        "pruned24-compressed-tensors-shards",
    ),
    "llama-extreme-dense": ("llama-extreme",),
    "llama-trellis-dense": ("llama-trellis",),
}


@pytest.mark.parametrize(("dense", "small"), [(x, y) for x, names in SAME.items() for y in names])
def test_every_kind_of_folder_loads_like_its_dense_form(loaded, dense, small):
    expected = loaded(dense, plugins="none", answers=dense == "llama")
    assert loaded(small, answers=False)["ranks"][0]["hash"] == expected["ranks"][0]["hash"]


QUANTIZED = {
    "W4A16": "CompressedTensorsWNA16",
    "W8A8": "CompressedTensorsW8A8Int8",
    "FP8_DYNAMIC": "CompressedTensorsW8A8Fp8",
}


@pytest.mark.oldest
@pytest.mark.parametrize("scheme", QUANTIZED)
@pytest.mark.parametrize("form", ["lossless", "for-vllm"])
def test_an_entropy_coded_quantized_folder_runs_on_the_kernels_of_vllm(loaded, scheme, form):
    answers = scheme != "W4A16" or "avx512f" in Path("/proc/cpuinfo").read_text()
    stock = loaded(f"llama-{scheme}", plugins="none", answers=answers)
    small = loaded(f"llama-{scheme}-{form}", answers=answers)
    assert QUANTIZED[scheme] in stock["ranks"][0]["schemes"]
    assert small["ranks"][0] | {"loader": "DefaultModelLoader"} == stock["ranks"][0]
    assert small.get("tokens") == stock.get("tokens")
    assert small.get("logprobs") == stock.get("logprobs")


@pytest.mark.oldest
@pytest.mark.parametrize("name", ["gptq", "modelopt"])
def test_a_folder_of_another_quantizer_gets_the_method_that_vllm_chooses(models, tmp_path, name):
    def choose(folder, **options):
        return in_fork(choose_method, tmp_path, models[folder], **options)

    stock = choose(f"llama-{name}", plugins="none")
    assert stock["method"] != stock["section"]["quant_method"] == name
    assert choose(f"llama-{name}-lossless") == stock


@pytest.mark.oldest
def test_a_dense_folder_can_be_quantized_by_vllm_after_compression(models, tmp_path):
    def choose(folder, **options):
        return in_fork(choose_method, tmp_path, models[folder], quantization="fp8", **options)

    assert choose("llama-lossless") == choose("llama", plugins="none")


def test_another_method_than_that_of_a_quantized_folder_is_refused(models, tmp_path):
    with pytest.raises(EngineError, match="does not match the quantization method"):
        in_fork(choose_method, tmp_path, models["llama-W8A8-lossless"], quantization="fp8")


@pytest.mark.parametrize(
    ("dense", "small"),
    [
        pytest.param("llama", "llama-lossless", marks=pytest.mark.oldest),
        ("llama-W8A8", "llama-W8A8-lossless"),
        ("qwen3-moe", "qwen3-moe-lossless"),
        ("pruned", "pruned-compressed-tensors-shards"),
    ],
)
def test_tensor_parallel_workers_load_their_part(loaded, dense, small):
    stock = loaded(dense, plugins="none", tensor_parallel_size=2)
    ours = loaded(small, tensor_parallel_size=2)
    assert len(ours["ranks"]) == 2
    assert ours["ranks"] == stock["ranks"]
    assert ours["tokens"] == stock["tokens"]
    assert ours["logprobs"] == stock["logprobs"]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_are_started_in_both_ways(loaded, start):
    stock = loaded("llama", plugins="none", tensor_parallel_size=2)
    ours = loaded("llama-lossless", tensor_parallel_size=2, start=start)
    assert [rank["hash"] for rank in ours["ranks"]] == [rank["hash"] for rank in stock["ranks"]]
    assert ours["tokens"] == stock["tokens"]


def test_a_model_in_the_cache_of_the_hub_is_loaded(loaded, models, hub):
    folder = hub / "models--org--small"
    blobs, snapshot = folder / "blobs", folder / "snapshots" / ("ab" * 20)
    for path in (blobs, snapshot, folder / "refs"):
        path.mkdir(parents=True)
    (folder / "refs" / "main").write_text(snapshot.name)
    for i, path in enumerate(models["llama-shards"].iterdir()):
        shutil.copy(path, blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    models["org/small"] = "org/small"
    found = loaded("org/small", answers=False)
    assert found["ranks"][0]["hash"] == loaded("llama", plugins="none")["ranks"][0]["hash"]


def change(models, name, copy, edit):
    """Register a copy of a folder whose last weight file has been edited."""
    target = models[name].parent / copy
    shutil.copytree(models[name], target)
    edit(sorted(target.glob("*.safetensors"))[-1])
    models[copy] = target


def flip_last_byte(path):
    raw = bytearray(path.read_bytes())
    raw[-40] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (flip_last_byte, r"model-0000\d-of-0000\d.safetensors: .*weight: checksum mismatch"),
        (lambda path: path.unlink(), r"missing: .*model-0000\d-of-0000\d.safetensors"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), r"model-0000\d-of-0000\d.safete"),
    ],
    ids=["damaged", "missing", "truncated"],
)
def test_a_bad_shard_is_reported_with_its_name(loaded, models, edit, message):
    copy = f"bad-{len(models)}"
    change(models, "llama-shards", copy, edit)
    with pytest.raises(EngineError, match=message):
        loaded(copy, answers=False)


def test_a_folder_that_lacks_a_weight_is_refused(loaded, models):
    def remove_norm(path):
        tensors = slimtensors.load(path)
        del tensors["model.norm.weight"]
        slimtensors.save(tensors, path)

    change(models, "llama-lossless", "incomplete", remove_norm)
    with pytest.raises(
        EngineError, match=r"not initialized from checkpoint: .*model\.norm\.weight"
    ):
        loaded("incomplete", answers=False)


@pytest.mark.oldest
def test_a_delta_loads_bit_for_bit_and_answers_the_same(loaded):
    dense, delta = loaded("moved", plugins="none"), loaded("delta")
    assert delta["ranks"][0]["hash"] == dense["ranks"][0]["hash"]
    assert delta["ranks"][0]["methods"] == dense["ranks"][0]["methods"]
    assert delta["tokens"] == dense["tokens"]
    assert delta["logprobs"] == dense["logprobs"]


def test_a_delta_without_its_base_is_refused_with_its_name(loaded):
    with pytest.raises(EngineError, match=r"is a delta, and its base 'llama' was not found"):
        loaded("alone/delta", answers=False)


@pytest.mark.parametrize(
    "broken",
    [
        "vllm.model_executor.layers.quantization.register_quantization_config",
        "register_model_loader",
    ],
    ids=["a name is missing", "a function raises"],
)
def test_a_vllm_that_we_cannot_extend_loads_dense_models(loaded, broken):
    found = loaded("llama", answers=False, broken=broken)
    assert found["ranks"][0]["loader"] == "DefaultModelLoader"
    assert found["log"].count("slimtensors is disabled in vLLM 0.") == 1
    assert found["ranks"][0]["hash"] == loaded("llama", plugins="none")["ranks"][0]["hash"]


def test_a_compressed_folder_is_served_over_http(models, tmp_path):
    from openai import OpenAI

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("vllm"), "serve", models["llama-lossless"]]
    words = "--host 127.0.0.1 --enforce-eager --max-model-len 128 --served-model-name small --port"
    with (tmp_path / "log.txt").open("w") as log:
        server = subprocess.Popen([*command, *words.split(), str(port)], stdout=log, stderr=log)
    try:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        for _ in range(300):
            assert server.poll() is None, (tmp_path / "log.txt").read_text()[-2000:]
            try:
                client.models.list()
            except Exception:  # not listening yet
                time.sleep(1)
            else:
                break
        answer = client.completions.create(
            model="small", prompt=PROMPTS[0], max_tokens=8, temperature=0, logprobs=1
        )
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    assert answer.usage.completion_tokens == 8
    assert "SlimLoader" in (tmp_path / "log.txt").read_text()
