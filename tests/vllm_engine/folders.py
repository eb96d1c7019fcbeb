"""Model folders for the tests with vLLM."""

import json
import shutil

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from slimtensors.codecs import Trellis
from slimtensors.codecs.plan import Plan
from slimtensors.folder import compress_folder, decompress_folder, diff_folder, quantize_folder
from slimtensors.quantization import QuantizationConfig

SIZES = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=1),
}
SCHEMES = ("W4A16", "W8A8", "FP8_DYNAMIC")
SECTIONS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
"""Sections of other quantizers, for which vLLM chooses a method of another name."""


def make_folders(log, root):
    """Write all folders; return their names."""
    for name, config in CONFIGS.items():
        make_model(config).save_pretrained(root / name)
        make_tokenizer().save_pretrained(root / name)
        compress_folder(root / name, root / f"{name}-lossless")
    prune(make_model(CONFIGS["llama"]), 4, 2).save_pretrained(root / "pruned24")
    prune(make_model(CONFIGS["llama"]), 10, 7).save_pretrained(root / "pruned")
    for name in ("pruned", "pruned24"):
        for dialect in ("slim", "compressed-tensors"):
            for size in (None, "300kB"):
                target = root / f"{name}-{dialect}{'-shards' if size else ''}"
                compress_folder(
                    root / name, target, preset="sparse", dialect=dialect, max_shard_size=size
                )
    compress_folder(root / "llama", root / "llama-lossless-max", preset="lossless-max")
    compress_folder(root / "llama", root / "llama-shards", max_shard_size="300kB")
    for name, preset in (("extreme", "extreme"), ("trellis", choose_trellis)):
        compress_folder(root / "llama", root / f"llama-{name}", preset=preset)
        decompress_folder(root / f"llama-{name}", root / f"llama-{name}-dense")
    for scheme in SCHEMES:
        quantized = root / f"llama-{scheme}"
        config = QuantizationConfig.preset(scheme, ignore=["lm_head"])
        quantize_folder(root / "llama", quantized, config)
        compress_folder(quantized, root / f"llama-{scheme}-lossless")
        quantize_folder(root / "llama", root / f"llama-{scheme}-for-vllm", config, coded=True)
    for name, section in SECTIONS.items():
        add_section(root / "llama", root / f"llama-{name}", section)
        compress_folder(root / f"llama-{name}", root / f"llama-{name}-lossless")
    (root / "moved").mkdir()
    moved = make_model(CONFIGS["llama"])
    with torch.no_grad():
        moved.model.norm.weight += 0.5
    moved.save_pretrained(root / "moved")
    diff_folder(root / "moved", root / "llama", root / "delta")
    (root / "alone").mkdir()  # where it has no base beside it
    diff_folder(root / "moved", root / "llama", root / "alone" / "delta")
    names = [path.name for path in root.iterdir() if (path / "config.json").exists()]
    return sorted([*names, "alone/delta"])


def add_section(source, target, section):
    """Copy a folder, with a section about weights that its weights do not match."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": section}))


def make_tokenizer():
    words = {f"w{i}": i for i in range(SIZES["vocab_size"] - 1)}
    model = Tokenizer(WordLevel(words | {"?": len(words)}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?", eos_token="w2")


def choose_trellis(name, x):
    return Plan(Trellis()) if x.dim() == 2 else None


@torch.no_grad()
def make_model(config):
    """Return a model whose parameters all differ, with the tail of trained weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for weight in model.parameters():
        if weight.dim() == 1:
            weight += 0.1 * torch.randn_like(weight)
        else:
            weight *= 1 + torch.rand_like(weight[..., :1])
    return model


@torch.no_grad()
def prune(model, size, zeros):
    """Zero the smallest weights in every group of `size` along the rows."""
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            columns = layer.weight.shape[1] // size * size
            groups = layer.weight[:, :columns].reshape(-1, size)
            groups[torch.arange(len(groups))[:, None], groups.abs().argsort(1)[:, :zeros]] = 0
            layer.weight[:, :columns] = groups.view(layer.weight.shape[0], columns)
    return model
