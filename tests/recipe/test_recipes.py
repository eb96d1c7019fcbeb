"""Recipes as objects and as YAML, with our names and those of other libraries."""

import sys

import pytest

from slimtensors.errors import ConfigError, MissingDependencyError
from slimtensors.recipe import (
    AWQ,
    GPTQ,
    ConstantPruning,
    Distillation,
    GradualMagnitudePruning,
    MagnitudePruning,
    MovementPruning,
    Quantize,
    Recipe,
    SmoothQuant,
    SparseGPT,
    Stage,
    Wanda,
)
from slimtensors.recipe.recipe import MODIFIERS

LLM_COMPRESSOR = """
sparsity_stage:
  run_type: oneshot
  sparsity_modifiers:
    SparseGPTModifier:
      sparsity: 0.5
      mask_structure: 2:4
      sequential_update: true
      block_size: 64
      dampening_frac: 1e-3
      targets: ["re:model.layers.\\\\d*$"]
quantization_stage:
  run_type: oneshot
  quantization_modifiers:
    SmoothQuantModifier:
      smoothing_strength: 0.8
      mappings:
        - [["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"]
    GPTQModifier:
      ignore: ["lm_head"]
      config_groups:
        group_0:
          weights: {num_bits: 4, type: int, symmetric: true, strategy: channel, dynamic: false}
          targets: ["Linear"]
"""

ALL_MODIFIERS = [
    MagnitudePruning((0.1, 0.2)),
    Wanda({"re:.*mlp.*": 0.6, "re:.*attn.*": 0.4}),
    SparseGPT(0.7, sparsity_profile="owl", owl_m=3, block_size=32, ignore=()),
    SparseGPT(mask_structure="2:4"),
    ConstantPruning("re:.*weight"),
    Quantize("W4A16", targets=["re:.*mlp.*"]),
    GPTQ("W3A16", actorder="group", dampening_frac=0.1),
    GPTQ(config_groups={"W8A8": ["Linear"]}, kv_cache_scheme={"num_bits": 8, "group_size": -1}),
    AWQ("W4A16_ASYM", mappings=[{"smooth_layer": "re:.*norm", "balance_layers": ["re:.*q_proj"]}]),
    SmoothQuant(0.8, mappings=[[["re:.*q_proj"], "re:.*input_layernorm"]]),
    GradualMagnitudePruning(0.9, start=1, end=3, schedule="linear"),
    MovementPruning(0.94, apply_globally=True),
    Distillation(hardness=1.0),
]


@pytest.mark.parametrize("modifier", ALL_MODIFIERS, ids=lambda x: type(x).__name__)
def test_yaml_round_trip(modifier):
    recipe = Recipe.of(modifier)
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe


def test_a_recipe_of_all_modifiers_is_saved_to_a_folder(tmp_path):
    assert {type(each).__name__ for each in ALL_MODIFIERS} == set(MODIFIERS)
    recipe = Recipe(
        [Stage(ALL_MODIFIERS[:7], "first", "oneshot"), Stage(ALL_MODIFIERS[7:], "second")]
    )
    recipe.save(tmp_path)
    assert Recipe.load(tmp_path / "recipe.yaml") == recipe
    assert Recipe.of(str(tmp_path / "recipe.yaml")) == recipe


def test_recipes_of_llm_compressor_are_read():
    first, second = Recipe.from_yaml(LLM_COMPRESSOR).stages
    assert first.run_type == "oneshot"
    (sparse,) = first.modifiers
    assert isinstance(sparse, SparseGPT)
    assert (sparse.structure.name, sparse.block_size, sparse.dampening_frac) == ("2:4", 64, 1e-3)
    smooth, gptq = second.modifiers
    assert smooth.smoothing_strength == 0.8
    assert smooth.mappings[0].smooth_layer == "re:.*input_layernorm"
    assert gptq.config.config_groups["group_0"].weights.num_bits == 4


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("QuantizationModifier", {"scheme": "W4A16"}, Quantize("W4A16")),
        ("MagnitudePruningModifier", {"final_sparsity": 0.7}, MagnitudePruning(0.7)),
        (
            "MagnitudePruningModifier",
            {"init_sparsity": 0.1, "final_sparsity": 0.7, "start": 0, "end": 2},
            GradualMagnitudePruning(0.7, init_sparsity=0.1, start=0, end=2),
        ),
        ("ConstantPruningModifier", {"targets": "__ALL_PRUNABLE__"}, ConstantPruning()),
        ("WandaPruningModifier", {"mask_structure": "0:0"}, Wanda()),
        ("AWQModifier", {"scheme": "W4A16", "n_grid": 10}, AWQ("W4A16", steps=10)),
    ],
)
def test_names_of_other_libraries_are_accepted(name, fields, expected):
    assert Recipe.of({"test_modifiers": {name: fields}}).modifiers == (expected,)


@pytest.mark.parametrize(
    ("modifiers", "message"),
    [
        ({"SparseGTPModifier": {}}, "did you mean 'SparseGPTModifier'"),
        ({"SparseGPT": {"sparsty": 0.5}}, "no field 'sparsty'; did you mean 'sparsity'"),
        ({"SparseGPT": {"sparsity": 1.5}}, "SparseGPT: sparsity must be at least 0 and below 1"),
        ({"SparseGPT": {"sparsity": "half"}}, "below 1"),
        ({"SparseGPT": {"sparsity": 0.6, "mask_structure": "2:4"}}, "2 of 4"),
        ({"SparseGPT": {"mask_structure": "4:2"}}, "mask_structure"),
        ({"SparseGPT": {"mask_structure": 24}}, "in quotes"),
        ({"SparseGPT": {"sequential_update": False}}, "sequential_update must be True"),
        ({"Wanda": {"sparsity_profile": "bowl"}}, "owl"),
        ({"Wanda": {"sparsity_profile": "owl", "sparsity": [0.5]}}, "requires a single sparsity"),
        ({"GPTQ": {}}, "either scheme .* or config_groups is required"),
        ({"GPTQ": {"scheme": "W4A17"}}, "W4A16"),
        ({"GPTQ": {"scheme": "W4A16", "actorder": "height"}}, "weight"),
        ({"GPTQ": 4}, "mapping"),
        ({"SmoothQuant": {"mappings": [1]}}, "a mapping must be"),
        ({"GradualMagnitudePruning": {"start": 3, "end": 2}}, "end must be after start"),
        ({"MovementPruning": {"init_sparsity": 0.9}}, "above final_sparsity"),
        (["SparseGPT"], "a modifier name with its fields"),
        ("SparseGPT", "expected a mapping or a list"),
    ],
)
def test_invalid_modifiers_raise(modifiers, message):
    with pytest.raises(ConfigError, match=message):
        Recipe.from_dict({"test_stage": {"test_modifiers": modifiers}})


@pytest.mark.parametrize(
    "source",
    [
        "",
        "a: [",
        "- x",
        "test_stage: 1",
        "test_stage: {}",
        "test_stage: {x: 1}",
        "x: !!python/name:os.system ''",
    ],
)
def test_invalid_recipes_raise(source):
    with pytest.raises(ConfigError):
        Recipe.from_yaml(source)


def test_duplicate_modifiers_raise():
    two = """
test_modifiers:
  Wanda: {targets: ["re:.*mlp.*"]}
  Wanda: {targets: ["re:.*attn.*"]}
"""
    with pytest.raises(ConfigError, match="line 4: duplicate key Wanda; use a list"):
        Recipe.from_yaml(two)
    assert len(Recipe.from_yaml(two.replace("  Wanda", "- Wanda")).modifiers) == 2


def test_an_error_in_a_file_names_it(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("test_modifiers: {Wonda: {}}")
    with pytest.raises(ConfigError, match=r"bad.yaml.*Wanda"):
        Recipe.load(path)


def test_a_missing_yaml_package_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingDependencyError, match="transformers"):
        Recipe.from_yaml("")


def test_tags_of_sparseml_are_read():
    recipe = Recipe.of("""
pruning_modifiers:
  - !ConstantPruningModifier
    start_epoch: 0.0
    params: __ALL_PRUNABLE__
  - !SparseGPTModifier {sparsity: 0.5, block_size: 64}
quantization_modifiers:
  - !GPTQModifier {scheme: W4A16, block_size: 128, offload_hessians: false}
""")
    assert recipe == Recipe.of([ConstantPruning(), SparseGPT(0.5, block_size=64), GPTQ("W4A16")])
    with pytest.raises(ConfigError, match="block_size must be 128"):
        Recipe.of("a_modifiers: {GPTQModifier: {scheme: W4A16, block_size: 64}}")
    with pytest.raises(ConfigError, match=r"unknown modifier 'os\.system'"):
        Recipe.of("a_modifiers: [!os.system {command: ls}]")
    with pytest.raises(ConfigError, match="invalid YAML"):
        Recipe.of("a_modifiers: [!!python/object/apply:os.system [ls]]")


@pytest.mark.parametrize("value", ["[0.5]", "0.5", "[]", "sparsity"])
def test_a_tag_without_fields_raises(value):
    with pytest.raises(ConfigError, match="line 2: !SparseGPTModifier must be followed by fields"):
        Recipe.of(f"a_modifiers:\n- !SparseGPTModifier {value}\n")
    for empty in ("", "{}"):
        assert Recipe.of(f"a_modifiers:\n- !ConstantPruningModifier {empty}\n") == Recipe.of(
            [ConstantPruning()]
        )
