"""Where checkpoints store quantized weights, and codes in that layout."""

import pytest
import torch
from architectures import catalogue
from strategies import same_bits
from transformers.core_model_loading import revert_weight_conversion

from slimtensors.codecs.plan import Encoded, decode
from slimtensors.parallel import serially
from slimtensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
    compress_quantized_weights,
)
from slimtensors.quantization.checkpoint_layout import find_layout, find_unstorable
from slimtensors.quantization.state import get_quantization
from slimtensors.transformers.weights import collect_dense_weights, encode_quantized

ROWWISE = {
    "tensor": QuantizationArgs(num_bits=8),
    "channel": QuantizationArgs(num_bits=8, strategy="channel"),
    "group": QuantizationArgs(num_bits=4, group_size=16),
    "asymmetric": QuantizationArgs(num_bits=4, group_size=16, symmetric=False),
    "block": QuantizationArgs(strategy="block", block_structure=[32, 16]),
    "fp8": QuantizationArgs(type="float", strategy="channel"),
}
OTHERS = {
    name: QuantizationScheme.preset(name).weights for name in ("NVFP4A16", "MXFP4A16", "MXFP8A16")
}
ARGS = ROWWISE | OTHERS
LAYOUTS = {
    "gpt2": "Conv1D, which compressed-tensors does not support",
    "gpt_oss": "checkpoints store its experts as one tensor",
    "granitemoe": "checkpoints store its experts as one tensor",
    "mixtral": None,
    "nomic_bert": "checkpoints store it split, or merged with others",
}
"""Model types whose checkpoints store weights in different ways, and why some are unstorable."""


def quantized(model_type, args, dtype=torch.float32):
    model = catalogue.find(model_type).build(dtype)
    ignore = ["lm_head", "cls.predictions.decoder"]
    config = QuantizationConfig(
        {"g": QuantizationScheme(["Linear"], weights=args)},
        ignore=ignore,
        quantization_status=QuantizationStatus.FROZEN,
    )
    apply_quantization_config(model, config)
    return model


def plans(model):
    states = [get_quantization(module) for module in model.modules()]
    return [state.plan for state in states if state is not None]


@pytest.mark.parametrize("name", ARGS)
@pytest.mark.parametrize("model_type", LAYOUTS)
def test_codes_in_the_layout_of_checkpoints_decode_to_the_dense_weights(model_type, name):
    model = quantized(model_type, ARGS[name], torch.bfloat16)
    want = revert_weight_conversion(model, dict(model.state_dict()))
    weights = {plan.key(weight.parameter) for plan in plans(model) for weight in plan.weights}
    sources, _ = encode_quantized(model, collect_dense_weights(model))
    codes = 0
    for source in sources:
        x = source.read(serially)
        codes += isinstance(x, Encoded)
        assert same_bits(decode(x) if isinstance(x, Encoded) else x, want[source.name])
    if name in ROWWISE:  # other formats have no transposed form
        layout = find_layout(
            model, {p.key(w.parameter): w for p in plans(model) for w in p.weights}
        )
        assert codes == len(layout.tensors)
        assert {s for tensor in layout.tensors.values() for s in tensor.sources} == weights


def test_compressed_layers_have_the_same_codes():
    model = quantized("gpt_oss", ROWWISE["group"])
    want = {s.name: s.read(serially) for s in collect_dense_weights(model)}
    model.apply(compress_quantized_weights)
    sources, dense = encode_quantized(model, collect_dense_weights(model))
    have = {source.name: source.read(serially) for source in sources}
    decoded = {n: decode(x) if isinstance(x, Encoded) else x for n, x in have.items()}
    assert not dense
    assert decoded.keys() == want.keys()
    assert all(same_bits(decoded[name], want[name]) for name in want)


@pytest.mark.parametrize(("model_type", "reason"), LAYOUTS.items())
def test_weights_that_checkpoints_store_in_another_way_are_unstorable(model_type, reason):
    model = quantized(model_type, ROWWISE["group"])
    assert set(find_unstorable(model, plans(model)).values()) == ({reason} if reason else set())
