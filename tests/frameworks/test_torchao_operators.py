"""Operators on compressed weights: the table of the docs, compared with torchao."""

import copy
import io
import logging
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from compressed_weights import KINDS, dense_weight
from strategies import same_bits
from torch import Tensor
from torch.nn import functional

from slimtensors.errors import UnsupportedOperationError
from slimtensors.runtime import CompressedTensor, dispatch

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
X3 = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(2)).bfloat16().transpose(0, 1)
IDS = torch.tensor([[1, 5], [63, -2]])
BIAS = torch.arange(64).bfloat16()


def save_and_load(weight):
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def set_rows(weight):
    changed = weight.clone()
    changed[0:2] = weight[2:4]
    return changed


def copy_dense(weight):
    return weight.clone().copy_(torch.ones(64, 64).bfloat16())


def copy_into_dense(weight):
    return torch.zeros(64, 64).bfloat16().copy_(weight)


# Outcomes, by kind in the order of KINDS (int8, int8 dynamic, int4, float8, nvfp4, sparse int8,
# sparse, csr, coded): c compressed, d dense (the result is no weight), w dense with one warning,
# r refused.
OPERATORS = {
    "clone()": (torch.clone, "ccccccccc"),
    "detach(), data": (lambda w: w.detach().data, "ccccccccc"),
    "deepcopy": (copy.deepcopy, "ccccccccc"),
    "torch.save, torch.load": (save_and_load, "ccccccccc"),
    "pickle": (lambda w: pickle.loads(pickle.dumps(w)), "ccccccccc"),
    "requires_grad_()": (lambda w: w.requires_grad_(), "ccccccccc"),
    "contiguous()": (lambda w: w.contiguous(), "ccccccccc"),
    "cpu()": (lambda w: w.cpu(), "ccccccccc"),
    "to(dtype), float(), half()": (lambda w: w.float().to(torch.float16), "ccccccccc"),
    "double()": (lambda w: w.double(), "ccccccccc"),
    "to(int32)": (lambda w: w.to(torch.int32), "wwwwwwwww"),
    "t(), transpose, .T, mT": (lambda w: w.T.mT.transpose(0, 1).t().t(), "ccccccccc"),
    "t().contiguous()": (lambda w: w.t().contiguous(), "wwwwwwwww"),
    "view, reshape": (lambda w: w.view(-1).reshape(8, -1, 64), "ccccccccc"),
    "narrow(0), w[a:b]": (lambda w: w.narrow(0, 8, 40)[3:], "ccccccccw"),
    "narrow(1), w[:, a:b]": (lambda w: w.narrow(1, 32, 32), "ccccccccw"),
    "w[:, a:b] inside a group": (lambda w: w[:, 3:9], "ccwcwcccw"),
    "w.t()[a:b]": (lambda w: w.t()[32:], "ccccccccw"),
    "w[i], select(0)": (lambda w: w[5], "ddddddddd"),
    "w[:, i], select(1)": (lambda w: w[:, 5], "wwwwwwwww"),
    "w[tensor]": (lambda w: w[IDS], "ddddddddd"),
    "w[mask]": (lambda w: w[torch.arange(64) % 3 == 0], "wwwwwwwww"),
    "split, chunk": (lambda w: (*w.split(24), *w.chunk(2)), "ccccccccw"),
    "split, chunk of columns": (lambda w: (*w.split([32, 32], 1), *w.chunk(2, 1)), "ccccccccw"),
    "unbind": (lambda w: w.unbind(), "ddddddddd"),
    "cat": (lambda w: torch.cat([w, w[:16]]), "ccccccccw"),
    "cat of columns": (lambda w: torch.cat([w, w], 1), "ccccccccw"),
    "stack": (lambda w: torch.stack([w, w]), "wwwwwwwww"),
    "empty_like": (lambda w: torch.empty_like(w).zero_(), "ddddddddd"),
    "zeros_like": (torch.zeros_like, "ddddddddd"),
    "ones_like": (torch.ones_like, "ddddddddd"),
    "full_like": (lambda w: torch.full_like(w, 2), "ddddddddd"),
    "new_zeros(n), new_ones": (lambda w: (w.new_zeros(3), w.new_ones(64, 64)), "ddddddddd"),
    "copy_(same kind)": (lambda w: w.clone().copy_(w.clone()), "ccccccccc"),
    "copy_(dense)": (copy_dense, "rrrrrrrrr"),
    "dense.copy_(w)": (copy_into_dense, "ddddddddd"),
    "w[a:b] = w[c:d]": (set_rows, "cccccrrrr"),
    "mul_, add_, zero_": (lambda w: w.mul_(2), "rrrrrrrrr"),
    "torch.equal": (lambda w: torch.equal(w, w.clone()), "ddddddddd"),
    "allclose": (lambda w: w.allclose(w.clone()), "ddddddddd"),
    "F.linear": (lambda w: functional.linear(X, w, BIAS), "ddddddddd"),
    "x @ w.t(), matmul": (lambda w: (X @ w.t(), X[0] @ w.T, X3 @ w.mT), "ddddddddd"),
    "torch.mm(x, w.t())": (lambda w: torch.mm(X, w.t()), "ddddddddd"),
    "addmm(b, x, w.t())": (lambda w: torch.addmm(BIAS, X, w.t(), beta=2), "ddddddddd"),
    "w @ x, w.mv(x)": (lambda w: (w @ X.t(), w.mv(X[0])), "ddddddddd"),
    "x @ w, w.t() @ x": (lambda w: (X @ w, w.t() @ X.t()), "wwwwwwwww"),
    "F.linear(w, x)": (lambda w: functional.linear(w, X), "wwwwwwwww"),
    "F.linear(x, w.t())": (lambda w: functional.linear(X, w.t()), "wwwwwwwww"),
    "F.embedding": (lambda w: functional.embedding(IDS % 64, w), "ddddddddd"),
    "w + 1, w.sum(), abs, …": (lambda w: (w + 1, w.sum(), w.abs()), "wwwwwwwww"),
}

PRODUCTS = {name for name in OPERATORS if "@" in name or "mm(" in name or "linear" in name}
COMPATIBILITY = Path(__file__).parents[2] / "docs" / "compatibility.md"


def list_results(result):
    return list(result) if isinstance(result, tuple | list) else [result]


def observe(run, weight, caplog):
    """Return the results and the outcome of an operator."""
    caplog.clear()
    try:
        results = list_results(run(weight))
    except UnsupportedOperationError:
        return [], "r"
    reports = [record.getMessage() for record in caplog.records]
    assert len(reports) == len(set(reports))
    if any("computed on a dense copy" in report for report in reports):
        return results, "w"
    return results, "c" if isinstance(results[0], CompressedTensor) else "d"


def check_equal(found, expected, tolerance):
    if not isinstance(expected, Tensor):
        assert found == expected
        return
    dense = found.dequantize() if isinstance(found, CompressedTensor) else found
    assert found.shape == expected.shape
    assert found.dtype is expected.dtype
    assert not found.requires_grad
    if tolerance is None:
        assert same_bits(dense.contiguous(), expected.contiguous())
    else:
        torch.testing.assert_close(dense, expected, rtol=tolerance, atol=tolerance * 12)


@pytest.fixture(autouse=True)
def report_all(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_reported", set())
    caplog.set_level(logging.WARNING, "slimtensors")


def find_tolerance(name, kind):
    """Return the relative error that is allowed, or None if all bits must be equal."""
    if name in PRODUCTS:
        return 0.04 if kind == "int8 dynamic" else 0.02
    # Its scales are float32: values are not rounded to bfloat16 first.
    return 2**-8 if kind == "nvfp4" and name.startswith(("to(dtype)", "double")) else None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_is_correct_and_has_the_outcome_of_the_table(name, kind, mode, caplog):
    run, outcomes = OPERATORS[name]
    weight = KINDS[kind](dense_weight())
    dense = weight.dequantize()
    with mode():
        results, outcome = observe(run, weight, caplog)
        assert outcome == outcomes[list(KINDS).index(kind)]
        if outcome == "r":
            assert same_bits(weight.dequantize(), dense)
            return
        expected = list_results(run(dense))
    tolerance = find_tolerance(name, kind)
    for found, want in zip(results, expected, strict=True):
        check_equal(found, want, tolerance)
        if isinstance(found, CompressedTensor):
            found.check()


@pytest.mark.parametrize("kind", KINDS)
def test_shape_stride_and_dtype_are_those_of_the_dense_weight(kind):
    weight, dense = KINDS[kind](dense_weight(48)), dense_weight(48)
    for found, want in (
        (weight, dense),
        (weight.t(), dense.t()),
        (weight.view(-1), dense.view(-1)),
    ):
        assert found.shape == want.shape
        assert found.stride() == want.stride()
        assert found.numel() == want.numel()
        assert found.dtype is want.dtype
        assert found.is_contiguous() == want.is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_dense_computation_is_reported_once_per_operator_and_class(kind, caplog):
    weight, other = KINDS[kind](dense_weight()), KINDS[kind](dense_weight(seed=1))
    for _ in range(3):
        weight.abs(), other.abs(), weight.sum()
    name = type(weight).__name__
    assert [record.getMessage() for record in caplog.records] == [
        f"aten.abs.default: computed on a dense copy of {name} (reported once)",
        f"aten.sum.default: computed on a dense copy of {name} (reported once)",
    ]


INVALID = {
    "embedding of a negative index": lambda w: functional.embedding(torch.tensor([-1]), w),
    "embedding of a large index": lambda w: functional.embedding(torch.tensor([64]), w),
    "negative index": lambda w: w[torch.tensor([3, -65])],
    "select, dim": lambda w: w.select(2, 0),
    "select, index": lambda w: w.select(0, -65),
    "cat, dim": lambda w: torch.cat([w, w], 2),
    "cat, negative dim": lambda w: torch.cat([w, w], -3),
    "cat, shape": lambda w: torch.cat([w, w[:, :32]]),
    "transpose": lambda w: w.transpose(0, 3),
    "permute, one dim": lambda w: w.permute(0),
    "permute, same dim": lambda w: w.permute(1, 1),
    "narrow": lambda w: w.narrow(0, 60, 10),
    "split by 0": lambda w: w.split(0),
    "split by a negative size": lambda w: w.split(-1),
    "split by other sizes": lambda w: w.split([1, 2]),
    "view": lambda w: w.view(3, -1),
    "mm of 3 dimensions": lambda w: torch.mm(X3, w.t()),
    "mv of a matrix": lambda w: w.mv(X.t()),
    "addmm of 3 dimensions": lambda w: torch.addmm(BIAS, X3, w.t()),
    "addmm of a large bias": lambda w: torch.addmm(X3, X, w.t()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments_raise_the_errors_of_dense_weights(name, kind):
    weight = KINDS[kind](dense_weight())
    with pytest.raises((IndexError, RuntimeError)) as expected:
        INVALID[name](dense_weight())
    with pytest.raises(expected.type):
        INVALID[name](weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "run",
    [
        lambda w: functional.linear(input=X, weight=w, bias=BIAS),
        lambda w: torch.matmul(X, other=w.t()),
        lambda w: torch.mm(input=X, mat2=w.t()),
        lambda w: torch.mv(w, vec=X[0]),
        lambda w: torch.addmm(input=BIAS, mat1=X, mat2=w.t(), alpha=3),
        lambda w: torch.addmm(torch.full((64,), torch.nan).bfloat16(), X, w.t(), beta=0),
        lambda w: torch.addmm(BIAS, X, w.t(), out=torch.empty(3, 64).bfloat16()),
        lambda w: torch.mm(X, w.t(), out=torch.empty(3, 64).bfloat16()),
        lambda w: torch.allclose(input=w, other=w),
        lambda w: torch.vmap(lambda x: functional.linear(x, w))(X3),
    ],
)
def test_functions_accept_all_arguments_of_torch(run, kind):
    weight = KINDS[kind](dense_weight())
    with torch.no_grad():
        check_equal(run(weight), run(weight.dequantize()), 0.04)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64)])
def test_gradients_do_not_change_products(kind, shape):
    """Products with gradients used dense weights, and inputs that were not quantized."""
    weight = KINDS[kind](dense_weight(dtype=torch.float32))
    inputs = [torch.randn(shape), torch.randn(64)]
    with torch.no_grad():
        expected = functional.linear(inputs[0], weight, inputs[1])
    x, bias = (tensor.requires_grad_() for tensor in inputs)
    found = functional.linear(x, weight, bias)
    assert same_bits(found.detach(), expected)
    dense = functional.linear(x, weight.dequantize(), bias)
    grads = [torch.autograd.grad(out.square().sum(), (x, bias)) for out in (found, dense)]
    for mine, want in zip(*grads, strict=True):
        torch.testing.assert_close(mine, want, rtol=0.04, atol=2)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_a_product_with_a_transposed_weight_receive_gradients(kind):
    weight = KINDS[kind](dense_weight(dtype=torch.float32))
    x = torch.randn(3, 64, requires_grad=True)
    (x @ weight.t()).sum().backward()
    torch.testing.assert_close(x.grad[0], weight.dequantize().sum(0))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_casts_inputs_and_weights(kind):
    weight = KINDS[kind](dense_weight(dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        for run in (functional.linear, lambda x, w: x @ w.t()):
            check_equal(run(X.float(), weight), run(X.float(), weight.dequantize()), 0.04)


COLUMNS = {
    "int8, float8": ("int8", "int8 dynamic", "float8"),
    "int4, nvfp4": ("int4", "nvfp4"),
    "sparse int8": ("sparse int8",),
    "sparse, CSR": ("sparse", "csr"),
    "coded": ("coded",),
}
WORDS = {"c": "compressed", "d": "dense", "w": "dense, warns", "r": "refused"}


def read_table():
    """Return the table of operators in the docs, as cells by operator and heading."""
    section = COMPATIBILITY.read_text().split("\n## torchao")[1].split("\n## ")[0]
    lines = section.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    first = next(i for i, row in enumerate(rows) if row[0] == "operator")
    headings = rows[first][1:]
    table = [row for row in rows[first + 2 :] if len(row) == len(headings) + 1]
    return {row[0].strip("`"): dict(zip(headings, row[1:], strict=True)) for row in table}


def test_table_in_the_docs_is_this_one():
    table = read_table()
    for row in table.values():
        row.pop("torchao")
    expected = {}
    for name, (_, outcomes) in OPERATORS.items():
        by_kind = dict(zip(KINDS, outcomes, strict=True))
        expected[name] = {}
        for heading, kinds in COLUMNS.items():
            (outcome,) = {by_kind[kind] for kind in kinds}
            expected[name][heading] = WORDS[outcome]
    assert table == expected


@pytest.fixture(scope="module")
def torchao_weights():
    """Return weights of torchao that correspond to ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's own imports
        q = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    configs = {
        "int8": q.Int8WeightOnlyConfig(),
        "int8 dynamic": q.Int8DynamicActivationInt8WeightConfig(),
        "int4": q.IntxWeightOnlyConfig(torch.int4, q.PerGroup(32)),
        "float8": q.Float8WeightOnlyConfig(),
    }
    weights = {}
    for kind, config in configs.items():
        layer = torch.nn.Linear(64, 64, bias=False).bfloat16()
        layer.weight.data = dense_weight()
        q.quantize_(layer, config)
        weights[kind] = layer.weight.data
    return weights


@pytest.mark.interop
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_that_torchao_supports_are_supported(name, torchao_weights, caplog):
    run, _ = OPERATORS[name]
    outcomes = {}
    for kind, theirs in torchao_weights.items():
        try:
            result = list_results(run(theirs))[0]
        except Exception:
            continue
        found, outcome = observe(run, KINDS[kind](dense_weight()), caplog)
        assert outcome != "r"
        is_same_dtype = getattr(result, "dtype", None) == getattr(found[0], "dtype", None)
        outcomes[kind] = "works" if is_same_dtype else "wrong dtype"
    if "wrong dtype" in outcomes.values():
        cell = "wrong dtype"
    elif len(outcomes) == len(torchao_weights):
        cell = "works"
    else:
        cell = ", ".join(outcomes) or "raises"
    assert read_table()[name]["torchao"] == cell
