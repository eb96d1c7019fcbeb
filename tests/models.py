"""Small models on disk, as transformers writes them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}


def pruned(*shape, keep=0.2, seed=0, dtype=torch.bfloat16):
    """Return a tensor of which most items are zero."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    return torch.where(torch.rand(shape, generator=g) < keep, x, 0.0).to(dtype)


def weights(layers=3):
    """Return the weights of a pruned model, and a few that are not."""
    table = {"model.embed_tokens.weight": pruned(60, 64, seed=99)}
    for i in range(layers):
        table[f"model.layers.{i}.mlp.weight"] = pruned(64, 64, seed=i)
        table[f"model.layers.{i}.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    return table


def write_folder(folder: Path, *, shards=1, config=CONFIG, table=None) -> Path:
    """Write a model folder: weights, config, tokenizer, a subfolder."""
    table = weights() if table is None else table
    folder.mkdir(parents=True)
    if shards == 1:
        save_file(table, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        write_shards(folder, table, shards)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": "ü"}')
    (folder / "merges.bin").write_bytes(bytes(range(256)))
    (folder / "onnx" / "deep").mkdir(parents=True)
    (folder / "onnx" / "deep" / "readme.txt").write_text("here too")
    return folder


def write_shards(folder: Path, table, count, *, stem="model"):
    """Write shards and their index."""
    names = list(table)
    size = -(-len(names) // count)
    weight_map = {}
    for i in range(count):
        part = names[i * size : (i + 1) * size]
        file = f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors"
        save_file({name: table[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(x.nbytes for x in table.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def write_llama(folder: Path, *, tied=False, shard=None) -> Path:
    """Write a pruned Llama with transformers itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight[weight.abs() < weight.abs().median()] = 0
    model.save_pretrained(folder, max_shard_size=shard or "1GB")
    return folder
