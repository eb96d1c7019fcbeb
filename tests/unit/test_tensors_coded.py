"""Weights that are entropy-coded in memory."""

import copy
import threading

import pytest
import torch
from strategies import same_bits
from torch import nn

import slimtensors
from slimtensors.quantization import (
    coded_weight,
    decode_ahead,
    get_model_size_in_bytes,
    int8_weight_only,
    quantize_,
)
from slimtensors.tensors import CodedTensor

TOKENS = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()


def model(blocks=3):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    return nn.Sequential(*(copy.deepcopy(block) for _ in range(blocks))).bfloat16().eval()


def test_outputs_are_exact_and_memory_is_smaller():
    dense = model()
    coded = copy.deepcopy(dense)
    quantize_(coded, coded_weight())
    decode_ahead(coded)
    assert get_model_size_in_bytes(coded) < 0.8 * get_model_size_in_bytes(dense)
    for _ in range(2):
        assert same_bits(coded(TOKENS), dense(TOKENS))


def test_the_next_block_is_decoded_on_another_thread(monkeypatch):
    coded = model()
    quantize_(coded, coded_weight())
    threads = []
    decoded = CodedTensor._decoded

    def watched(self):
        threads.append(threading.current_thread().name.partition("_")[0])
        return decoded(self)

    monkeypatch.setattr(CodedTensor, "_decoded", watched)
    hooks = decode_ahead(coded)
    coded(TOKENS)
    assert sorted(threads) == ["MainThread"] * 2 + ["slimtensors-ahead"] * 4
    for hook in hooks:
        hook.remove()
    threads.clear()
    coded(TOKENS)
    assert set(threads) == {"MainThread"}


@pytest.mark.parametrize("preset", ["lossless", "extreme", "sparse", "dense"])
def test_whatever_a_preset_makes_is_held(preset, tmp_path):
    weight = torch.randn(64, 128).bfloat16()
    weight[torch.rand(64, 128) < 0.7] = 0
    held = coded_weight(preset)(weight)
    slimtensors.save({"w": weight}, tmp_path / "file", preset=preset)
    assert same_bits(held.dequantize(), slimtensors.load(tmp_path / "file")["w"])
    torch.save({"w": held}, tmp_path / "pickle")
    assert torch.equal(torch.load(tmp_path / "pickle")["w"], held)
    slimtensors.save({"w": held}, tmp_path / "again", preset=preset)
    assert same_bits(slimtensors.load(tmp_path / "again")["w"], held.dequantize())
    assert held.to(torch.float32).dequantize().dtype is torch.float32


def test_codes_and_coded_weights_go_together():
    mixed = model()
    quantize_(mixed, int8_weight_only(), lambda module, name: name.endswith(".0"))
    quantize_(mixed, coded_weight(), lambda module, name: name.endswith(".2"))
    decode_ahead(mixed)
    assert mixed(TOKENS).isfinite().all()
