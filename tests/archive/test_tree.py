"""States with values that are not tensors."""

import json
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import same_bits

import slimtensors
from slimtensors.archive.tree import flatten, unflatten
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


def test_the_metadata_of_a_module_round_trips(tmp_path):
    state = torch.nn.BatchNorm1d(3).state_dict()
    state["extra"] = ("words", 1)
    slimtensors.save(state, tmp_path / "x")
    back = slimtensors.load(tmp_path / "x")
    assert type(back) is OrderedDict
    assert back._metadata == state._metadata
    assert back["extra"] == ("words", 1)
    assert same_bits(back["running_var"], state["running_var"])


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, Point(1, 2), lambda: 0, np.array(["text"]), range(3), type]
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
        {},
        [],
    ],
)
def test_a_malformed_outline_is_a_corrupt_file_error(outline):
    with pytest.raises(CorruptFileError):
        unflatten({"dict": [["a", outline]]}, {})


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
