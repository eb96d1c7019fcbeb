"""Methods that fit.py compares: each turns a teacher into smaller weights and reports their bytes.

A method whose package is missing is skipped; `fit.py peers --only HQQ` in an environment with it
adds its rows.

- GGUF: llama.cpp's own quantizer, with an importance matrix from the calibration text. Types whose
  blocks do not fit the number of columns fall back to larger ones, by llama.cpp's own rules.
- GPTQ: slimtensors, `compressed-tensors` files, groups of 64; the embedding stays in bfloat16.
- NF4: bitsandbytes, blocks of 64, with and without double quantization.
- HQQ: its own optimizer, groups of 64.
- data-free: entropy-coded rounding (`Trellis`) with one step relative to each matrix, as EntQuant.

bitsandbytes, HQQ and GPTQ leave the embedding in bfloat16, as users get it. Where it is tied to the
output and most of the file, that is no fair fight, so each also comes with the embedding rounded to
8 bits per weight in rows (`+int8 embedding`, slimtensors).
"""

import json
import math
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

EMBEDDINGS = ("model.embed_tokens.weight", "embeddings.word_embeddings.weight")


@dataclass(frozen=True)
class Made:
    """Weights of a method, dense, and what they cost when stored."""

    weights: dict[str, Tensor]
    tensor_bytes: int
    file_bytes: int
    """With headers; of a GGUF file also with the tokenizer."""
    cpu_seconds: float
    note: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A teacher, its texts, and the folder where files are kept."""

    folder: Path
    name: str
    teacher: Path
    calibration: Path
    fields: Callable[[], dict[str, tuple[Any, Any]]]
    """GGUF metadata of the teacher."""

    def load(self) -> dict[str, Tensor]:
        return load_file(self.teacher / "model.safetensors")


@contextmanager
def cpu_seconds() -> Iterator[list[float]]:
    """Yield a list that receives the CPU time of this process and its children."""

    def now() -> float:
        used = (resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(x.ru_utime + x.ru_stime for x in used)

    start, found = now(), list[float]()
    yield found
    found.append(now() - start)


def make_gguf(kind: str, task: Task, *, embedding: str = "", fold: bool = False) -> Made:
    """Quantize with llama.cpp."""
    import fit_gguf
    from transformers import AutoConfig

    folder = task.folder / "gguf"
    folder.mkdir(exist_ok=True)
    tools = fit_gguf.build(task.folder)
    config, dense = AutoConfig.from_pretrained(task.teacher), task.load()
    source, matrix = folder / f"{task.name}-f32.gguf", folder / f"{task.name}.imatrix.gguf"
    if not source.exists():
        fit_gguf.write(task.teacher, source, fit_gguf.Converter(config), task.fields())
    fit_gguf.importance(tools, source, task.calibration, matrix)
    converter = fit_gguf.Converter(config, fold=fold)
    if fold:
        plain, source = matrix, folder / f"{task.name}-folded-f32.gguf"
        matrix = folder / f"{task.name}-folded.imatrix.gguf"
        if not matrix.exists():
            fit_gguf.write(task.teacher, source, converter, task.fields())
            fit_gguf.fold_importance(plain, matrix, converter)
    kept = folder / (task.name + ("-folded" if fold else ""))
    kept.mkdir(exist_ok=True)

    def run(kind: str, embedding: str = "") -> tuple[fit_gguf.Quantized, float]:
        target = kept / f"{kind}{embedding and '-' + embedding}.gguf"
        if not (seconds := target.with_suffix(".json")).exists():
            with cpu_seconds() as took:
                fit_gguf.quantize(tools, source, target, kind, matrix=matrix, embedding=embedding)
            seconds.write_text(json.dumps(took[0]))
        return fit_gguf.read(target, converter, dense), json.loads(seconds.read_text())

    read, took = run(kind)
    if embedding:  # other weights do not depend on it, and take long to quantize
        name = next(name for name in EMBEDDINGS if name in dense)
        read = read.with_weight_of(run("Q8_0", embedding)[0], name)
    note = ", ".join(fit_gguf.describe(read.types))
    versions = {"llama.cpp": fit_gguf.PACKAGE, "gguf": version("gguf")}
    return Made(read.weights, read.tensor_bytes, read.file_bytes, took, note, versions)


def make_gptq(bits: int, task: Task) -> Made:
    """Quantize the linear layers with slimtensors' GPTQ, groups of 64."""
    import slimtensors
    from slimtensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from slimtensors.quantization.state_dict import decompress_state
    from slimtensors.recipe import Calibration
    from slimtensors.transformers.calibrate import calibrate_folder

    target = task.folder / "made" / task.name / f"gptq{bits}"
    args = QuantizationArgs(bits, group_size=64)
    seconds = target.with_suffix(".json")
    if not seconds.exists():
        linear = {"linear": QuantizationScheme(["Linear"], weights=args)}
        config = QuantizationConfig(linear, ignore=["lm_head"])
        with cpu_seconds() as took:
            data = Calibration(samples=64, length=512, batch_size=2)
            calibrate_folder(task.teacher, target, config, str(task.calibration), calibration=data)
        seconds.write_text(json.dumps(took[0]))
    path, dense = target / "model.safetensors", task.load()
    stored = QuantizationConfig({"linear": QuantizationScheme(["re:.*"], weights=args)})
    weights = decompress_state(slimtensors.load(target), stored, None)
    if weights.keys() != dense.keys() or any(weights[k].shape != dense[k].shape for k in dense):
        raise RuntimeError("GPTQ: not all weights can be loaded")
    return Made(weights, _tensor_bytes(path), path.stat().st_size, json.loads(seconds.read_text()))


def make_nf4(task: Task, *, double: bool) -> Made:
    """Quantize the linear layers with bitsandbytes."""
    from bitsandbytes import functional

    weights, total = task.load(), 0
    with cpu_seconds() as took:
        for name, weight in weights.items():
            if _is_linear(name, weight):
                code, state = functional.quantize_4bit(
                    weight, blocksize=64, quant_type="nf4", compress_statistics=double
                )
                weights[name] = functional.dequantize_4bit(code, state).view(weight.shape)
                parts = [code, *(x for x in state.as_dict(packed=True).values())]
                total += sum(x.nbytes for x in parts if isinstance(x, Tensor))
            else:
                total += weight.nbytes
    return Made(weights, total, total, took[0], "", {"bitsandbytes": version("bitsandbytes")})


def make_hqq(bits: int, task: Task) -> Made:
    """Quantize the linear layers with HQQ."""
    from hqq.core.quantize import Quantizer

    weights, total = task.load(), 0
    with cpu_seconds() as took:
        for name, weight in weights.items():
            if _is_linear(name, weight):
                code, meta = Quantizer.quantize(
                    weight.float(),
                    nbits=bits,
                    group_size=64,
                    axis=1,
                    device="cpu",
                    compute_dtype=torch.float32,
                )
                weights[name] = Quantizer.dequantize(code, meta).view(weight.shape)
                # The package packs 3 bits into int32 with waste; count what the bits need.
                total += weight.numel() * bits // 8 + 2 * 2 * weight.numel() // 64
            else:
                total += weight.nbytes
    return Made(
        weights, total, total, took[0], "scales and zeros as float16", {"hqq": version("hqq")}
    )


def make_data_free(step: float, task: Task) -> Made:
    """Round all matrices with one relative step and entropy coding, without data."""
    import slimtensors
    from slimtensors.codecs import Trellis

    target = task.folder / "made" / task.name / f"data-free-{step}.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)

    def choose(_: str, weight: Tensor) -> slimtensors.Plan | None:
        return slimtensors.Plan(Trellis(step=step)) if weight.ndim == 2 else None

    with cpu_seconds() as took:
        slimtensors.save(task.load(), target, preset=choose)
    weights = slimtensors.load(target)
    return Made(weights, _tensor_bytes(target), target.stat().st_size, took[0])


def make_ours(size: str, task: Task) -> Made:
    """Fit the teacher to a size with slimtensors, and load it as users do."""
    from slimtensors.recipe import Calibration
    from slimtensors.transformers import fit

    target = task.folder / "made" / task.name / f"fit-{size}"
    statistics = task.folder / "made" / task.name / "statistics"
    seconds = target.with_suffix(".json")
    if not target.exists():
        with cpu_seconds() as took:
            data = Calibration(samples=64, length=512, batch_size=2, work=statistics)
            fit(task.teacher, size, str(task.calibration), output_dir=target, calibration=data)
        seconds.write_text(json.dumps(took[0]))
    return load_ours(target, json.loads(seconds.read_text()) if seconds.exists() else math.nan)


def load_ours(folder: Path, cpu_seconds: float = math.nan) -> Made:
    """Load a model folder that `fit` wrote."""
    from transformers import AutoModel, AutoModelForCausalLM

    import slimtensors.transformers  # noqa: F401, registers the quantizer

    config = json.loads((folder / "config.json").read_text())
    kind = AutoModelForCausalLM if "CausalLM" in str(config["architectures"]) else AutoModel
    model = kind.from_pretrained(folder, dtype=torch.bfloat16)
    weights = {name: x.data for name, x in model.named_parameters()}
    paths = list(folder.glob("*.safetensors"))
    tensors, files = sum(map(_tensor_bytes, paths)), sum(x.stat().st_size for x in paths)
    return Made(weights, tensors, files, cpu_seconds)


def with_int8_embedding(make: Callable[[Task], Made], task: Task) -> Made:
    """Round the embedding to 8 bits, one bfloat16 scale per row."""
    made = make(task)
    name = next(name for name in EMBEDDINGS if name in made.weights)
    weight = made.weights[name].float()
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16().float()
    rounded = (weight / scale).round().clamp(-127, 127) * scale
    saved = weight.numel() - 2 * len(weight)
    return replace(
        made,
        weights=made.weights | {name: rounded},
        tensor_bytes=made.tensor_bytes - saved,
        file_bytes=made.file_bytes - saved,
    )


def _is_linear(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and "embed" not in name and "lm_head" not in name


def _tensor_bytes(path: Path) -> int:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header


GGUF_TYPES = ("Q4_K_M", "Q3_K_M", "Q2_K", "Q5_K_M", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_M", "IQ2_XS")
GGUF_EMBEDDINGS = ("", "q4_K", "q3_K")


def list_methods(task: Task) -> dict[str, Callable[[Task], Made]]:
    """Return all methods by name, the quick and the important ones first."""
    found: dict[str, Callable[[Task], Made]] = {}
    columns = {x.shape[1] for x in task.load().values() if x.ndim == 2}
    for fold in (True, False) if any(x % 256 for x in columns) else (False,):
        for embedding in GGUF_EMBEDDINGS:
            for kind in GGUF_TYPES:
                name = f"GGUF {kind}" + (f", {embedding} embedding" if embedding else "")
                name += ", folded" if fold else ""
                found[name] = partial(make_gguf, kind, embedding=embedding, fold=fold)
    for step in (0.06, 0.12, 0.25, 0.5):
        found[f"data-free, step {step}"] = partial(make_data_free, step)
    others = {f"GPTQ W{bits} g64": partial(make_gptq, bits) for bits in (4, 3, 2)}
    others["bitsandbytes NF4"] = partial(make_nf4, double=False)
    others["bitsandbytes NF4, double"] = partial(make_nf4, double=True)
    others |= {f"HQQ {bits} bits g64": partial(make_hqq, bits) for bits in (4, 3, 2)}
    for name, make in others.items():
        found[name] = make
        found[f"{name}, int8 embedding"] = partial(with_int8_embedding, make)
    return found
