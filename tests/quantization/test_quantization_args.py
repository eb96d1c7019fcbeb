"""Quantization arguments: validation and the JSON form."""

import pytest
import torch

from slimtensors.errors import ConfigError
from slimtensors.quantization import ActivationOrdering, QuantizationArgs, QuantizationStrategy

MX = QuantizationArgs(
    num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
)


@pytest.mark.parametrize(
    "args",
    [
        QuantizationArgs(),
        QuantizationArgs(num_bits=4, group_size=128, symmetric=False, actorder="static"),
        QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        QuantizationArgs(strategy="token", dynamic=True, observer="minmax"),
        MX,
    ],
)
def test_json_form_round_trips(args):
    assert QuantizationArgs.from_dict(args.to_dict()) == args


def test_group_size_implies_the_strategy():
    assert QuantizationArgs().strategy is QuantizationStrategy.TENSOR
    assert QuantizationArgs(group_size=-1).strategy is QuantizationStrategy.CHANNEL
    assert QuantizationArgs(group_size=64).strategy is QuantizationStrategy.GROUP


def test_older_spellings_are_accepted():
    assert QuantizationArgs(actorder=True, group_size=8).actorder is ActivationOrdering.GROUP
    assert QuantizationArgs(actorder=False).actorder is None
    block = QuantizationArgs(strategy="block", block_structure="128x64").block_structure
    assert block == [128, 64]
    assert QuantizationArgs.from_dict({"scale_dtype": "torch.uint8"}).scale_dtype is torch.uint8


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_bits": 9},
        {"num_bits": 0},
        {"num_bits": 3, "type": "float"},
        {"type": "complex"},
        {"type": "float", "num_bits": 4, "group_size": 16, "symmetric": False},
        {"type": "float", "group_size": 32, "symmetric": False, "scale_dtype": "uint8"},
        {"strategy": "group"},
        {"strategy": "block", "block_structure": [1, 2], "group_size": 16},
        {"group_size": 0},
        {"group_size": -2},
        {"strategy": "block"},
        {"block_structure": [1, 2]},
        {"strategy": "block", "block_structure": [0, 2]},
        {"strategy": "block", "block_structure": "axb"},
        {"strategy": "attn_head", "dynamic": True},
        {"group_size": 2.5},
        {"dynamic": "yes"},
        {"dynamic": "local"},
        {"actorder": "sideways"},
        {"scale_dtype": "float13"},
    ],
)
def test_invalid_arguments_raise(wrong):
    with pytest.raises(ConfigError):
        QuantizationArgs.from_dict(wrong)


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match="'num_bits'"):
        QuantizationArgs.from_dict({"num_bit": 4})
