"""`oneshot` of sparseml's note on compressed safetensors: compressed folders in, and out."""

import torch
from tiny_models import llama, same_weights

import slimtensors
from slimtensors.transformers.auto import SparseAutoModelForCausalLM

SAMPLE = """
from slimtensors.transformers import oneshot

oneshot(
    save_compressed=True,
    model="neuralmagic/TinyLlama-1.1B-Chat-v1.0-pruned2.4",
    recipe=RECIPE,
    dataset=DATASET,
    output_dir=OUTPUT_PATH
)
"""

RECIPE = """
sparsity_stage:
  run_type: oneshot
  sparsity_modifiers:
    SparseGPTModifier:
      sparsity: 0.5
      mask_structure: "2:4"
      sequential_update: true
      block_size: 32
      dampening_frac: 0.01
      targets: ["re:model.layers.\\\\d*$"]
quantization_stage:
  run_type: oneshot
  quantization_modifiers:
    ConstantPruningModifier:
      targets: ["re:.*q_proj.weight", "re:.*up_proj.weight"]
      start: 0
    GPTQModifier:
      ignore: ["lm_head"]
      config_groups:
        group_0:
          weights: {num_bits: 4, type: int, symmetric: true, strategy: channel}
          targets: ["Linear"]
"""


def test_a_compressed_model_is_pruned_quantized_and_compressed_again(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    slimtensors.transformers.enable(llama()).save_pretrained(source, save_compressed=True)
    data = [{"input_ids": torch.randint(96, (2, 12))} for _ in range(4)]
    sample = SAMPLE.replace("neuralmagic/TinyLlama-1.1B-Chat-v1.0-pruned2.4", str(source))
    names = {"RECIPE": RECIPE, "DATASET": data, "OUTPUT_PATH": str(target)}
    exec(sample.replace("oneshot(\n", "made, report = oneshot(\n"), names)
    model = SparseAutoModelForCausalLM.from_pretrained(target)
    assert same_weights(model, names["made"])
    before = SparseAutoModelForCausalLM.from_pretrained(source)
    for name, weight in model.named_parameters():
        if "proj" in name:
            assert (weight.view(-1, 4) != 0).sum(1).max() == 2
            assert not weight[before.get_parameter(name) == 0].any(), "zeros that came in stay"
            assert all(len(row.unique()) <= 16 for row in weight)
    assert names["report"].format == "slim"
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (source, target)]
    assert sizes[1] < sizes[0]
