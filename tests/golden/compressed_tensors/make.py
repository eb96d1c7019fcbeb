"""Write the golden files of one compressed-tensors release with that release's own code.

One environment for all, one folder per release (--no-deps: old releases pin old
transformers, but import with the new one), one process per release:

    python3 -m venv venv
    venv/bin/pip install torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 pydantic==2.14.3 \
        transformers==5.22.2 accelerate==1.15.0 frozendict loguru tqdm
    for v in 0.3.3 0.6.0 0.8.1 0.9.4 0.11.0 0.14.0.1; do
        venv/bin/pip install --no-deps --target ct/$v compressed-tensors==$v
        PYTHONPATH=ct/$v venv/bin/python make.py
    done

Every file is checked as it is made: what the release reads back is the source, bit for bit.
"""

import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor, load_compressed, save_compressed
from compressed_tensors.config import BitmaskConfig
from safetensors import safe_open
from safetensors.torch import save_file

VERSION = version("compressed-tensors")
RELEASE = tuple(int(part) for part in VERSION.split("."))
HERE = Path(__file__).parent
FP8 = torch.float8_e4m3fn
LAYER = "model.layers.0."
torch.Tensor.cuda = lambda tensor: tensor  # the 2:4 reader of 0.9 sends fp8 to a GPU


def random(seed, *shape):
    """Values of both signs that bf16, fp16 and fp8 hold exactly, none of them zero."""
    g = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(8, 16, shape, generator=g) * 2.0 ** torch.randint(
        -6, 1, shape, generator=g
    )
    return torch.where(torch.rand(shape, generator=g) < 0.5, -magnitude, magnitude)


def half_zero(seed, *shape):
    """About half zeros (+0.0 only), the first row without any and the second row all zero."""
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    keep[0], keep[1] = True, False
    return torch.where(keep, random(seed, *shape), 0.0)


def two_four(seed, rows, columns):
    """2:4; groups of the second row are all zero, those of the third have one value each."""
    order = torch.rand(
        (rows, columns // 4, 4), generator=torch.Generator().manual_seed(seed)
    ).argsort(-1)
    kept = torch.full((rows, 1, 1), 2)
    kept[1], kept[2] = 0, 1
    return torch.where((order < kept).reshape(rows, columns), random(seed, rows, columns), 0.0)


def source(sparse, columns):
    up, down, q, k = columns
    return {
        LAYER + "mlp.up_proj.weight": sparse(1, 12, up),
        LAYER + "mlp.up_proj.bias": random(2, 12),
        LAYER + "mlp.down_proj.weight": sparse(3, 9, down).bfloat16(),
        LAYER + "self_attn.q_proj.weight": sparse(4, 7, q).half(),
        LAYER + "self_attn.k_proj.weight": sparse(5, 6, k).to(FP8),
        LAYER + "input_layernorm.weight": random(6, 21).bfloat16(),
        "model.embed_tokens.weight": random(7, 10, 5).bfloat16(),
    }


def same(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


def check_and_add_dense(path, config, dense):
    """What the release itself reads back must be what went in; store that as plain tensors."""
    back = dict(load_compressed(str(path), config))
    assert back.keys() == dense.keys(), back.keys() ^ dense.keys()
    assert all(same(back[name], dense[name]) for name in dense)
    save_file(dense, path.with_name(path.stem + "-dense.safetensors"))
    with safe_open(str(path), "pt") as f:
        for name in sorted(f.keys()):
            part = f.get_slice(name)
            print("  ", name, part.get_dtype(), part.get_shape())


def by_save_compressed(out):
    """Every tensor (up to 0.8) or every `*.weight` (from 0.9), a 3-D one and other names too."""
    tensors = source(half_zero, (21, 13, 19, 11))
    tensors["conv.weight"] = half_zero(8, 4, 3, 10)
    tensors["lm_head_sparse"] = half_zero(9, 4, 11)
    path = out / "bitmask.safetensors"
    save_compressed(tensors, path, "sparse-bitmask")
    check_and_add_dense(path, BitmaskConfig(format="sparse-bitmask"), tensors)


def by_model_compressor(out, name, config, tensors):
    """A model's state dict, only the Linear modules, and the config.json that goes with it."""
    model = torch.nn.Module()
    for full, value in tensors.items():
        *modules, leaf = full.split(".")
        at = model
        for i, part in enumerate(modules):
            if not hasattr(at, part):
                linear = part.endswith("_proj") and i == len(modules) - 1
                at.add_module(
                    part, torch.nn.Linear(1, 1, bias=False) if linear else torch.nn.Module()
                )
            at = getattr(at, part)
        at.register_parameter(leaf, torch.nn.Parameter(value, requires_grad=False))
    compressor = ModelCompressor(sparsity_config=config)
    path = out / f"{name}.safetensors"
    save_file(compressor.compress(model), path)
    write_config(compressor, out / f"{name}-config.json")
    check_and_add_dense(path, config, tensors)


def write_config(compressor, path):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text('{"model_type": "llama"}')
        compressor.update_config(folder)
        path.write_text(
            json.dumps(json.loads((Path(folder) / "config.json").read_text()), indent=2) + "\n"
        )


def main():
    print(VERSION)
    out = HERE / VERSION
    out.mkdir(exist_ok=True)
    by_save_compressed(out)
    if RELEASE < (0, 4):  # wrote no config.json itself, but reads this key of it
        config = {
            "model_type": "llama",
            "sparsity_config": BitmaskConfig(global_sparsity=0.5).model_dump(),
        }
        (out / "bitmask-config.json").write_text(json.dumps(config, indent=2) + "\n")
    elif RELEASE < (0, 9):
        write_config(
            ModelCompressor(BitmaskConfig(global_sparsity=0.5)), out / "bitmask-config.json"
        )
    else:
        from compressed_tensors.config import Sparse24BitMaskConfig

        only = {"targets": ["Linear"], "ignore": ["lm_head"], "global_sparsity": 0.5}
        by_model_compressor(
            out, "bitmask-model", BitmaskConfig(**only), source(half_zero, (21, 13, 19, 11))
        )
        by_model_compressor(
            out, "24-model", Sparse24BitMaskConfig(**only), source(two_four, (24, 16, 40, 8))
        )


main()
