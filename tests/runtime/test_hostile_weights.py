"""Hostile files of `torch.save`: `rebuild` is a safe global and gets whatever they contain."""

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability_tools import run_program
from strategies import same_bits
from torch import Tensor, nn

from slimtensors.errors import CorruptFileError, FormatError
from slimtensors.quantization import QuantizationArgs
from slimtensors.runtime import (
    CompressedTensor,
    CsrTensor,
    QuantizedConfig,
    QuantizedTensor,
    SparseTensor,
    coded_weight,
    float8_weight_only,
    int4_weight_only,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    rebuild,
    rebuild_pickled,
    sparse_int8_weight,
)

pytestmark = [
    pytest.mark.hostile,
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),  # deprecated, still in files
]

USE_WEIGHTS = Path(__file__).parent / "programs" / "use_weights.py"
HUGE = 1 << 30


def matrix() -> Tensor:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(48, 64, generator=random)
    return torch.where(torch.rand(48, 64, generator=random) < 0.1, x, 0.0).bfloat16()


def mxfp4(weight: Tensor) -> CompressedTensor:
    args = QuantizationArgs(4, "float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    return QuantizedTensor.quantize(weight, QuantizedConfig(args))


KINDS: dict[str, Callable[[Tensor], CompressedTensor]] = {
    "csr": CsrTensor.from_dense,
    "sparse": SparseTensor.from_dense,
    "int8": int8_weight_only(),
    "int4": int4_weight_only(group_size=32),
    "int8 dynamic": int8_dynamic_activation_int8_weight(),
    "float8": float8_weight_only(),
    "mxfp4": mxfp4,
    "sparse int8": sparse_int8_weight(),
    "coded": coded_weight(),
    "coded sparse": coded_weight("sparse"),
    "transposed": lambda weight: CsrTensor.from_dense(weight).t(),
    "flat": lambda weight: int4_weight_only(group_size=32)(weight).view(-1),
}


class Call:
    """Pickled as a call of a function, as a forged file contains it."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def forge(form: object, leaves: object) -> Call:
    return Call(rebuild, form if isinstance(form, str) else json.dumps(form), leaves)


def change_leaf(x: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield replacements of a part that no writer makes."""
    yield "empty", x.new_empty(0)
    yield "stride 0", torch.zeros(1, dtype=x.dtype).as_strided(x.shape, [0] * x.dim())
    sizes = (HUGE, *x.shape[1:])
    yield "huge", torch.zeros(1, dtype=x.dtype).as_strided(sizes, [0] * len(sizes))
    yield "one row less", x[:-1].clone() if x.dim() else x.new_empty(0)
    yield "one more dimension", x[None].clone()
    yield "other dtype", torch.zeros(x.shape, dtype=torch.float64)
    yield "other width", torch.zeros(x.shape, dtype=torch.complex64)
    yield "bool", torch.zeros(x.shape, dtype=torch.bool)
    yield "sparse layout", torch.zeros(x.shape).to_sparse()
    yield "quantized", torch.quantize_per_tensor(torch.zeros(x.shape), 1.0, 0, torch.qint8)
    yield "list", [1, 2, 3]
    yield "none", None
    if x.dtype in (torch.int32, torch.int64, torch.uint8, torch.uint32):
        yield "ones", torch.full_like(x, 255 if x.dtype is torch.uint8 else 2**31 - 1)
    if x.dtype in (torch.int32, torch.int64):
        yield "negative", torch.full_like(x, -(2**31))
    if x.is_floating_point() and x.element_size() > 1:
        yield "nan", torch.full_like(x, float("nan"))


STRANGE = [None, True, -1, 1.5, 2**63, "x", [], {}, [2**40, 2**40]]


def change_form(form: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in form:
        yield f"without {key}", {k: v for k, v in form.items() if k != key}
        for value in STRANGE:
            yield f"{key}={str(value)[:20]}", {**form, key: value}
    for key, value in form["config"].items():
        for other in STRANGE:
            yield f"config {key}={str(other)[:20]}", {**form, "config": {key: other}}
        if isinstance(value, dict):
            for name in value:
                for other in STRANGE:
                    config = {**form["config"], key: {**value, name: other}}
                    yield f"config {key}.{name}={str(other)[:20]}", {**form, "config": config}
    for shape in ([], [0], [48], [64, 48], [47, 64], [48, 65], [1, 48, 64], [2**20, 2**20]):
        yield f"shape {shape}", {**form, "shape": shape}
    for dtype in (
        "float64",
        "int8",
        "complex64",
        "qint8",
        "bool",
        "float8_e4m3fn",
        "float4_e2m1fn_x2",
    ):
        yield f"dtype {dtype}", {**form, "dtype": dtype}
    for kind in KINDS.values():
        yield "other kind", {**kind(matrix()).form()}
    yield "nested", {**form, "inner": {"codes": form, "starts": form, "leaf0": form}}
    for part in ("codes", "base"):
        deep: dict[str, Any] = form
        for _ in range(200):
            deep = {**form, "inner": {part: deep}}
        yield f"deep {part}", deep
    yield "not JSON", "{"
    yield "deeper", "[" * 100_000
    yield "text", '"x"'


def hostile_files(kind: str) -> Iterator[tuple[str, object]]:
    weight = KINDS[kind](matrix())
    form, leaves = weight.form(), dict(weight.leaves())
    for name, leaf in leaves.items():
        for what, other in change_leaf(leaf):
            yield f"{name} {what}", forge(form, {**leaves, name: other})
        yield f"without {name}", forge(form, {k: v for k, v in leaves.items() if k != name})
        evil = torch.zeros(1, dtype=leaf.dtype).as_strided(leaf.shape, [0] * leaf.dim())
        arguments = (weight, False, {}, {name.split(".")[0]: evil})
        yield f"{name} set later", Call(torch._utils._rebuild_parameter_with_state, *arguments)
        state = {"__dict__": {name: evil}}
        arguments = (weight, False, {}, state)
        yield f"{name} in dict", Call(torch._utils._rebuild_parameter_with_state, *arguments)
        other_type = (rebuild, Tensor, (json.dumps(form), leaves), {name.split(".")[0]: evil})
        yield f"{name} as type", Call(torch._tensor._rebuild_from_type_v2, *other_type)
    if "dynamic" in kind or kind == "float8":
        return  # the form is that of int8
    yield "more leaves", forge(form, {**leaves, "more": torch.zeros(2)})
    yield "leaves in a list", forge(form, list(leaves.values()))
    for what, changed in change_form(form):
        yield what, forge(changed, leaves)


def save(folder: Path, content: object) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.pt"
    torch.save({"w": content}, path)
    return path


def use_weights(paths: list[Path]) -> list[str]:
    """Load and use files in a child process, which a crash would end."""
    text = json.dumps([str(path) for path in paths])
    output = run_program(USE_WEIGHTS, input=text, timeout=100)
    return [json.loads(line) for line in output.splitlines()]


def test_hostile_files_give_a_format_error_or_a_usable_weight(tmp_path):
    files = {f"{kind}: {what}": x for kind in KINDS for what, x in hostile_files(kind)}
    outcomes = use_weights([save(tmp_path, content) for content in files.values()])
    found = dict(zip(files, outcomes, strict=True))
    bad = {k: v for k, v in found.items() if v != "used" and not v.startswith("SlimError")}
    assert bad == {}


def test_parts_with_stride_zero_are_refused():
    """Row pointers of stride 0 passed the check of their ends and were read out of bounds."""
    weight = CsrTensor.from_dense(matrix())
    leaves = dict(weight.leaves())
    for name in leaves:
        flat = torch.zeros(1, dtype=leaves[name].dtype).as_strided(leaves[name].shape, (0,))
        with pytest.raises(CorruptFileError, match=name):
            rebuild(json.dumps(weight.form()), {**leaves, name: flat})


@pytest.mark.parametrize("dtypes", [{"codes": torch.complex64}, {"x": torch.int8}, {"codes": 1}, 1])
def test_dtypes_of_a_pickle_must_fit(dtypes):
    weight = float8_weight_only()(matrix())
    leaves = {name: leaf.view(torch.uint8) for name, leaf in weight.leaves()}
    with pytest.raises(CorruptFileError):
        rebuild_pickled(json.dumps(weight.form()), leaves, dtypes, False)


def test_a_part_that_changes_after_the_check_has_no_effect():
    weight = CsrTensor.from_dense(matrix())
    form, leaves = json.dumps(weight.form()), dict(weight.leaves())
    starts = leaves["starts"].clone()
    loaded = rebuild(form, {**leaves, "starts": starts})
    starts.fill_(2**31 - 1)
    starts.set_(torch.zeros(1, dtype=torch.int32))
    assert same_bits(loaded.dequantize(), weight.dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_loaded_weight_cannot_be_replaced(kind):
    weight = KINDS[kind](matrix())
    name = weight.part_names[0]
    with pytest.raises(FormatError, match=name):
        setattr(weight, name, torch.zeros(1))
    with pytest.raises(FormatError, match="__dict__"):
        weight.__dict__ = {name: torch.zeros(1)}
    with pytest.raises(FormatError, match="no state"):
        weight.__setstate__({})


@pytest.mark.parametrize("kind", KINDS)
def test_slices_and_parameters_still_load(kind, tmp_path):
    weight = KINDS[kind](matrix())
    torch.save([weight, nn.Parameter(weight, requires_grad=False)], tmp_path / "w.pt")
    for loaded in torch.load(tmp_path / "w.pt", weights_only=True):
        assert same_bits(loaded.dequantize(), weight.dequantize())
    if isinstance(rows := weight[::3], CompressedTensor):
        torch.save(rows, tmp_path / "rows.pt")
        loaded = torch.load(tmp_path / "rows.pt", weights_only=True)
        assert same_bits(loaded.dequantize(), rows.dequantize())


def test_torch_names_the_module_to_import(tmp_path):
    """The name in the file is all that a process without this package can show."""
    torch.save(CsrTensor.from_dense(matrix()), tmp_path / "w.pt")
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with pytest.raises(pickle.UnpicklingError, match=r"GLOBAL slimtensors\.runtime\.rebuild "):
            torch.load(tmp_path / "w.pt", weights_only=True)
    finally:
        torch.serialization.add_safe_globals(known)


def test_files_with_the_earlier_name_load(tmp_path, monkeypatch):
    weight = CsrTensor.from_dense(matrix())
    with monkeypatch.context() as patch:
        patch.setattr(rebuild, "__module__", "slimtensors.tensors.compressed")
        torch.save(weight, tmp_path / "w.pt")
    assert b"slimtensors.tensors.compressed" in (tmp_path / "w.pt").read_bytes()
    for weights_only in (True, False):
        loaded = torch.load(tmp_path / "w.pt", weights_only=weights_only)
        assert same_bits(loaded.dequantize(), weight.dequantize())


@pytest.mark.parametrize("kind", ["csr", "sparse", "sparse int8", "coded"])
def test_a_weight_of_another_size_is_not_copied_in_part(kind):
    """Row pointers of one matrix with the columns of another would be read out of bounds."""
    few, many = KINDS[kind](matrix() * (matrix() > 1)), KINDS[kind](matrix())
    expected = few.dequantize()
    with pytest.raises(NotImplementedError, match="copy_"):
        few.copy_(many)
    assert same_bits(few.dequantize(), expected)


def test_weights_can_be_swapped():
    one, two = CsrTensor.from_dense(matrix()), CsrTensor.from_dense(matrix() * 2)
    expected = two.dequantize()
    torch.utils.swap_tensors(one, two)
    assert same_bits(one.dequantize(), expected)
