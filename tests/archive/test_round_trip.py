import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from strategies import (
    SAFETENSORS_DTYPES,
    bits,
    raw_bytes,
    same_bits,
    same_tensors,
    tensors,
    two_four_tensors,
)

import slimtensors
from slimtensors.codecs import Bitmask, Dense, bitmask
from slimtensors.codecs.plan import chain
from slimtensors.errors import ConfigError, UnsupportedTensorError
from slimtensors.tensor import DTYPES

relaxed = settings(deadline=None, max_examples=60)

DIALECTS = {"slim": DTYPES, "compressed-tensors": SAFETENSORS_DTYPES}
PAIR = DTYPES["float4_e2m1fn_x2"]
UNKNOWN_TO_SAFETENSORS = sorted(DTYPES.keys() - SAFETENSORS_DTYPES.keys())

names = st.one_of(
    st.sampled_from(["a.weight", "a.bias", "dtype", "shape", "b.weight", "x y", "", "ü/é", "🙂"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
).filter(lambda name: name != "__metadata__")


def tables(dtypes=DTYPES):
    """Draw {name: tensor}, most of which compress."""
    some = st.one_of(tensors(dtypes), two_four_tensors(dtypes), large(dtypes))
    if dtypes is SAFETENSORS_DTYPES:  # which counts single numbers, and has no 0-d pair of them
        some = some.filter(lambda x: x.dim() or x.dtype is not PAIR)
    return st.dictionaries(names, some, max_size=6)


@st.composite
def large(draw, dtypes):
    """Draw a tensor that is large enough to compress."""
    dtype = dtypes[draw(st.sampled_from(sorted(dtypes)))]
    rows, columns = draw(st.integers(20, 60)), draw(st.integers(20, 60))
    density = draw(st.sampled_from([0.0, 0.1, 0.5]))
    return bits(draw(st.integers(0, 2**32)), rows * columns, dtype, density).view(rows, columns)


@contextmanager
def a_place(name="x.safetensors"):
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / name


@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data())
@settings(deadline=None, max_examples=120)
def test_every_tensor_round_trips_in_order_and_bit_for_bit(dialect, data):
    given_tensors = data.draw(tables(DIALECTS[dialect]))
    threads = data.draw(st.sampled_from([1, 2, 3]))
    with a_place() as path:
        summary = slimtensors.save(given_tensors, path, dialect=dialect, threads=threads)
        assert same_tensors(slimtensors.load(path, threads=threads), given_tensors)
        assert slimtensors.verify(path)
        assert [t.name for t in summary.tensors] == list(given_tensors)
        assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data())
@relaxed
def test_every_preset_writes_a_file_that_safetensors_reads(dialect, data):
    given_tensors = data.draw(tables(DIALECTS[dialect]))
    preset = data.draw(st.sampled_from(["dense", "sparse", "bitmask", "bitmask24"]))
    with a_place() as path:
        slimtensors.save(given_tensors, path, preset=preset, dialect=dialect)
        assert same_tensors(slimtensors.load(path), given_tensors)
        with safe_open(path, "numpy") as file:
            stored = set(file.keys())
    plain = {t for t in given_tensors if preset == "dense"}
    assert plain <= stored
    if dialect == "slim":
        assert stored == given_tensors.keys()


@given(data=st.data())
@relaxed
def test_small_chunks_in_parallel_write_the_same_file(data):
    dialect = data.draw(st.sampled_from(sorted(DIALECTS)))
    given_tensors = data.draw(tables(DIALECTS[dialect]))
    with a_place("whole") as whole, a_place("chunks") as chunks:
        slimtensors.save(given_tensors, whole, dialect=dialect, threads=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bitmask, "_CHUNK", 64)
            slimtensors.save(given_tensors, chunks, dialect=dialect, threads=3)
            assert same_tensors(slimtensors.load(whole, threads=3), given_tensors)
        assert whole.read_bytes() == chunks.read_bytes()


@given(given_tensors=tables(), limit=st.sampled_from([1, 100, 4000, "1GB"]))
@relaxed
def test_shards_contain_the_same_tensors_as_a_file(given_tensors, limit):
    with a_place("folder") as folder:
        slimtensors.save(given_tensors, folder, max_shard_size=limit)
        back = slimtensors.load(folder)
        assert back.keys() == given_tensors.keys()
        assert all(same_bits(back[name], x) for name, x in given_tensors.items())
        assert slimtensors.verify(folder)
        if limit == "1GB":
            assert [p.name for p in folder.iterdir()] == ["model.safetensors"]


@given(
    given_tensors=tables(SAFETENSORS_DTYPES),
    ways=st.permutations(["slim", "compressed-tensors", "slim"]),
)
@relaxed
def test_an_archive_can_be_saved_again_in_another_dialect(given_tensors, ways):
    with a_place("0") as path:
        slimtensors.save(given_tensors, path, preset="dense")
        for i, dialect in enumerate(ways):
            following = path.with_name(str(i + 1))
            with slimtensors.open(path) as archive:
                slimtensors.save(archive, following, dialect=dialect)
            assert slimtensors.verify(following, against=path)
            path = following
        assert same_tensors(slimtensors.load(path), given_tensors)


# Tied tensors


@pytest.mark.parametrize("dialect", DIALECTS)
@given(x=large(SAFETENSORS_DTYPES), data=st.data())
@relaxed
def test_tied_tensors_are_stored_once_and_loaded_tied(dialect, x, data):
    other = data.draw(large(SAFETENSORS_DTYPES))
    given_tensors = {"a": x, "o": other, "b": x, "p": other.view(other.shape), "c": x, "z": x[:0]}
    with a_place() as path:
        summary = slimtensors.save(given_tensors, path, dialect=dialect)
        back = slimtensors.load(path)
    assert back.keys() == given_tensors.keys()
    assert all(same_bits(back[name], given_tensors[name]) for name in given_tensors)
    tied = {t.name for t in summary.tensors if t.codec == "tied"}
    assert tied == {"b", "c", "p"}
    assert back["a"].data_ptr() == back["b"].data_ptr() == back["c"].data_ptr()
    assert back["o"].data_ptr() == back["p"].data_ptr()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_names_keep_their_order_followed_by_tied_names(tmp_path, dialect):
    x, y = torch.eye(64), torch.ones(3)
    given_tensors = {"shared": x, "encoder": x, "norm": y, "decoder": x, "head": y, "a": y + 1}
    slimtensors.save(given_tensors, tmp_path / "x", dialect=dialect)
    order = ["shared", "norm", "a", "encoder", "decoder", "head"]
    assert list(slimtensors.load(tmp_path / "x")) == order
    with slimtensors.open(tmp_path / "x") as archive:
        assert archive.keys() == order


@pytest.mark.parametrize("limit", [None, 1])
def test_different_views_of_one_memory_are_not_tied(tmp_path, limit):
    base = torch.eye(64)
    given_tensors = {
        "whole": base,
        "half": base[:32],
        "transposed": base.t(),
        "flat": base.view(-1),
        "as int": base.view(torch.int32),
        "last": base[32:],
        "empty": base[:0],
        "empty too": base[:0],
    }
    summary = slimtensors.save(given_tensors, tmp_path / "x", max_shard_size=limit)
    assert all(t.codec != "tied" for t in summary.tensors)
    back = slimtensors.load(tmp_path / "x")
    assert all(same_bits(back[name], x) for name, x in given_tensors.items())
    assert len({x.data_ptr() for x in back.values() if x.numel()}) == 6


def test_a_name_of_a_part_can_be_a_tied_name(tmp_path):
    x = torch.eye(64)
    given_tensors = {"a": x, "a.bitmask": x}
    slimtensors.save(given_tensors, tmp_path / "x", dialect="compressed-tensors")
    assert same_tensors(slimtensors.load(tmp_path / "x"), given_tensors)


# Dtypes


@pytest.mark.parametrize("name", UNKNOWN_TO_SAFETENSORS)
@pytest.mark.parametrize("preset", ["sparse", "dense", "bitmask24"])
@pytest.mark.parametrize("density", [0.02, 1.0])
def test_dtypes_that_safetensors_does_not_support_are_stored_in_slim(
    tmp_path, name, preset, density
):
    x = bits(1, 64 * 64, DTYPES[name], density).view(64, 64)
    given_tensors = {"x": x, "0-d": x[0, 0], "none": x[:0], "across": x.t()}
    slimtensors.save(given_tensors, tmp_path / "x", preset=preset)
    assert same_tensors(slimtensors.load(tmp_path / "x"), given_tensors)
    assert slimtensors.inspect(tmp_path / "x").tensors[0].dtype == name


@pytest.mark.parametrize("name", UNKNOWN_TO_SAFETENSORS)
def test_dtypes_that_safetensors_does_not_support_raise_in_compressed_tensors(tmp_path, name):
    x = bits(1, 64 * 64, DTYPES[name], 0.02).view(64, 64)
    given_tensors = {"fine": torch.zeros(3), "layer.odd": x}
    with pytest.raises(UnsupportedTensorError, match=rf"layer\.odd: .* {name}; .*'slim'"):
        slimtensors.save(given_tensors, tmp_path / "x", dialect="compressed-tensors")
    assert not list(tmp_path.iterdir())


def test_a_scalar_pair_of_4_bit_numbers_raises_in_compressed_tensors(tmp_path):
    pair = torch.zeros((), dtype=torch.uint8).view(PAIR)
    with pytest.raises(UnsupportedTensorError, match="odd: "):
        slimtensors.save({"odd": pair}, tmp_path / "x", dialect="compressed-tensors")


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("preset", ["dense", "sparse"])
def test_every_dtype_of_safetensors_is_stored_in_both_dialects(tmp_path, dtype, dialect, preset):
    x = bits(1, 64 * 64, SAFETENSORS_DTYPES[dtype], 0.2).view(64, 64)
    given_tensors = {"x": x, "vector": x[0], "across": x.t(), "sliced": x[:, ::2], "none": x[:0]}
    summary = slimtensors.save(given_tensors, tmp_path / "x", preset=preset, dialect=dialect)
    assert same_tensors(slimtensors.load(tmp_path / "x"), given_tensors)
    assert summary.tensors[0].codec == ("plain" if preset == "dense" else "bitmask")


# Tensors that look like something else


def blob_of(x, folder):
    """The bytes of a real blob, as a tensor."""
    slimtensors.save({"x": x}, folder / "blob")
    with safe_open(folder / "blob", "pt") as file:
        blob = file.get_tensor("x")
    assert blob.dtype == torch.uint8
    assert raw_bytes(blob).startswith(b"SLIM")
    return blob


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("preset", ["dense", "sparse", chain(Bitmask(), values=Dense())])
def test_a_tensor_that_looks_like_a_blob_round_trips(tmp_path, dialect, preset):
    if dialect == "compressed-tensors" and not isinstance(preset, str):
        preset = chain(Bitmask())
    blob = blob_of(torch.eye(64), tmp_path)
    given_tensors = {
        "blob": blob,
        "in a row": blob.view(1, -1),
        "signed": blob.view(torch.int8),
        "magic": torch.tensor(list(b"SLIM"), dtype=torch.uint8),
        "more": torch.tensor(list(b"SLIM" + bytes(range(60))), dtype=torch.uint8),
        "short": blob[:15],
        "cut": blob[:16],
        "damaged": torch.cat([blob[:40], blob[:40]]),
        "zeros": torch.tensor(list(b"SLIM" + bytes(400)), dtype=torch.uint8),
    }
    slimtensors.save(given_tensors, tmp_path / "x", preset=preset, dialect=dialect)
    assert same_tensors(slimtensors.load(tmp_path / "x"), given_tensors)
    assert slimtensors.verify(tmp_path / "x")
    again = tmp_path / "again"
    with slimtensors.open(tmp_path / "x") as archive:
        slimtensors.save(archive, again, preset="dense")
    assert same_tensors(slimtensors.load(again), given_tensors)


@given(rest=st.binary(max_size=100))
@relaxed
def test_bytes_that_start_like_a_blob_round_trip(rest):
    given_tensors = {"x": torch.frombuffer(bytearray(b"SLIM" + rest), dtype=torch.uint8)}
    with a_place() as path:
        slimtensors.save(given_tensors, path)
        assert same_tensors(slimtensors.load(path), given_tensors)


@pytest.mark.parametrize("nonzero", range(830, 850))
def test_a_blob_never_has_the_shape_of_its_tensor(tmp_path, nonzero):
    """Loaders without support must fail on the shape instead of reading bytes as weights."""
    x = torch.zeros(4096)
    x[:nonzero] = 1
    slimtensors.save({"x": x}, tmp_path / "x")
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.get_tensor("x").shape != x.shape
    assert same_tensors(slimtensors.load(tmp_path / "x"), {"x": x})


PART_NAMES = ["a.compressed", "a.bitmask", "a.shape", "a.row_offsets"]


@pytest.mark.parametrize("first", ["a", "a.weight", None])
def test_names_like_those_of_parts_have_no_meaning_in_slim(tmp_path, first):
    given_tensors = {name: torch.eye(64) + i for i, name in enumerate(PART_NAMES)}
    if first:
        given_tensors = {first: torch.eye(64), **given_tensors}
    slimtensors.save(given_tensors, tmp_path / "x")
    assert same_tensors(slimtensors.load(tmp_path / "x"), given_tensors)


@pytest.mark.parametrize("preset", ["dense", "sparse"])
def test_names_like_those_of_parts_have_no_meaning_beside_a_plain_tensor(tmp_path, preset):
    given_tensors = {name: torch.ones(3, 5) for name in ["a", "a.weight", *PART_NAMES]}
    path = tmp_path / "x"
    slimtensors.save(given_tensors, path, preset=preset, dialect="compressed-tensors")
    assert same_tensors(slimtensors.load(path), given_tensors)


@pytest.mark.parametrize("part", PART_NAMES)
@pytest.mark.parametrize("limit", [None, 1])
def test_a_name_that_conflicts_with_a_part_raises(tmp_path, part, limit):
    given_tensors = {"a": torch.eye(64), part: torch.ones(3)}
    with pytest.raises(ConfigError, match=f"{part}: tensor name conflicts with a part"):
        slimtensors.save(
            given_tensors, tmp_path / "x", dialect="compressed-tensors", max_shard_size=limit
        )
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_tensor_may_have_the_name_of_the_module_of_a_weight(tmp_path):
    given_tensors = {"a.weight": torch.eye(64), "a": torch.eye(65), "a.bias": torch.eye(66)}
    slimtensors.save(given_tensors, tmp_path / "x", dialect="compressed-tensors")
    assert same_tensors(slimtensors.load(tmp_path / "x"), given_tensors)
