"""Print how many of our source files the main calls run through: `python tests/layout/walk.py`.

A report, not a test: a reader who follows a call should not have to open many files.
"""

import sys
import tempfile
import threading
from pathlib import Path

import torch

import slimtensors

ROOT = Path(slimtensors.__file__).parent


def files_of(call):
    """Run `call` and return the files of ours whose functions were called."""
    seen = set()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_name != "<module>":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(
        str(Path(name).relative_to(ROOT)) for name in seen if Path(name).is_relative_to(ROOT)
    )


def tiny_llama(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main():
    from slimtensors import load, save
    from slimtensors.checkpoint import build_checkpoint, load_checkpoint, save_checkpoint
    from slimtensors.cli import main as command
    from slimtensors.recipe import GPTQ, SparseGPT
    from slimtensors.transformers import oneshot

    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        tiny_llama(work / "model")
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        state = build_checkpoint(model, optimizer, step=1)
        later = build_checkpoint(model, optimizer, step=2)
        tensors = {"weight": torch.randn(256, 256, dtype=torch.bfloat16)}
        compress = ["compress", str(work / "model"), "-o", str(work / "small")]
        batches = [{"input_ids": torch.randint(0, 256, (4, 64))} for _ in range(4)]
        calls = {
            "save": lambda: save(tensors, work / "x.safetensors"),
            "load": lambda: load(work / "x.safetensors"),
            "compress FOLDER": lambda: command(compress),
            "save_checkpoint": lambda: save_checkpoint(state, work / "one"),
            "save_checkpoint, delta": lambda: save_checkpoint(
                later, work / "two", base=work / "one"
            ),
            "load_checkpoint": lambda: load_checkpoint(work / "two"),
            "from_pretrained": lambda: load_pretrained(work / "small"),
            "oneshot": lambda: oneshot(
                model=str(work / "model"),
                recipe=[SparseGPT(mask_structure="2:4"), GPTQ("W4A16")],
                dataset=batches,
                output_dir=str(work / "oneshot"),
            ),
        }
        for label, call in calls.items():
            found = files_of(call)
            print(f"{label:24} {len(found):3}", *(found if "-v" in sys.argv else ()))


def load_pretrained(folder):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder)


if __name__ == "__main__":
    main()
