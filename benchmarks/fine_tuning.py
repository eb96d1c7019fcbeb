"""Size of fine-tuning checkpoints with a pretrained model as base, compared with torch.save.

    python benchmarks/fine_tuning.py

A Llama with random weights is trained for a few steps with AdamW on random tokens: one of its
twenty layers, or LoRA adapters of rank 8. The values of frozen weights do not matter.
"""

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import MB, Report, options
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from slimtensors.checkpoint import build_checkpoint, load_checkpoint, save_checkpoint

STEPS = (10, 15)
"""Steps of two saves."""

TARGETS = {"one layer": 0.1, "adapters": 0.1}
"""Largest size relative to torch.save of the same state."""


class Adapter(nn.Module):
    """A linear layer with a low-rank update."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.lora_A.to(base.weight.dtype)
        self.lora_B.to(base.weight.dtype)

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def make_model(dtype: torch.dtype, *, quick: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    width = 64 if quick else 256
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=20,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config).to(dtype)


def choose_trained(model: Any, case: str) -> None:
    """Freeze a model except one layer, or except adapters that are added to its attention."""
    model.requires_grad_(False)
    if case == "one layer":
        model.model.layers[-1].requires_grad_(True)
        return
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name), rank=8))


def train(model: Any) -> Iterator[dict[str, Any]]:
    """Yield the state at each of `STEPS`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for step in range(1, STEPS[-1] + 1):
        tokens = torch.randint(0, 1000, (4, 32))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in STEPS:
            yield build_checkpoint(model, optimizer, step=step)


def plain_bytes(state: dict[str, Any]) -> int:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getbuffer().nbytes


def measure(report: Report, case: str, dtype: torch.dtype, folder: Path, *, quick: bool) -> None:
    model = make_model(dtype, quick=quick)
    model.save_pretrained(folder / "base")
    choose_trained(model, case)
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    share = trained / sum(p.numel() for p in parameters)
    label = f"{case} ({share:.1%} trained), {str(dtype)[6:]}"
    for step, state in zip(STEPS, train(model), strict=True):
        plain = plain_bytes(state)
        name, options = f"{step}", {"pretrained": folder / "base"}
        if step == STEPS[0]:
            print(f"\n{label}: {plain / MB:.1f} MB by torch.save")
            alone = save_checkpoint(state, folder / "alone").manifest.bytes
            report.rows.append({"group": label, "case": "alone", "of_torch_save": alone / plain})
            print(f"  {'without the model':56}{alone / plain:8.4f}")
        else:
            options["base"] = folder / f"{STEPS[0]}"
        saved = save_checkpoint(state, folder / name, **options)
        loaded = load_checkpoint(folder / name)["model"]
        assert all(torch.equal(loaded[key], x) for key, x in state["model"].items())
        what = "with the model" if step == STEPS[0] else "with the model and a base"
        ratio = saved.manifest.bytes / plain
        report.at_most(f"{label}: {what}, of torch.save", ratio, TARGETS[case])
        kept = {key: x for key, x in state.items() if key != "model"}
        names = [key for key, p in model.named_parameters() if p.requires_grad]
        only = plain_bytes({**kept, "model": {key: state["model"][key].clone() for key in names}})
        print(f"  {'trained weights and optimizer, by torch.save':56}{only / plain:8.4f}")


def main() -> None:
    chosen = options(__doc__ or "").parse_args()
    report = Report("fine_tuning", quick=chosen.quick, timed=False)
    for case in TARGETS:
        for dtype in (torch.float32, torch.bfloat16):
            with tempfile.TemporaryDirectory() as folder:
                measure(report, case, dtype, Path(folder), quick=chosen.quick)
    report.finish()


if __name__ == "__main__":
    main()
