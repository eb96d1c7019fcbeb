"""Saving PruneBERT: an extremely sparse, dynamically quantized BERT, without pickle.

The notebook's story with its own sanity checks, on weights of the same shapes and sparsity. What it
does by hand, taking tensors apart and HDF5, is `save` and `load` here.
"""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForQuestionAnswering

import slimtensors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*(quantiz|torch.ao):"),
]


def pruned_model(pattern, seed=0):
    """Return a BERT with 6 % of its encoder's weights left, where they are largest."""
    torch.manual_seed(seed)
    model = BertForQuestionAnswering(BertConfig()).eval()
    for layer in model.bert.encoder.layer:
        for linear in (module for module in layer.modules() if isinstance(module, nn.Linear)):
            weight = linear.weight.data
            if pattern == "clustered":  # some rows and columns matter more than others
                weight *= torch.randn(len(weight), 1).mul(0.4).exp()
                weight *= torch.randn(1, weight.shape[1]).mul(0.4).exp()
            limit = weight.abs().flatten().kthvalue(int(0.94 * weight.numel())).values
            weight[weight.abs() <= limit] = 0
    return model


def quantized(model):
    return torch.ao.quantization.quantize_dynamic(
        model=model,
        qconfig_spec={nn.Linear: torch.ao.quantization.default_dynamic_qconfig},
        dtype=torch.qint8,
    )


def check_same(state, reconstructed):
    """The notebook's sanity checks: the same names, types and values."""
    assert list(reconstructed) == list(state)
    for name, param in reconstructed.items():
        assert type(param) is type(state[name]), name
        if isinstance(param, torch.Tensor):
            assert torch.all(torch.eq(param, state[name])), name
        elif isinstance(param, tuple):
            assert all(torch.all(torch.eq(a, b)) for a, b in zip(param, state[name], strict=True))
        else:
            assert param == state[name], name


@pytest.mark.parametrize(("pattern", "megabytes"), [("magnitude", 7.7), ("clustered", 6.3)])
def test_the_whole_notebook(tmp_path, pattern, megabytes):
    model = pruned_model(pattern)
    quantized_model = quantized(model)
    qtz_st = quantized_model.state_dict()

    # encoder and head only
    encoder_st = OrderedDict(
        (name, param)
        for name, param in qtz_st.items()
        if "embedding" not in name and "pooler" not in name
    )
    slimtensors.save(encoder_st, tmp_path / "squad_sparse.safetensors", preset="extreme")
    size = (tmp_path / "squad_sparse.safetensors").stat().st_size
    assert size < megabytes * 1e6  # the notebook's 340 MB become 11.28 there
    check_same(encoder_st, slimtensors.load(tmp_path / "squad_sparse.safetensors"))

    # everything
    path = tmp_path / "squad_sparse_with_embs.safetensors"
    slimtensors.save(qtz_st, path, preset="lossless")
    reconstructed_qtz_st = slimtensors.load(path)
    check_same(qtz_st, reconstructed_qtz_st)
    assert reconstructed_qtz_st._metadata == qtz_st._metadata

    # load the reconstructed state dict into a model
    reconstructed_qtz_model = quantized(BertForQuestionAnswering(BertConfig()).eval())
    assert not any(reconstructed_qtz_model.load_state_dict(reconstructed_qtz_st))

    for _ in range(2):
        inputs = torch.randint(low=0, high=30000, size=(2, 128))
        mask = torch.ones(size=(2, 128))
        y_reconstructed = reconstructed_qtz_model(input_ids=inputs, attention_mask=mask)[0]
        y = quantized_model(input_ids=inputs, attention_mask=mask)[0]
        assert torch.all(torch.eq(y, y_reconstructed))
