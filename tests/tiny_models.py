"""Tiny models of each kind that transformers loads differently."""

import torch
from strategies import same_bits, same_results
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOKENS = torch.arange(12)[None]
PIXELS = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)


def llama(*, tied=False, dtype=torch.float32, layers=2, **options):
    torch.manual_seed(0)
    sizes = SMALL | {"num_hidden_layers": layers} | options
    config = LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=tied)
    return pruned(AutoModelForCausalLM.from_config(config, dtype=dtype))


def mixtral():
    torch.manual_seed(0)
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    return pruned(AutoModelForCausalLM.from_config(config))


def bert():
    torch.manual_seed(0)
    return pruned(BertForSequenceClassification(BertConfig(**SMALL, num_labels=3)))


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=96,
        d_model=64,
        d_ff=128,
        d_kv=16,
        num_heads=4,
        num_layers=2,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return pruned(T5ForConditionalGeneration(config))


def vit():
    torch.manual_seed(0)
    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    config = ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5)
    return pruned(ViTForImageClassification(config))


MODELS = {
    "llama": (llama, {"input_ids": TOKENS}),
    "llama-tied": (lambda: llama(tied=True), {"input_ids": TOKENS}),
    "mixtral": (mixtral, {"input_ids": TOKENS}),
    "bert": (bert, {"input_ids": TOKENS}),
    "t5": (t5, {"input_ids": TOKENS, "decoder_input_ids": TOKENS}),
    "vit": (vit, {"pixel_values": PIXELS}),
}


@torch.no_grad()
def pruned(model, fraction=0.5):
    """Zero the smallest weights of every matrix, and make no two parameters alike."""
    for i, weight in enumerate(model.parameters()):
        if weight.dim() >= 2:
            limit = weight.abs().float().flatten().kthvalue(int(fraction * weight.numel())).values
            weight[weight.abs() <= limit] = 0
        else:
            weight += torch.linspace(0, 0.1, weight.numel()) * (i % 7)
    return model.eval()


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(same_bits(x, b[name]) for name, x in a.items())


def same_answers(a, b, inputs):
    with torch.no_grad():
        return same_results(a(**inputs).logits, b(**inputs).logits)


def sizes(folder):
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
