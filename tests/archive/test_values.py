"""Values of many types in a state: each comes back equal, or is refused with its path."""

import argparse
import array
import collections
import dataclasses
import datetime
import decimal
import fractions
import io
import pathlib
import random
import re
import sys
import types
import uuid
import zoneinfo

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from omegaconf import DictConfig, ListConfig, OmegaConf
from reliability_tools import edit_manifest
from torch import nn

import slimtensors
from slimtensors.errors import MissingDependencyError, UnsupportedTensorError
from slimtensors.tensor import bitwise_equal


@dataclasses.dataclass
class Record:
    x: int = 1


def derive(base, *args):
    """Return an instance of a subclass."""
    return type(f"Odd{base.__name__}", (base,), {})(*args)


def closed_stream():
    stream = io.BytesIO(b"x")
    stream.close()
    return stream


UTC = datetime.UTC
EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30, microseconds=7))
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")

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
    *(memoryview(b"a"), Ellipsis, int, lambda: 0, Record()),
    *(derive(list, [1]), derive(dict, {1: 2}), derive(tuple, (1,)), derive(set, [1])),
    *(derive(int, 1), derive(float, 1.5), derive(bytes, b"x"), derive(complex, 1j)),
    *(derive(collections.OrderedDict), derive(collections.Counter), derive(collections.deque)),
    *(collections.ChainMap({1: 2}), collections.UserList([1]), collections.UserDict(a=1)),
    *(types.MappingProxyType({1: 2}), array.array("i", [1]), random.Random(1), closed_stream()),
    *(derive(bytearray, b"x"), derive(io.BytesIO), derive(argparse.Namespace), io.StringIO()),
    *(derive(datetime.date, 2020, 1, 1), derive(datetime.timedelta), derive(pathlib.PurePosixPath)),
    datetime.datetime(2020, 1, 1, tzinfo=derive(datetime.tzinfo)),
]
STANDARD = [
    *(range(3), range(10**30, -5, -2), slice(1, 2), slice(None), slice("a", (1,), 2.5)),
    *(bytearray(b""), bytearray(b"\xff"), bytes(range(256)) * 1000, bytearray(200_000)),
    *(pathlib.Path("a/b"), pathlib.PurePosixPath("/"), pathlib.PureWindowsPath("C:\\x\\é")),
    *(
        uuid.UUID(int=1),
        decimal.Decimal("-1.10"),
        decimal.Decimal("sNaN12"),
        decimal.Decimal("Inf"),
    ),
    *(fractions.Fraction(-1, 3), fractions.Fraction(10**700, 7)),
    *(datetime.datetime(2020, 1, 1), datetime.datetime(1, 1, 1, 1, 2, 3, 4, UTC)),
    *(datetime.datetime(2020, 10, 25, 2, 30, tzinfo=BERLIN, fold=1), datetime.datetime.max),
    *(datetime.date(2020, 2, 29), datetime.time(1, 2, 3, 4, EAST, fold=1), datetime.time()),
    *(datetime.timedelta(-1, 2, 3), datetime.timedelta.min, UTC, EAST, BERLIN),
    datetime.timezone(-datetime.timedelta(hours=3), "west"),
    *(argparse.Namespace(a=1, path=pathlib.Path("x")), types.SimpleNamespace(self=[1], b=())),
    {pathlib.PurePosixPath("x"): {uuid.UUID(int=2), datetime.date(2020, 1, 1)}, range(2): 1},
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
    if isinstance(a, set | frozenset):  # equal sets may iterate in another order
        return same(sorted(a, key=repr), sorted(b, key=repr))
    return a == b if isinstance(a, int) else repr(a) == repr(b)


@pytest.mark.parametrize(
    "value", [*BUILTINS, *STANDARD, *OTHERS, *NUMPY, *TORCH], ids=lambda value: type(value).__name__
)
def test_a_value_comes_back_equal_or_is_refused_with_its_path(tmp_path, caplog, value):
    try:
        slimtensors.save({"state": {"inner": value}, "n": 1}, tmp_path / "x")
    except UnsupportedTensorError as error:
        assert str(error).startswith("state.inner")  # noqa: PT017
        assert not any(value is known for known in (*BUILTINS, *STANDARD))
        assert list(tmp_path.iterdir()) == []
    else:
        assert same(slimtensors.load(tmp_path / "x")["state"]["inner"], value)
        assert not any(value is known for known in OTHERS)
    assert caplog.text == ""


def through_file(value, folder):
    slimtensors.save({"value": value}, folder / "x")
    return slimtensors.load(folder / "x")["value"]


@pytest.mark.parametrize("size", [0, 10, 100_000])
def test_a_stream_of_bytes_keeps_content_and_position(tmp_path, size):
    stream = io.BytesIO(bytes(range(10)) * (size // 10))
    stream.seek(7)
    back = through_file([stream, stream.getvalue()], tmp_path)
    assert type(back[0]) is io.BytesIO
    assert back[0].getvalue() == back[1] == stream.getvalue()
    assert back[0].tell() == stream.tell() == 7
    assert back[0].write(b"x") == 1


def test_long_bytes_are_compressed_and_do_not_enlarge_the_header(tmp_path):
    slimtensors.save({"a": {"b": bytes(1_000_000)}}, tmp_path / "x")
    raw = (tmp_path / "x").read_bytes()
    assert int.from_bytes(raw[:8], "little") < 1000
    assert len(raw) < 50_000


def test_a_path_of_another_platform_becomes_a_pure_path(tmp_path):
    slimtensors.save({"a": pathlib.Path("a/b")}, tmp_path / "x")
    other = "WindowsPath" if isinstance(pathlib.Path(), pathlib.PosixPath) else "PosixPath"

    def change(manifest):
        assert manifest["tree"] == {
            "dict": [["a", {"path": [type(pathlib.Path()).__name__, "a/b"]}]]
        }
        manifest["tree"]["dict"][0][1]["path"][0] = other

    (tmp_path / "x").write_bytes(edit_manifest((tmp_path / "x").read_bytes(), change))
    back = slimtensors.load(tmp_path / "x")["a"]
    assert type(back).__name__ == f"Pure{other}"
    assert back.parts == ("a", "b")


def test_omegaconf_containers_keep_interpolations_and_flags(tmp_path):
    config = OmegaConf.create(
        {
            "model": {"width": 64, "depth": "${n}", "missing": "???", "none": None},
            "n": 3,
            "layers": [1, "${model.width}", {"name": "é", "data": b"\0"}],
            5: pathlib.Path("x"),
            "late": "${oc.env:HOME}",
        }
    )
    OmegaConf.set_readonly(config.model, True)
    OmegaConf.set_struct(config, True)
    back = through_file(config, tmp_path)
    assert type(back) is DictConfig
    assert type(back.layers) is ListConfig
    assert OmegaConf.to_container(back) == OmegaConf.to_container(config)
    assert OmegaConf.to_container(back, resolve=True) == OmegaConf.to_container(
        config, resolve=True
    )
    assert OmegaConf.is_readonly(back.model)
    assert not OmegaConf.is_readonly(back)
    assert OmegaConf.is_struct(back)
    assert OmegaConf.is_missing(back.model, "missing")


@pytest.mark.parametrize(
    "config",
    [
        *(DictConfig(None), DictConfig("???"), DictConfig("${x}"), DictConfig({})),
        *(ListConfig(None), ListConfig("${x}"), ListConfig([[], [{}]])),
        DictConfig({"a": {1, 2}}, flags={"allow_objects": True}),
    ],
    ids=repr,
)
def test_unusual_omegaconf_containers_round_trip(tmp_path, config):
    back = through_file({"a": config}, tmp_path)["a"]
    assert type(back) is type(config)
    assert back._value() == config._value()
    assert back._metadata.flags == config._metadata.flags


def test_a_structured_config_loses_its_class_with_a_warning(tmp_path, caplog):
    back = through_file({"a": OmegaConf.structured(Record(x=5))}, tmp_path)["a"]
    assert back == {"x": 5}
    assert type(back) is DictConfig
    assert "a: stored as a plain DictConfig, without its class" in caplog.text


def test_attribute_dicts_of_lightning_keep_their_class(tmp_path):
    back = through_file(AttributeDict(lr=0.1, inner=AttributeDict(sizes={1, 2})), tmp_path)
    assert type(back) is type(back.inner) is AttributeDict
    assert (back.lr, back.inner.sizes) == (0.1, {1, 2})


@pytest.mark.parametrize(
    ("value", "modules", "command"),
    [
        (OmegaConf.create({"a": 1}), ["omegaconf"], "pip install omegaconf"),
        (
            AttributeDict(a=1),
            ["lightning.fabric.utilities.data", "lightning_fabric.utilities.data"],
            "pip install 'slimtensors[lightning]'",
        ),
    ],
    ids=["omegaconf", "lightning"],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, value, modules, command):
    slimtensors.save({"a": value}, tmp_path / "x")
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=re.escape(command)):
        slimtensors.load(tmp_path / "x")
