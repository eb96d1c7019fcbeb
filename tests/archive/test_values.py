"""Values of many types in a state: each comes back equal, or is refused with its path."""

import array
import collections
import dataclasses
import datetime
import decimal
import fractions
import pathlib
import random
import types
import uuid

import numpy as np
import pytest
import torch
from torch import nn

import slimtensors
from slimtensors.errors import UnsupportedTensorError
from slimtensors.tensor import bitwise_equal


@dataclasses.dataclass
class Record:
    x: int = 1


def derive(base, *args):
    """Return an instance of a subclass."""
    return type(f"Odd{base.__name__}", (base,), {})(*args)


BUILTINS = [
    *(0, -1, True, None, 2**63, -(2**64), 10**5000, 1.5, -0.0, float("nan"), 1e308, 5e-324),
    *(1 + 2j, complex("nan"), b"", b"\xff", "", "é\0\n", "\U0001f600"),
    *((), [], {}, set(), frozenset(), (1,), ((),), {1: {2: 3}}, {1, 2}, frozenset([(1, "x")])),
    {None: 1, True: 2, 2.5: 3, "x": 4, (1, 2): 5, b"k": 6, 3 + 0j: 7},
    collections.OrderedDict(a=1, b=2),
    collections.Counter("aab"),
    collections.defaultdict(list, {1: [2]}),
    collections.deque([1, 2], maxlen=3),
]
OTHERS = [
    *(bytearray(b"a"), memoryview(b"a"), range(3), slice(1, 2), Ellipsis, int, lambda: 0, Record()),
    *(derive(list, [1]), derive(dict, {1: 2}), derive(tuple, (1,)), derive(set, [1])),
    *(derive(int, 1), derive(float, 1.5), derive(bytes, b"x"), derive(complex, 1j)),
    *(derive(collections.OrderedDict), derive(collections.Counter), derive(collections.deque)),
    *(collections.ChainMap({1: 2}), collections.UserList([1]), collections.UserDict(a=1)),
    *(types.SimpleNamespace(a=1), types.MappingProxyType({1: 2}), array.array("i", [1])),
    *(decimal.Decimal("1.1"), fractions.Fraction(1, 3), pathlib.Path("x"), uuid.UUID(int=1)),
    *(datetime.datetime(2020, 1, 1), datetime.timedelta(1), random.Random(1)),
]
NUMPY = [
    *(kind(1) for kind in (np.int8, np.int16, np.int32, np.int64, np.intc, np.float16)),
    *(kind(1) for kind in (np.uint8, np.uint16, np.uint32, np.uint64, np.float32, np.float64)),
    *(kind(1) for kind in (np.complex64, np.complex128, np.bool_, np.longdouble, np.clongdouble)),
    *(
        np.str_("x"),
        np.bytes_(b"x"),
        np.void(b"abc"),
        np.datetime64("NaT", "s"),
        np.timedelta64(1, "D"),
    ),
    *(np.array(1), np.array([]), np.zeros((0, 3)), np.zeros((2, 0, 3), ">i2"), np.array("x")),
    *(np.asfortranarray(np.ones((2, 3))), np.arange(6)[::-1], np.array([1], np.ulonglong)),
    *(np.arange(3).astype("U"), np.array([1, None]), np.array([1 + 1j], ">c8")),
    *(np.array(["2020"], "M8[D]"), np.ma.array([1, 2]), np.rec.array([(1,)], dtype=[("a", "i4")])),
    *(np.random.default_rng(1), np.random.default_rng(1).bit_generator.state, np.dtype("f4")),
]
TORCH = [
    *(torch.ones(()), torch.empty(0), torch.empty(2, 0), torch.ones(2, 3).t(), torch.ones(4)[::2]),
    *(torch.ones(1).expand(4), torch.ones(2, dtype=torch.complex64).conj()),
    *(nn.Parameter(torch.ones(2)), nn.Parameter(torch.arange(2), requires_grad=False)),
    *(torch.ones(2, requires_grad=True), torch.ones(2).to(torch.float8_e4m3fn)),
    *(torch.eye(2).to_sparse(), torch.ones(2, device="meta"), nn.Linear(1, 1)),
    *(torch.float32, torch.quint4x2, torch.Size([1, 2]), torch.device("cuda:3"), torch.strided),
    *(torch.channels_last, torch.Generator(), torch.finfo(torch.float32)),
    torch.return_types.sort((torch.ones(1), torch.ones(1))),
    nn.parameter.UninitializedParameter(),
]


def same(a, b):
    """Return True if two values agree in type, dtype, shape and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        x, y = (v.detach().resolve_conj() for v in (a, b))
        return a.requires_grad == b.requires_grad and bitwise_equal(x, y)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b if isinstance(a, int) else repr(a) == repr(b)


@pytest.mark.parametrize(
    "value", [*BUILTINS, *OTHERS, *NUMPY, *TORCH], ids=lambda value: type(value).__name__
)
def test_a_value_comes_back_equal_or_is_refused_with_its_path(tmp_path, caplog, value):
    try:
        slimtensors.save({"state": {"inner": value}, "n": 1}, tmp_path / "x")
    except UnsupportedTensorError as error:
        assert str(error).startswith("state.inner")  # noqa: PT017
        assert not any(value is known for known in BUILTINS)
        assert list(tmp_path.iterdir()) == []
    else:
        assert same(slimtensors.load(tmp_path / "x")["state"]["inner"], value)
        assert not any(value is known for known in OTHERS)
    assert caplog.text == ""
