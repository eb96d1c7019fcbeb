"""States with values that are not tensors."""

import json
import logging
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from datetime import timedelta
from enum import Enum, IntEnum, StrEnum
from pathlib import PurePosixPath
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from strategies import same_bits
from torch import nn

import slimtensors
from slimtensors.archive.tree import flatten, outline_version, unflatten
from slimtensors.errors import CorruptFileError, UnsupportedTensorError

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float32, torch.qint8, torch.Size([2, 3]), torch.device("cpu")])
)
keys = st.text(st.characters(exclude_categories=["Cs"])) | st.integers() | st.booleans()
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
    ),
    max_leaves=12,
)


def through_json(state):
    tensors, outline = flatten(state)
    return unflatten(json.loads(json.dumps(outline)), tensors)


@given(state=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), trees, min_size=1))
def test_states_round_trip_with_every_type(state):
    back = through_json(state)
    assert repr(back) == repr(state)  # unlike ==, it tells True from 1 and -0.0 from 0.0


def test_numbers_that_json_does_not_support_round_trip():
    state = {"a": float("nan"), "b": float("inf"), "c": [-0.0], "d": 2**200}
    assert repr(through_json(state)) == repr(state)


def test_tensor_names_are_their_paths():
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    state = {"x": x, "packed": (y, None), "deep": {"er": [z]}, "step": 3}
    tensors, outline = flatten(state)
    assert list(tensors) == ["x", "packed.0", "deep.er.0"]
    back = unflatten(outline, tensors)
    assert back["packed"] == (y, None)
    assert back["deep"]["er"][0] is z


def test_tensor_names_are_unique():
    x, y = torch.ones(1), torch.zeros(1)
    tensors, outline = flatten({"a": {"b": x}, "a.b": y})
    back = unflatten(outline, tensors)
    assert back["a"]["b"] is x
    assert back["a.b"] is y


def test_numpy_arrays_and_scalars_round_trip():
    state = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.float32(1.5), "c": 0}
    back = through_json(state)
    assert type(back["a"]) is np.ndarray
    assert (back["a"] == state["a"]).all()
    assert type(back["b"]) is np.float32


native = npst.boolean_dtypes() | npst.integer_dtypes() | npst.unsigned_integer_dtypes()
numpy_dtypes = (
    native
    | npst.floating_dtypes(sizes=(16, 32, 64), endianness="?")
    | npst.complex_number_dtypes(sizes=(64, 128), endianness="?")
    | npst.integer_dtypes(endianness=">")
    | npst.datetime64_dtypes(endianness="?")
    | npst.timedelta64_dtypes(endianness="?")
)
numpy_arrays = numpy_dtypes.flatmap(lambda d: npst.arrays(d, npst.array_shapes(min_dims=0)))


def same_arrays(a, b):
    """Return True if two arrays or scalars agree in type, dtype, shape and bytes."""
    is_same = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
    return is_same and a.tobytes() == b.tobytes()


@given(array=numpy_arrays)
def test_every_numpy_array_keeps_type_dtype_shape_and_bits(array):
    back = through_json({"a": array, "t": array.T, "n": 1})
    assert same_arrays(back["a"], array)
    assert same_arrays(back["t"], array.T)


@given(dtype=numpy_dtypes, data=st.data())
def test_every_numpy_scalar_keeps_its_type_and_bits(dtype, data):
    value = data.draw(npst.arrays(dtype, ()))[()]
    assert same_arrays(through_json({"a": value})["a"], value)


@pytest.mark.parametrize(
    "value",
    [
        np.array(3.5),
        np.array([], dtype=">f4"),
        np.array([[1, 2]], dtype="<M8[25s]"),
        np.broadcast_to(np.arange(3), (2, 3)),
        np.arange(6)[::-2],
        np.str_("text"),
        np.bytes_(b"\0x\0"),
        np.bool_(True),
        np.complex128(1 - 2j),
        np.float64("nan"),
        np.datetime64("2020-01-01"),
        np.timedelta64(3, "h"),
    ],
    ids=str,
)
def test_numpy_values_that_resemble_others_keep_their_type(value):
    assert same_arrays(through_json({"a": {"b": value}})["a"]["b"], value)


def test_numbers_that_are_too_long_for_json_round_trip():
    for number in (10**5000, -(10**5000), 2**2000, 2**2000 - 1):
        assert through_json({"a": number, number: 1}) == {"a": number, number: 1}


def test_parameters_and_leaf_tensors_keep_their_class_and_gradient_flag(tmp_path):
    weight = nn.Parameter(torch.randn(3))
    state = {
        "a": {"weight": weight, "again": weight, "plain": weight.detach()},
        "frozen": nn.Parameter(torch.arange(3), requires_grad=False),
        "leaf": torch.randn(2, requires_grad=True),
        "result": torch.randn(2, requires_grad=True) * 2,
        "n": 1,
    }
    slimtensors.save(state, tmp_path / "x")
    back = slimtensors.load(tmp_path / "x")
    assert type(back["a"]["weight"]) is type(back["frozen"]) is nn.Parameter
    assert back["a"]["weight"] is back["a"]["again"]
    assert back["a"]["weight"].data_ptr() == back["a"]["plain"].data_ptr()
    assert type(back["a"]["plain"]) is torch.Tensor
    flags = [back[name].requires_grad for name in ("frozen", "leaf", "result")]
    assert flags == [False, True, False]
    assert back["leaf"].is_leaf
    assert same_bits(back["a"]["weight"].detach(), weight.detach())


def test_default_dicts_keep_their_factory():
    state = {"a": defaultdict(dict, {3: {"x": 1}}), "b": defaultdict(None), "c": defaultdict(int)}
    back = through_json(state)
    assert repr(back) == repr(state)
    assert back["c"][1] == 0


def test_deques_and_sets_round_trip():
    state = {"a": deque([1, (2, None)]), "b": deque([1], maxlen=3), "c": deque(maxlen=0)}
    state |= {"d": {"x", 1, 2.5, (1, "y")}, "e": frozenset([1, frozenset()]), "f": set()}
    back = through_json(state)
    assert back == state
    assert [back[name].maxlen for name in "abc"] == [None, 3, 0]
    assert [type(back[name]) for name in "def"] == [set, frozenset, set]


def test_equal_sets_give_equal_outlines():
    a, b = set([0, 8]), set([8, 0])  # noqa: C405
    assert list(a) != list(b)  # equal remainders: the order of insertion decides
    assert flatten({"a": a})[1] == flatten({"a": b})[1]


def strided(*shape):
    return torch.arange(torch.Size(shape).numel()).float().reshape(shape)


@pytest.mark.parametrize(
    "x",
    [
        strided(2, 3, 4, 5).to(memory_format=torch.channels_last),
        strided(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
        strided(6, 4, 1, 1).to(memory_format=torch.channels_last),
        strided(1, 4, 3, 3).to(memory_format=torch.channels_last),
        strided(3, 4).t(),
        strided(2, 3, 4).permute(2, 0, 1),
        strided(2, 1, 4).permute(2, 1, 0),
        strided(5, 1),
        strided(3, 4).to(torch.float8_e5m2).t(),
        strided(3, 4).to(torch.complex64).t().conj(),
    ],
    ids=lambda x: f"{list(x.stride())}",
)
def test_tensors_of_a_state_keep_their_strides(tmp_path, x):
    state = {"a": {"x": x, "again": x}, "parameter": nn.Parameter(x, False), "n": 1}
    slimtensors.save(state, tmp_path / "x")
    back = slimtensors.load(tmp_path / "x")
    assert back["a"]["again"] is back["a"]["x"]
    for y in (back["a"]["x"], back["parameter"]):
        assert y.stride() == x.stride()
        assert same_bits(y.detach(), x.resolve_conj())


@pytest.mark.parametrize(
    "x",
    [
        strided(4, 6)[:, ::2],
        strided(4, 6)[:, :3].t(),
        strided(4).expand(3, 4),
        strided(12).as_strided((3, 4), (2, 1)),
        torch.zeros(0, 3).t(),
    ],
    ids=lambda x: f"{list(x.stride())}",
)
def test_tensors_with_gaps_or_overlaps_become_contiguous(tmp_path, x):
    slimtensors.save({"a": {"x": x}}, tmp_path / "x")
    back = slimtensors.load(tmp_path / "x")["a"]["x"]
    assert back.is_contiguous()
    assert same_bits(back, x.contiguous())


class Mode(StrEnum):
    FAST = "fast"


class Level(IntEnum):
    HIGH = 3


Point = namedtuple("Point", "x y")


def test_values_without_their_class_are_stored_with_one_warning(caplog):
    state = {
        "args": {"mode": Mode.FAST, "other": Mode.FAST, "level": Level.HIGH, "color": Color.RED},
        "points": [Point(1, i) for i in range(5)],
        "text": Text("words"),
        "keys": {Mode.FAST: 1},
    }
    with caplog.at_level(logging.WARNING):
        back = through_json(state)
        through_json(state)
    args = {"mode": "fast", "other": "fast", "level": 3, "color": 1}
    points = [(1, i) for i in range(5)]
    assert back == {"args": args, "points": points, "text": "words", "keys": {"fast": 1}}
    assert {type(value) for value in back["args"].values()} == {str, int}
    assert type(back["text"]) is str
    assert type(back["points"][0]) is tuple
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "args.mode and 2 more: stored as a plain str",
        "args.level: stored as a plain int",
        "args.color: stored as a plain int",
        "points.0 and 4 more: stored as a plain tuple",
        "text: stored as a plain str",
    ]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_packed_quantized_tensors_raise_with_their_path(tmp_path):
    x = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint4x2)
    with pytest.raises(UnsupportedTensorError, match=r"^a\.b: .*store x\.dequantize"):
        slimtensors.save({"a": {"b": x}}, tmp_path / "x")


def test_only_states_with_new_types_need_the_new_version(tmp_path):
    x = torch.ones(2)
    old = {"x": x, "a": [1, (2.5, None)], "b": OrderedDict(c=np.arange(3)), "d": np.float32(1)}
    assert outline_version(flatten(old)[1]) == 1
    news = [nn.Parameter(x), np.str_("x"), defaultdict(int), 10**5000, np.array([1], ">i4")]
    news += [deque([1]), {1}, frozenset([1]), torch.ones(2, 3).t()]
    newest = [range(3), PurePosixPath("x"), bytearray(b"x"), bytes(70_000), {timedelta(1): 2}]
    for value in (*news, *newest):
        version = 2 if any(value is new for new in news) else 3
        assert outline_version(flatten({"a": [value]})[1]) == version
        slimtensors.save({"a": [value], "shared": x, "same": x.clone()}, tmp_path / "x")
        header = (tmp_path / "x").read_bytes()
        assert b'\\"version\\":%d' % version in header


def test_the_metadata_of_a_module_round_trips(tmp_path):
    state = torch.nn.BatchNorm1d(3).state_dict()
    state["extra"] = ("words", 1)
    slimtensors.save(state, tmp_path / "x")
    back = slimtensors.load(tmp_path / "x")
    assert type(back) is OrderedDict
    assert back._metadata == state._metadata
    assert back["extra"] == ("words", 1)
    assert same_bits(back["running_var"], state["running_var"])


class Text(str):
    pass


class Number(int):
    pass


class Real(float):
    pass


class Table(dict):
    pass


class Row(tuple):
    __slots__ = ()


class Color(Enum):
    RED = 1
    ANY = object()


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: 0,
        type,
        Number(3),
        Real(3),
        Table(a=1),
        Row((1, 2)),
        UserDict(a=1),
        MappingProxyType({"a": 1}),
        defaultdict(lambda: 3),
        Color.ANY,
        {Color.RED: 1, 1: 2},
        {Color.RED, 1},
        torch.quint4x2,
        torch.strided,
        torch.return_types.max((torch.ones(2), torch.ones(2))),
        np.array(["text"]),
        np.array([b"text"]),
        np.array([None]),
        np.array([(1, 2.0)], dtype="i4,f8"),
        np.array([(1, 2.0)], dtype="i4,f8")[0],
        np.array([1, 2], dtype=np.longdouble),
        np.longdouble(1),
        np.clongdouble(1),
        np.ma.masked_array([1, 2], mask=[True, False]),
        np.rec.array([(1, 2.0)], dtype="i4,f8"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_need_pickle_raise_with_their_path(tmp_path, value):
    with pytest.raises(UnsupportedTensorError, match=r"^state\.inner\.0: "):
        slimtensors.save({"state": {"inner": [value]}, "x": torch.ones(2)}, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_recursive_states_raise():
    state = {"a": []}
    state["a"].append(state["a"])
    with pytest.raises(UnsupportedTensorError, match="nested"):
        flatten(state)


@pytest.mark.parametrize(
    "outline",
    [
        {"tensor": "nowhere"},
        {"dict": [["a"]]},
        {"dict": 3},
        {"unknown": 1},
        {"dtype": "nope"},
        {"bytes": "?"},
        {"device": "moon"},
        {"size": ["x"]},
        {"int": "x"},
        {"array": "x", "dtype": "O"},
        {"array": "x", "dtype": "<f8"},
        {"array": "x", "dtype": 3},
        {"parameter": "x"},
        {"parameter": "x", "requires_grad": True},
        {"defaultdict": ["open", []]},
        {"defaultdict": [[], []]},
        {"numpy_bytes": "?"},
        {"tensor": "x", "order": [1]},
        {"tensor": "x", "order": [0, 0]},
        {"tensor": "x", "order": "0"},
        {"tensor": "x", "order": [None]},
        {"deque": [], "maxlen": -1},
        {"deque": [], "maxlen": 10**30},
        {"deque": [], "maxlen": "1"},
        {"set": [{"list": []}]},
        {"set": 1},
        {"range": [1, 2]},
        {"range": [0, 1, 0]},
        {"range": [0, 1.5, 1]},
        {"slice": [1]},
        {"path": ["PosixPath", 1]},
        {"path": ["Popen", "x"]},
        {"uuid": "0"},
        {"decimal": "one"},
        {"fraction": [1, 0]},
        {"fraction": [1, "x"]},
        {"bytes": 1},
        {"bytes": {"tensor": "x"}},
        {"bytes": {"tensor": "nowhere"}},
        {"bytearray": "?"},
        {"bytesio": ""},
        {"bytesio": "", "position": -1},
        {"bytesio": "", "position": 1e300},
        {"datetime": "2020-13-01T00:00:00"},
        {"datetime": "2020-01-01T00:00:00", "fold": 2},
        {"datetime": "2020-01-01T00:00:00", "zone": 1},
        {"datetime": "2020-01-01T00:00:00+01:00"},
        {"date": "yesterday"},
        {"time": "25:00"},
        {"timedelta": [10**12, 0, 0]},
        {"timedelta": [1]},
        {"timezone": [2, 0, 0]},
        {"timezone": [0, 0, 0, 1]},
        {"zoneinfo": "../../etc/passwd"},
        {"zoneinfo": "os/path"},
        {"namespace": [[1, 2]]},
        {"simple_namespace": [["a"]]},
        {"dictconfig": [["a"]]},
        {"dictconfig": [["a", "${"]]},
        {"dictconfig": 3},
        {"listconfig": "text"},
        {"listconfig": [{"dtype": "float32"}, {"unknown": 1}]},
        {"attribute_dict": [[{"list": []}, 1]]},
        {},
        [],
    ],
)
def test_a_malformed_outline_is_a_corrupt_file_error(outline):
    with pytest.raises(CorruptFileError):
        unflatten({"dict": [["a", outline]]}, {"x": torch.ones(2, dtype=torch.int32)})


def test_a_state_round_trips_through_shards_and_a_second_save(tmp_path):
    state = {f"w{i}": torch.randn(64, 64) for i in range(6)} | {"step": 7, "betas": (0.9, 0.999)}
    slimtensors.save(state, tmp_path / "a", max_shard_size="40kB")
    slimtensors.save(slimtensors.open(tmp_path / "a"), tmp_path / "b.safetensors")
    for path in ("a", "b.safetensors"):
        back = slimtensors.load(tmp_path / path)
        assert list(back) == list(state)
        assert back["betas"] == (0.9, 0.999)
        assert same_bits(back["w3"], state["w3"])


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": {"note": "x\ud800"}}, r"a\.note: text is not valid Unicode: 'x\\ud800'"),
        ({"a": {"x\ud800": 3}}, r"a\.key: text is not valid Unicode: 'x\\ud800'"),
        ({"a": {"x\ud800": torch.ones(3)}}, r"a\.key: text is not valid Unicode: 'x\\ud800'"),
        ({"x\ud800": torch.ones(3)}, r"tensor name is not valid Unicode: 'x\\ud800'"),
    ],
)
def test_invalid_unicode_raises_with_its_path(tmp_path, state, where):
    with pytest.raises(UnsupportedTensorError, match=where):
        slimtensors.save(state, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
