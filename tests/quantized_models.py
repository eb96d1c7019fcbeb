"""Small models of several families, quantized and saved."""

import pytest
import torch
from strategies import aligned
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
)

from slimtensors import ModelCompressor
from slimtensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    freeze_module_quantization,
)

IDS = torch.arange(48).view(2, 24) * 7 % 96
_DECODER = {
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = _DECODER | {"num_key_value_heads": 2, "tie_word_embeddings": False}
CONFIGS = {
    "llama": LlamaConfig(intermediate_size=256, **_GROUPED),
    "mixtral": MixtralConfig(intermediate_size=128, num_local_experts=4, **_GROUPED),
    "bert": BertConfig(intermediate_size=256, **_DECODER),
    "opt": OPTConfig(ffn_dim=256, word_embed_proj_dim=128, **_DECODER),
}
IGNORED = {"bert": ["cls.predictions.decoder"]}


def auto(family):
    return AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM


def make(family, dtype=torch.bfloat16):
    """Build a model whose biases, if any, are not zero."""
    torch.manual_seed(0)
    config = CONFIGS[family].from_dict(CONFIGS[family].to_dict())
    model = auto(family).from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("bias"):
                x.normal_(std=0.1)
    return model


def config_of(preset, family="llama", **more):
    config = QuantizationConfig.preset(preset, ignore=IGNORED.get(family, ["lm_head"]))
    for key, value in more.items():
        setattr(config, key, value)
    return config


@torch.no_grad()
def frozen(family, config):
    """Quantize a model, calibrated on the ids that all tests use."""
    model = make(family)
    config.quantization_status = QuantizationStatus.CALIBRATION
    apply_quantization_config(model, config)
    model(IDS)
    model.apply(freeze_module_quantization)
    return model


@torch.no_grad()
def logits(model):
    return aligned(model)(IDS).logits


def loaded_by_them(family, folder):
    """Load a folder by transformers with compressed-tensors."""
    try:
        return auto(family).from_pretrained(folder, dtype="auto").eval()
    except RuntimeError as error:
        is_asymmetric = '"symmetric": false' in (folder / "config.json").read_text()
        if is_asymmetric and "ignore_mismatched_sizes" in str(error):
            pytest.skip("transformers 5.23 refuses packed zero points, compressed-tensors' own too")
        raise


def save(model, config, folder):
    state = ModelCompressor(quantization_config=config).compress(model)
    model.save_pretrained(folder, state_dict=state)
