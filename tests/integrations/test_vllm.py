"""The plug-in for vLLM, against a stand-in of the part of its interface that we use.

vLLM itself is too large for the machines that run these tests.
"""

import sys
from abc import ABC, abstractmethod
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest
import torch
from strategies import same_bits
from tiny_models import llama
from torch import nn

from slimtensors.errors import MismatchError
from slimtensors.folder.compress import compress_folder
from slimtensors.transformers.saving import enable

LOADERS, METHODS = {}, {}


class BaseModelLoader(ABC):
    """As vLLM 0.28 documents it, less devices and logging."""

    def __init__(self, load_config):
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config): ...

    @abstractmethod
    def load_weights(self, model, model_config): ...

    def load_model(self, vllm_config, model_config, prefix=""):
        model = model_config.make()
        self.load_weights(model, model_config)
        return model.eval()


class QuantizationConfig(ABC):
    @abstractmethod
    def get_name(self): ...

    @abstractmethod
    def get_supported_act_dtypes(self): ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls): ...

    @staticmethod
    @abstractmethod
    def get_config_filenames(): ...

    @classmethod
    @abstractmethod
    def from_config(cls, config): ...

    @abstractmethod
    def get_quant_method(self, layer, prefix): ...


class LinearBase(nn.Module):
    pass


class FusedMoE(nn.Module):
    moe_config = "experts"


class UnquantizedLinearMethod:
    pass


class UnquantizedFusedMoEMethod:
    def __init__(self, moe):
        self.moe = moe


def registering(table, base):
    def register(name):
        def add(cls):
            assert issubclass(cls, base)
            table[name] = cls
            return cls

        return add

    return register


root = "vllm.model_executor"


def layout(version="0.28.0"):
    """Return the modules and names of vLLM that we use."""
    LOADERS.clear()
    METHODS.clear()
    return {
        "vllm": {"__version__": version},
        root: {},
        f"{root}.layers": {},
        f"{root}.layers.linear": {
            "LinearBase": LinearBase,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        f"{root}.layers.fused_moe": {"FusedMoE": FusedMoE},
        f"{root}.layers.fused_moe.layer": {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
        f"{root}.layers.quantization": {
            "QUANTIZATION_METHODS": METHODS,
            "register_quantization_config": registering(METHODS, QuantizationConfig),
        },
        f"{root}.layers.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
        f"{root}.model_loader": {
            "BaseModelLoader": BaseModelLoader,
            "register_model_loader": registering(LOADERS, BaseModelLoader),
        },
    }


def install(monkeypatch, contents):
    """Put the stand-in where vLLM's modules would be, and register as vLLM does."""
    for name, names in contents.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    (point,) = entry_points(group="vllm.general_plugins", name="slimtensors")
    point.load()()
    point.load()()  # vLLM may load plug-ins several times


@pytest.fixture
def vllm(monkeypatch):
    install(monkeypatch, layout())


class Fused(nn.Module):
    """Take names of the hub and fuse some weights, as models of vLLM do."""

    def __init__(self, expected):
        super().__init__()
        self.expected = expected
        self.both = nn.Parameter(
            torch.empty(2, *expected["model.layers.0.mlp.up_proj.weight"].shape)
        )
        self.head = nn.Parameter(torch.empty_like(expected["lm_head.weight"]))

    def load_weights(self, weights):
        loaded = set()
        for name, x in weights:
            assert same_bits(x, self.expected.pop(name)), name
            for i, part in enumerate(("gate_proj", "up_proj")):
                if name == f"model.layers.0.mlp.{part}.weight":
                    self.both.data[i] = x
                    loaded.add("both")
            if name == "lm_head.weight":
                self.head.data.copy_(x)
                loaded.add("head")
        return loaded


def load(folder, expected):
    config = SimpleNamespace(model=str(folder), revision=None, make=lambda: Fused(dict(expected)))
    loader = LOADERS["slimtensors"](SimpleNamespace(download_dir=None))
    loader.download_model(config)
    return loader.load_model(SimpleNamespace(), config)


@pytest.mark.parametrize("shards", ["50GB", "60kB"])
@pytest.mark.parametrize("preset", ["sparse", "lossless"])
def test_a_folder_is_streamed_into_the_model(vllm, tmp_path, preset, shards):
    model = enable(llama(), preset=preset)
    model.save_pretrained(tmp_path / "small", max_shard_size=shards)
    expected = model.state_dict()
    loaded = load(tmp_path / "small", expected)
    assert not loaded.expected
    assert same_bits(loaded.both.data[1], expected["model.layers.0.mlp.up_proj.weight"])


def test_a_sparse_folder_of_compressed_tensors_is_streamed_too(vllm, tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "dense")
    compress_folder(tmp_path / "dense", tmp_path / "parts", dialect="compressed-tensors")
    assert not load(tmp_path / "parts", model.state_dict()).expected


def test_a_folder_that_lacks_a_weight_is_refused(vllm, tmp_path):
    model = enable(llama(), preset="lossless")
    state = model.state_dict()
    del state["lm_head.weight"]
    model.save_pretrained(tmp_path / "small", state_dict=state)
    with pytest.raises(MismatchError, match="small: no weights for 1 parameters of Fused: head"):
        load(tmp_path / "small", model.state_dict())


def test_layers_are_ordinary_ones(vllm):
    method = METHODS["slimtensors"].from_config({"quant_method": "slimtensors", "preset": "sparse"})
    assert method.get_name() == "slimtensors"
    assert torch.bfloat16 in method.get_supported_act_dtypes()
    assert method.get_min_capability() < 0
    assert method.get_config_filenames() == []
    assert isinstance(method.get_quant_method(LinearBase(), "x"), UnquantizedLinearMethod)
    assert method.get_quant_method(FusedMoE(), "x").moe == "experts"
    assert method.get_quant_method(nn.LayerNorm(4), "x") is None


NEEDED = [
    (f"{root}.layers.linear", "LinearBase"),
    (f"{root}.layers.linear", "UnquantizedLinearMethod"),
    (f"{root}.layers.quantization", "QUANTIZATION_METHODS"),
    (f"{root}.layers.quantization", "register_quantization_config"),
    (f"{root}.layers.quantization.base_config", "QuantizationConfig"),
    (f"{root}.model_loader", "BaseModelLoader"),
    (f"{root}.model_loader", "register_model_loader"),
]


def only_warning(caplog):
    (record,) = [r for r in caplog.records if r.name.startswith("slimtensors")]
    assert record.levelname == "WARNING"
    assert "\n" not in record.getMessage()
    return record.getMessage()


@pytest.mark.parametrize(("module", "name"), NEEDED)
def test_a_vllm_that_lacks_a_name_is_left_as_it_is(monkeypatch, caplog, module, name):
    contents = layout(version=f"9.0+{name}")
    del contents[module][name]
    install(monkeypatch, contents)
    message = only_warning(caplog)
    assert f"vLLM 9.0+{name}" in message
    assert name in message
    assert not LOADERS
    assert not METHODS


@pytest.mark.parametrize("module", sorted({module for module, _ in NEEDED}))
def test_a_vllm_that_lacks_a_module_is_left_as_it_is(monkeypatch, caplog, module):
    contents = layout(version=f"9.1+{module}")
    del contents[module]
    install(monkeypatch, contents)
    assert module in only_warning(caplog)
    assert not LOADERS
    assert not METHODS


def test_a_vllm_whose_functions_raise_does_not_stop(monkeypatch, caplog):
    def refuse(name):
        raise TypeError("takes 2\narguments")

    contents = layout(version="9.2")
    contents[f"{root}.model_loader"]["register_model_loader"] = refuse
    install(monkeypatch, contents)
    assert "vLLM 9.2 (TypeError: takes 2 arguments)" in only_warning(caplog)
    assert not METHODS


def test_a_vllm_of_other_base_classes_does_not_stop(monkeypatch, caplog):
    contents = layout(version="9.3")
    contents[f"{root}.layers.quantization.base_config"]["QuantizationConfig"] = lambda: None
    install(monkeypatch, contents)
    assert "vLLM 9.3" in only_warning(caplog)
    assert not LOADERS


def test_without_vllm_nothing_is_raised(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    install(monkeypatch, {})
    assert "(unknown version)" in only_warning(caplog)


@pytest.mark.parametrize("kept", ["no module", "no class", "a function"])
def test_a_vllm_without_the_classes_of_experts_is_supported(monkeypatch, caplog, kept):
    contents = layout(version="0.32.0")
    if kept == "no module":
        del contents[f"{root}.layers.fused_moe.layer"], contents[f"{root}.layers.fused_moe"]
    elif kept == "no class":
        contents[f"{root}.layers.fused_moe"].clear()
        contents[f"{root}.layers.fused_moe.layer"].clear()
    else:
        contents[f"{root}.layers.fused_moe"]["FusedMoE"] = lambda: None
    install(monkeypatch, contents)
    assert not caplog.records
    method = METHODS["slimtensors"].from_config({})
    assert isinstance(method.get_quant_method(LinearBase(), "x"), UnquantizedLinearMethod)
    assert method.get_quant_method(FusedMoE(), "x") is None
