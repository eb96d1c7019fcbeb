"""Quantize the folder of a model, load it elsewhere, and compare every weight."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue

import torch
from architectures.stock import StockProcess
from safetensors.torch import load_file
from strategies import same_bits
from torch import Tensor, nn

from slimtensors.errors import SlimError
from slimtensors.folder import quantize_folder
from slimtensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from slimtensors.quantization.affine import dequantize, find_params, quantize
from slimtensors.transformers.auto import load_pretrained

INFO = ("missing_keys", "unexpected_keys", "mismatched_keys")

SCHEMES = {
    "int8": QuantizationScheme.preset("W8A8"),
    "int4": QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    ),
}


@dataclass
class Outcome:
    """How a quantized folder was written and loaded."""

    result: str
    """right, refused, wrong; or, after a warning that transformers stops with an error, upstream if
    it does so for the folder of compressed-tensors as well, and warned if not."""
    dense: float = 0.0
    """Share of the parameters of linear layers that stayed dense."""
    reasons: list[str] = field(default_factory=list)
    upstream: list[str] = field(default_factory=list)
    """Problems of the folder that compressed-tensors writes itself."""
    ignored: int = 0
    """Number of layers that a first attempt refused, and that were then ignored."""
    warned: bool = False
    """Whether we warned that transformers cannot load the folder."""


def check_quantized(model, scheme: str, folder: Path, stock: StockProcess) -> Outcome:
    """Quantize a model and compare what compressed-tensors and our loader load.

    Each weight must be equal by bits to the dense one or, in a linear layer, to its rounded value.
    """
    cls = type(model)
    model.save_pretrained(folder / "dense")
    reference, info = cls.from_pretrained(folder / "dense", output_loading_info=True)
    expected = Expected(reference, info, SCHEMES[scheme].weights, model.dtype)
    config = QuantizationConfig({"group_0": SCHEMES[scheme]}, ignore=["lm_head"])
    outcome = Outcome("refused", 1.0)
    try:
        outcome.warned = _quantize(folder, config)
    except SlimError as error:
        outcome.reasons = [str(error).replace(str(folder), "")]
        if not expected.unsuitable:
            return outcome
        config.ignore += expected.unsuitable
        try:
            outcome.warned = _quantize(folder, config)
        except SlimError:
            return outcome
        outcome.ignored = len(expected.unsuitable)
    problems = _load_ours(cls, folder, expected)
    outcome.dense = round(expected.dense, 3)
    outcome.result = "wrong" if problems else "right"
    if not problems:
        answer = stock.load(folder / "ours", cls.__name__, folder / "ours.safetensors")
        problems = _compare_answer(answer, folder / "ours.safetensors", expected)
        if problems:
            outcome.upstream = _check_upstream(folder, cls.__name__, config, expected, stock)
            is_announced = outcome.warned and "error" in answer
            result = "upstream" if outcome.upstream else "warned"
            outcome.result = result if is_announced else "wrong"
    outcome.reasons = problems or outcome.reasons
    return outcome


def _quantize(folder: Path, config: QuantizationConfig) -> bool:
    """Quantize the dense folder; return True if it warns that transformers cannot load it."""
    records = QueueHandler(SimpleQueue())
    logger = logging.getLogger("slimtensors")
    logger.addHandler(records)
    try:
        quantize_folder(folder / "dense", folder / "ours", config)
    finally:
        logger.removeHandler(records)
    messages = [records.queue.get().getMessage() for _ in range(records.queue.qsize())]
    return any("transformers cannot load" in message for message in messages)


def _load_ours(cls: type, folder: Path, expected: "Expected") -> list[str]:
    try:
        loaded, info = load_pretrained(cls, folder / "ours", output_loading_info=True)
        problems = expected.compare(loaded.state_dict(), info)
    except Exception as error:
        problems = [f"{type(error).__name__}: {error}".replace(str(folder), "")]
    return [f"our loader: {problem}" for problem in problems]


def _check_upstream(
    folder: Path, name: str, config: QuantizationConfig, expected: "Expected", stock: StockProcess
) -> list[str]:
    """Return what is wrong with the folder that compressed-tensors itself writes."""
    ignore = sorted({*config.ignore, *expected.unsuitable})
    section = config.to_dict() | {"ignore": ignore}
    answer = stock.quantize(folder / "dense", name, section, folder / "theirs")
    if "error" not in answer:
        answer = stock.load(folder / "theirs", name, folder / "theirs.safetensors")
    return _compare_answer(answer, folder / "theirs.safetensors", expected)


def _compare_answer(answer: dict, output: Path, expected: "Expected") -> list[str]:
    if "error" in answer:
        return [answer["error"]]
    return expected.compare(load_file(output), answer)


class Expected:
    """The weights of a dense model, and their rounded values.

    `dtype` is that of the files; some layers are loaded in another one.
    """

    def __init__(
        self, model: nn.Module, info: dict, args: QuantizationArgs, dtype: torch.dtype
    ) -> None:
        self._state = model.state_dict()
        self._args, self._info = args, info
        self._dtype = dtype
        self._linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        self.unsuitable = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module.in_features % (args.group_size or 1)
        ]
        """Linear layers that cannot be quantized in groups."""
        self.dense = 0.0
        """Share of the parameters of linear layers that the last compared state has dense."""

    def compare(self, state: dict[str, Tensor], info: dict) -> list[str]:
        """Return the differences of loaded weights."""
        problems = [
            f"{kind}: {', '.join(sorted(differing)[:3])} ({len(differing)})"
            for kind in INFO
            if (differing := _names(info[kind]) ^ _names(self._info[kind]))
        ]
        total = dense = 0
        wrong = []
        for name, x in self._state.items():
            if name in self._info["missing_keys"]:
                continue
            layer, _, parameter = name.rpartition(".")
            is_linear = layer in self._linear and parameter == "weight"
            total += x.numel() * is_linear
            found = state.get(name, _stack_experts(state, name))
            if found is None:
                wrong.append(f"{name} not found")
            elif same_bits(found, x) or _is_same_integer(found, x):
                dense += x.numel() * is_linear
            elif not (is_linear or x.dim() == 3) or not any(
                same_bits(found, rounded.to(found.dtype)) for rounded in self._round(x)
            ):
                wrong.append(name)
        self.dense = dense / total if total else 1.0
        if wrong:
            problems.append(f"weights: {', '.join(wrong[:3])} ({len(wrong)})")
        return problems

    def _round(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the rounded values of a matrix, or of a stack of matrices in either order."""
        x = x.to(self._dtype)
        for matrices in (x, x.mT.contiguous())[: x.dim() - 1]:
            matrix = matrices.reshape(-1, matrices.shape[-1])
            if matrix.shape[-1] % (self._args.group_size or 1) == 0:
                params = find_params(matrix, self._args)
                codes = quantize(matrix, params, self._args)
                # compressed-tensors dequantizes in float32 what a model keeps in float32.
                for scale in (params.scale, params.scale.float()):
                    rounded = dequantize(codes, replace(params, scale=scale), self._args)
                    rounded = rounded.view_as(matrices)
                    yield rounded if matrices is x else rounded.mT.contiguous()


def _stack_experts(state: dict[str, Tensor], name: str) -> Tensor | None:
    """Return a stack of the layers that transformers has in its place in a quantized Llama 4."""
    layer, _, parameter = name.rpartition(".")
    layers = ["gate_proj", "up_proj"] if parameter == "gate_up_proj" else [parameter]
    experts = [
        torch.cat([state[f"{layer}.{i}.{x}.weight"] for x in layers]).T
        for i in range(len(state))
        if f"{layer}.{i}.{layers[0]}.weight" in state
    ]
    return torch.stack(experts) if experts else None


def _is_same_integer(found: Tensor, x: Tensor) -> bool:
    """Return True for a counter that only the loader of dense folders casts to a float."""
    return not found.is_floating_point() and same_bits(found.to(x.dtype), x)


def _names(keys) -> set[str]:
    return {key if isinstance(key, str) else key[0] for key in keys}
