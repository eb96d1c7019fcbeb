"""llama.cpp's quantizer for fit.py: build it, write GGUF files, quantize and read them.

    python benchmarks/fit_gguf.py FOLDER        # build llama-quantize and llama-imatrix

The source is that of the package `llama-cpp-python`, which contains llama.cpp.
"""

import math
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

PACKAGE = "llama-cpp-python==0.3.36"
CHUNKS, LENGTH = 128, 512
"""Calibration sequences for the importance matrix, and their length in tokens."""
_OPTIONS = ("BUILD_SERVER", "BUILD_APP", "BUILD_TESTS", "BUILD_EXAMPLES", "OPENSSL", "BUILD_UI")


def build(folder: Path) -> Path:
    """Build the two tools unless they exist, and return the folder with them."""
    target, packages = folder / "llama-build", folder / "packages"
    tools = ("llama-quantize", "llama-imatrix")
    if not all((target / "bin" / tool).exists() for tool in tools):
        packages.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary"]
        command += [":all:", "--no-build-isolation", "--dest", str(packages), PACKAGE]
        subprocess.run(command, check=True)
        archive = next(packages.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as file:
            file.extractall(packages, filter="data")
        source = packages / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
        command = ["cmake", "-S", str(source), "-B", str(target), "-DCMAKE_BUILD_TYPE=Release"]
        subprocess.run([*command, *(f"-DLLAMA_{x}=OFF" for x in _OPTIONS)], check=True)
        subprocess.run(["cmake", "--build", str(target), "--target", *tools], check=True)
    return target / "bin"


@dataclass(frozen=True)
class Quantized:
    """A GGUF file: its weights by their name in transformers, and what they cost."""

    weights: dict[str, Tensor]
    file_bytes: int
    sizes: dict[str, tuple[str, int, int]]
    """Type, number of weights and bytes by name."""

    @property
    def tensor_bytes(self) -> int:
        return sum(size for _, _, size in self.sizes.values())

    @property
    def types(self) -> dict[str, int]:
        """Return the number of weights by type."""
        found: dict[str, int] = {}
        for kind, count, _ in self.sizes.values():
            found[kind] = found.get(kind, 0) + count
        return found

    def with_weight_of(self, other: "Quantized", name: str) -> "Quantized":
        """Return the file with one weight of another file."""
        larger = other.sizes[name][2] - self.sizes[name][2]
        return Quantized(
            self.weights | {name: other.weights[name]},
            self.file_bytes + larger,
            self.sizes | {name: other.sizes[name]},
        )


class Converter:
    """Names and row orders of a model in llama.cpp.

    Most types have blocks of 256 weights within a row; matrices with other numbers of columns fall
    back to types with blocks of 32 and 4.5 bits or more. If `fold`, such matrices are stored as
    fewer and longer rows (four rows of 576 columns as one of 2304), so that every type fits. No
    program runs such a file: it is what llama.cpp would achieve if blocks could cross rows.
    """

    def __init__(self, config: Any, *, fold: bool = False) -> None:
        self.config = config
        self._fold = fold
        self.arch = {"llama": gguf.MODEL_ARCH.LLAMA, "bert": gguf.MODEL_ARCH.BERT}[
            config.model_type
        ]
        names = gguf.get_tensor_name_map(self.arch, config.num_hidden_layers)
        self._name = lambda name: names.get_name(name, try_suffixes=(".weight", ".bias"))
        self._heads = {}
        if config.model_type == "llama":
            self._heads = {
                "attn_q": config.num_attention_heads,
                "attn_k": config.num_key_value_heads,
            }

    def names(self, weights: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the name in llama.cpp of every weight that it stores."""
        found = {name: self._name(name) for name in weights if not name.startswith("pooler.")}
        return {name: other for name, other in found.items() if other is not None}

    def to_gguf(self, name: str, weight: Tensor) -> Tensor:
        heads = self._heads.get(name.split(".")[-2])
        if heads is not None:
            split = weight.view(heads, 2, -1, weight.shape[1])
            weight = split.transpose(1, 2).reshape(weight.shape)
        if weight.ndim < 2:
            return weight
        return weight.reshape(len(weight) // self.folds(weight.shape[1]), -1)

    def from_gguf(self, name: str, weight: Tensor, shape: torch.Size) -> Tensor:
        weight = weight.reshape(shape)
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return weight
        return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(shape)

    def folds(self, columns: int) -> int:
        """Return how many rows are stored as one."""
        return 256 // math.gcd(columns, 256) if self._fold else 1


def write(
    source: Path, target: Path, converter: Converter, fields: Mapping[str, tuple[Any, Any]]
) -> None:
    """Write a model folder as GGUF with matrices in float32.

    `fields` are its metadata: a value and a `GGUFValueType`, or a list and the type of its items.
    """
    weights = load_file(source / "model.safetensors")
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[converter.arch])
    for key, (value, kind) in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, kind)
    for name, other in converter.names(weights).items():
        writer.add_tensor(other, converter.to_gguf(other, weights[name].float()).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_fields(path: Path) -> dict[str, tuple[Any, Any]]:
    """Return the metadata of a GGUF file, such as its tokenizer."""
    skipped = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture"}
    skipped |= {"general.file_type", "general.quantization_version"}
    reader = gguf.GGUFReader(path)
    return {
        name: (field.contents(), field.types[0])
        for name, field in reader.fields.items()
        if name not in skipped
    }


def importance(tools: Path, model: Path, text: Path, target: Path) -> None:
    """Write the importance matrix of a text, unless it exists."""
    if not target.exists():
        command = [tools / "llama-imatrix", "-m", model, "-f", text, "-o", target, "--no-ppl"]
        command += ["-c", LENGTH, "-b", LENGTH, "--chunks", CHUNKS, "-t", _threads()]
        subprocess.run([str(x) for x in command], check=True)


def fold_importance(source: Path, target: Path, converter: Converter) -> None:
    """Write an importance matrix for folded matrices."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "")
    writer.kv_data[0].clear()  # it has no architecture
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            value, kind = field.contents(), field.types[0]
            if isinstance(value, list):
                writer.add_array(name, value)
            else:
                writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.name.endswith(".in_sum2"):
            data = np.tile(data, (1, converter.folds(data.shape[-1])))
        writer.add_tensor(tensor.name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(
    tools: Path, model: Path, target: Path, kind: str, *, matrix: Path | None, embedding: str = ""
) -> None:
    """Quantize a GGUF file."""
    options = ["--imatrix", str(matrix)] if matrix else []
    options += ["--token-embedding-type", embedding] if embedding else []
    command = [tools / "llama-quantize", *options, model, target, kind, _threads()]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-600:])


def read(path: Path, converter: Converter, like: Mapping[str, Tensor]) -> Quantized:
    """Return the dequantized weights of a GGUF file, named and shaped like those in `like`."""
    back = {other: name for name, other in converter.names(like).items()}
    weights, sizes = {}, {}
    for tensor in gguf.GGUFReader(path).tensors:
        kind, name = tensor.tensor_type, back[tensor.name]
        dense = gguf.quants.dequantize(tensor.data, kind).astype(np.float32)
        weight = torch.from_numpy(np.ascontiguousarray(dense))
        weights[name] = converter.from_gguf(tensor.name, weight, like[name].shape)
        sizes[name] = kind.name, int(tensor.n_elements), int(tensor.n_bytes)
    return Quantized(weights, path.stat().st_size, sizes)


def _threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", "2"))


def describe(types: Mapping[str, int]) -> Iterator[str]:
    """Yield the share of the weights of each type."""
    total = sum(types.values())
    for kind, count in sorted(types.items(), key=lambda item: -item[1]):
        if count / total > 0.005:
            yield f"{kind} {100 * count / total:.0f} %"


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
