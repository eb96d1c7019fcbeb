import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from strategies import raw_bytes, same_bits, same_tensors
from torch import nn

import slimtensors
from slimtensors import Bitmask, Bitmask24, Dense, chain
from slimtensors.archive import estimate
from slimtensors.errors import (
    ConfigError,
    CorruptFileError,
    FormatError,
    UnknownCodecError,
    UnsupportedTensorError,
)
from slimtensors.presets import Choice
from slimtensors.spec import Spec


def sparse(rows=64, columns=64, keep=0.1, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g)
    return torch.where(torch.rand(rows, columns, generator=g) < keep, x, 0.0).to(dtype)


def two_four(rows=64, columns=64):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    x.view(-1, 4)[:, ::2] = 0
    return x


@pytest.fixture
def tensors():
    return {
        "a.weight": sparse(),
        "b.weight": two_four(),
        "norm": torch.ones(64, dtype=torch.bfloat16),
        "dense": torch.randn(8, 8),
        "0-d": torch.tensor(3.5, dtype=torch.float64),
        "none": torch.empty(0, 7, dtype=torch.int16),
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


@pytest.fixture
def saved(tensors, path):
    slimtensors.save(tensors, path, preset="sparse")
    return path


def stored(summary, name):
    return next(t for t in summary.tensors if t.name == name)


# open


def test_an_open_archive_knows_its_tensors(saved, tensors):
    with slimtensors.open(saved) as archive:
        assert archive.keys() == list(tensors)
        assert list(archive) == list(tensors)
        assert len(archive) == len(tensors)
        assert "norm" in archive
        assert "nrom" not in archive
        assert archive.path == str(saved)
        for name, x in tensors.items():
            assert archive.spec(name) == Spec.of(x)
            assert same_bits(archive.get_tensor(name), x)


def test_an_open_archive_tells_how_each_tensor_is_stored(saved):
    with slimtensors.open(saved) as archive:
        weight = archive.info("a.weight")
        assert (weight.codec, weight.dtype, weight.shape) == ("bitmask", "float32", (64, 64))
        assert weight.dense_bytes == 4 * 64 * 64
        assert weight.stored_bytes < weight.dense_bytes / 4
        assert weight.bits_per_item == 8 * weight.stored_bytes / 64**2
        assert weight.file == str(saved)
        assert archive.info("b.weight").codec == "bitmask24"
        assert archive.info("norm").codec == "plain"
        assert archive.info("none").bits_per_item == 0


def test_a_name_that_is_not_there_is_a_key_error_that_names_the_file(saved):
    with slimtensors.open(saved) as archive:
        for ask in (archive.get_tensor, archive.info, archive.spec):
            with pytest.raises(KeyError, match=r"x\.safetensors holds no tensor named 'nrom'"):
                ask("nrom")
        with pytest.raises(KeyError, match="'nrom'"):
            archive.select(["norm", "nrom"])


def test_a_selection_is_an_archive_of_some_tensors(saved, tensors, tmp_path):
    with slimtensors.open(saved) as archive:
        part = archive.select(["norm", "a.weight"])
        assert part.keys() == ["norm", "a.weight"]
        assert len(archive) == len(tensors)
        assert same_tensors(dict(part.items()), {n: tensors[n] for n in ["norm", "a.weight"]})
        slimtensors.save(part, tmp_path / "part")
        with pytest.raises(KeyError):
            part.get_tensor("dense")
    assert list(slimtensors.load(tmp_path / "part")) == ["norm", "a.weight"]


def test_a_selection_keeps_ties_even_without_the_name_that_is_stored(path, tmp_path):
    x = sparse()
    slimtensors.save({"a": x, "b": x, "c": x}, path)
    with slimtensors.open(path) as archive:
        assert archive.tied() == {"b": "a", "c": "a"}
        slimtensors.save(archive.select(["c", "b"]), tmp_path / "part")
    back = slimtensors.load(tmp_path / "part")
    assert same_tensors(back, {"c": x, "b": x})
    assert back["b"].data_ptr() == back["c"].data_ptr()


def test_opening_reads_no_tensor(saved):
    raw = bytearray(saved.read_bytes())
    raw[-100] ^= 1
    saved.write_bytes(raw)
    with slimtensors.open(saved) as archive:
        assert len(archive) == 6
        assert len(archive.summary().tensors) == 6
    with pytest.raises(CorruptFileError):
        slimtensors.load(saved)


def test_a_tensor_outlives_its_archive_and_may_be_changed(saved, tensors):
    with slimtensors.open(saved) as archive:
        back = {name: archive.get_tensor(name) for name in archive}
        again = archive.get_tensor("norm")
    back["norm"].add_(1)
    assert same_bits(again, tensors["norm"])
    saved.unlink()
    del back["norm"]
    assert all(same_bits(x, tensors[name]) for name, x in back.items())


def test_a_missing_file_is_a_file_not_found_error_that_names_it(tmp_path):
    for ask in (slimtensors.load, slimtensors.open, slimtensors.inspect, slimtensors.verify):
        with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
            ask(tmp_path / "nothing.safetensors")


# inspect, estimate


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_save_estimate_and_inspect_tell_the_same(path, tensors, dialect):
    del tensors["0-d"]
    tensors["tied"] = tensors["a.weight"]
    saved = slimtensors.save(tensors, path, dialect=dialect)
    seen = slimtensors.inspect(path)
    would = estimate(tensors, dialect=dialect)
    facts = [
        [(t.name, t.dtype, t.shape, t.codec, t.dense_bytes, t.stored_bytes) for t in s.tensors]
        for s in (saved, seen, would)
    ]
    assert facts[0] == facts[1] == facts[2]
    assert saved.files == seen.files == [str(path)]
    assert would.files == []
    assert stored(saved, "tied").note == stored(seen, "tied").note == "is a.weight"


def test_estimate_writes_nothing(tmp_path, tensors, monkeypatch):
    monkeypatch.chdir(tmp_path)
    estimate(tensors)
    assert not list(tmp_path.iterdir())


def test_a_summary_adds_up(saved, tensors):
    summary = slimtensors.inspect(saved)
    assert summary.dense_bytes == sum(x.nbytes for x in tensors.values())
    assert summary.stored_bytes < saved.stat().st_size
    assert summary.ratio == summary.dense_bytes / summary.stored_bytes
    assert str(summary).startswith("6 tensors, 2 compressed: 33.2 kB -> ")


def test_tied_tensors_count_once(path):
    x = sparse()
    summary = slimtensors.save({"a": x, "b": x}, path)
    assert summary.dense_bytes == x.nbytes
    assert stored(summary, "b").stored_bytes == 0
    assert stored(summary, "b").dense_bytes == x.nbytes


# presets, plans, choosers


def test_a_preset_is_chosen_by_name(tensors, path):
    codecs = {
        preset: {t.name: t.codec for t in slimtensors.save(tensors, path, preset=preset).tensors}
        for preset in ("dense", "sparse", "bitmask", "bitmask24")
    }
    assert set(codecs["dense"].values()) == {"plain"}
    assert codecs["sparse"]["a.weight"] == "bitmask"
    assert codecs["sparse"]["b.weight"] == "bitmask24"
    assert codecs["bitmask"]["b.weight"] == "bitmask"
    assert codecs["bitmask24"]["a.weight"] == "plain"
    assert codecs["bitmask24"]["b.weight"] == "bitmask24"


def test_a_plan_is_applied_to_every_tensor_that_it_makes_smaller(tensors, path):
    plan = chain(Bitmask(), values=chain(Bitmask(), mask=Dense()))
    summary = slimtensors.save(tensors, path, preset=plan)
    assert stored(summary, "a.weight").codec == "bitmask(values=bitmask(mask=dense))"
    assert stored(summary, "norm").codec == "plain"
    assert "would take" in stored(summary, "norm").note
    assert same_tensors(slimtensors.load(path), tensors)


def test_a_plan_that_does_not_fit_a_tensor_is_refused_by_name(tensors, path):
    x = {"a.weight": tensors["a.weight"]}
    with pytest.raises(ConfigError, match=r"a\.weight: is not 2:4"):
        slimtensors.save(x, path, preset=chain(Bitmask24()))
    with pytest.raises(ConfigError, match=r"0-d: shape \(\) cannot be 2:4"):
        slimtensors.save(tensors, path, preset=chain(Bitmask24()))
    with pytest.raises(ConfigError, match=r"a\.weight: codec 'bitmask' emits no part 'x'"):
        slimtensors.save(x, path, preset=chain(Bitmask(), x=Dense()))
    assert not path.exists()


def test_a_function_chooses_by_name_and_content(tensors, path):
    asked = []

    def choose(name, x):
        asked.append(name)
        assert x.device.type == "cpu"
        if name == "a.weight":
            return chain(Bitmask())
        return Choice(None, "because") if name == "norm" else None

    summary = slimtensors.save(tensors, path, preset=choose, threads=1)
    assert sorted(asked) == sorted(set(tensors) - {"none"})
    assert stored(summary, "a.weight").codec == "bitmask"
    assert stored(summary, "b.weight").codec == "plain"
    assert stored(summary, "norm").note == "because"


def test_an_error_in_a_function_reaches_the_caller_and_leaves_no_file(tensors, path):
    def choose(name, x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        slimtensors.save(tensors, path, preset=choose)
    assert not list(path.parent.iterdir())


def test_without_a_preset_it_is_the_smallest_exact_one_that_the_dialect_can_say(tensors, path):
    for dialect, preset in (("slim", "lossless"), ("compressed-tensors", "sparse")):
        found = slimtensors.save(tensors, path, dialect=dialect)
        assert found == slimtensors.save(tensors, path, dialect=dialect, preset=preset)
        assert estimate(tensors, dialect=dialect).stored_bytes == found.stored_bytes
        assert same_tensors(slimtensors.load(path), tensors)


@pytest.mark.parametrize("wrong", [Bitmask(), 3, ["sparse"]])
def test_a_preset_of_another_kind_is_a_config_error(tensors, path, wrong):
    with pytest.raises(ConfigError, match="preset"):
        slimtensors.save(tensors, path, preset=wrong)


@pytest.mark.parametrize("wrong", [Bitmask(), "bitmask", 3])
def test_a_function_that_returns_no_plan_is_a_config_error_that_names_the_tensor(path, wrong):
    with pytest.raises(ConfigError, match=r"a\.weight"):
        slimtensors.save({"a.weight": sparse()}, path, preset=lambda name, x: wrong, threads=1)
    assert not path.exists()


def test_unknown_names_are_refused_with_the_nearest_one(tensors, path):
    with pytest.raises(ConfigError, match="unknown preset 'spars'; did you mean 'sparse'"):
        slimtensors.save(tensors, path, preset="spars")
    with pytest.raises(ConfigError, match="unknown preset 'zzz'; known: bitmask, bitmask24"):
        slimtensors.save(tensors, path, preset="zzz")
    with pytest.raises(ConfigError, match="unknown dialect 'slime'; did you mean 'slim'"):
        slimtensors.save(tensors, path, dialect="slime")
    with pytest.raises(ConfigError, match="dialect 'compressed_tensors'; did you mean 'compr"):
        slimtensors.save(tensors, path, dialect="compressed_tensors")
    with pytest.raises(ConfigError, match="format 'sparse-bitmsk'; did you mean 'sparse-bitm"):
        slimtensors.save_compressed(tensors, path, compression_format="sparse-bitmsk")
    with pytest.raises(ConfigError, match="unknown compression format"):
        slimtensors.load_compressed(path, slimtensors.BitmaskConfig(format="x"))
    with pytest.raises(ConfigError, match="has no 'sparsity_struct'; did you mean 'sparsity_s"):
        slimtensors.BitmaskConfig.from_dict({"sparsity_struct": "2:4"})
    with pytest.raises(UnknownCodecError, match="'bitmsk'; did you mean 'bitmask'"):
        slimtensors.Plan.from_json({"codec": {"name": "bitmsk"}})
    assert not path.exists()


def test_an_option_that_does_not_exist_is_a_type_error(tensors, path):
    with pytest.raises(TypeError, match="presets"):
        slimtensors.save(tensors, path, presets="sparse")


def test_a_dialect_that_cannot_express_a_plan_says_so(tensors, path):
    for plan in (chain(Dense()), chain(Bitmask(), values=Dense())):
        with pytest.raises(ConfigError, match="'compressed-tensors' cannot express the plan"):
            slimtensors.save(tensors, path, preset=plan, dialect="compressed-tensors")


# notes


def test_the_summary_says_why_a_tensor_stayed_plain(path):
    few = torch.ones(64, 64)
    tensors = {
        "small": torch.zeros(3),
        "few zeros": few,
        "negative": torch.where(sparse() == 0, -0.0, sparse()),
        "some negative": torch.where(torch.arange(4096).view(64, 64) % 20 == 0, -0.0, sparse()),
        "fine": sparse(),
    }
    summary = slimtensors.save(tensors, path, preset="sparse")
    notes = {t.name: t.note for t in summary.tensors}
    assert "would take" in notes["small"]
    assert "plain takes 12" in notes["small"]
    assert notes["few zeros"] == "too few zeros for a bitmask"
    assert "-0.0" in notes["negative"]
    assert "-0.0" in notes["some negative"]
    assert notes["fine"] == ""
    not_24 = slimtensors.save({"x": sparse(keep=0.9)}, path, preset="bitmask24")
    assert stored(not_24, "x").note == "is not 2:4"
    assert same_tensors(slimtensors.load(path), {"x": sparse(keep=0.9)})


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int8,
        torch.int32,
        torch.uint8,
        torch.complex64,
        torch.float8_e4m3fnuz,  # the byte 0x80 is NaN
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,  # the byte 0x80 is 2.0
    ],
)
def test_only_dtypes_that_have_a_negative_zero_are_said_to_hold_one(path, dtype):
    raw = torch.zeros(4096, dtype.itemsize, dtype=torch.uint8)
    raw[:, -1] = 0x80
    x = raw.view(-1).view(dtype)
    assert "-0.0" not in slimtensors.save({"x": x}, path).tensors[0].note


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_negative_zeros_are_noted_in_every_dtype_that_has_them(path, dtype):
    x = torch.full((4096,), -0.0).to(dtype)
    assert slimtensors.save({"x": x}, path).tensors[0].note.startswith("4096 items are -0.0")
    assert same_bits(slimtensors.load(path)["x"], x)


def test_a_tensor_that_safetensors_cannot_say_is_smaller_as_bitmask_than_as_dense(path):
    x = sparse(keep=0.1).to(torch.complex128)
    y = torch.ones(50, 50, dtype=torch.complex128)
    summary = slimtensors.save({"x": x, "y": y}, path, preset="sparse")
    assert [t.codec for t in summary.tensors] == ["bitmask", "dense"]


# threads, shards, progress


@pytest.mark.parametrize("threads", [0, -1])
def test_fewer_threads_than_one_are_refused(tensors, saved, path, threads):
    with pytest.raises(ConfigError, match=f"threads must be at least 1, got {threads}"):
        slimtensors.save(tensors, path, threads=threads)
    with pytest.raises(ConfigError, match="threads"):
        slimtensors.load(saved, threads=threads)
    with pytest.raises(ConfigError, match="threads"):
        slimtensors.verify(saved, threads=threads)
    with pytest.raises(ConfigError, match="threads"):
        estimate(tensors, threads=threads)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_number_of_threads_changes_nothing(tensors, tmp_path, threads):
    tensors |= {f"large {i}": sparse(600, 600, seed=i) for i in range(6)}
    slimtensors.save(tensors, tmp_path / "one", threads=1)
    slimtensors.save(tensors, tmp_path / "some", threads=threads)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "some").read_bytes()
    assert same_tensors(slimtensors.load(tmp_path / "some", threads=threads), tensors)


@pytest.mark.parametrize(
    ("size", "files"),
    [
        (20_000, 5),
        ("20000", 5),
        ("20kB", 5),
        ("20 KB", 5),
        ("0.02MB", 5),
        ("19.53125KiB", 5),
        ("40K", 3),
        ("1GB", 1),
        ("5TiB", 1),
    ],
)
def test_a_shard_size_can_be_a_number_or_words(tmp_path, size, files):
    tensors = {f"x{i}": torch.randn(64, 64) for i in range(5)}
    summary = slimtensors.save(tensors, tmp_path / "m", max_shard_size=size)
    assert len(summary.files) == files
    assert same_tensors(slimtensors.load(tmp_path / "m"), tensors)
    names = sorted(p.name for p in (tmp_path / "m").iterdir())
    if files > 1:
        assert names[0] == f"model-00001-of-0000{files}.safetensors"
        assert names[-1] == "model.safetensors.index.json"
        assert slimtensors.load(tmp_path / "m" / names[-1]).keys() == tensors.keys()


@pytest.mark.parametrize("size", ["", "5XB", "GB", "-5GB", "5GB5", "1e3", 0, -1, "0", "0.1"])
def test_what_is_not_a_shard_size_is_refused(tmp_path, tensors, size):
    with pytest.raises(ConfigError, match="size"):
        slimtensors.save(tensors, tmp_path / "m", max_shard_size=size)


def test_progress_counts_all_bytes(tensors, path):
    done = []
    slimtensors.save(tensors, path, progress=done.append)
    assert sum(done) == sum(x.nbytes for x in tensors.values())
    done.clear()
    slimtensors.verify(path, progress=done.append)
    assert sum(done) == sum(t.stored_bytes for t in slimtensors.inspect(path).tensors)


# where it goes


def test_saving_replaces_a_file_and_keeps_its_mode(tensors, path):
    path.write_text("something else")
    path.chmod(0o600)
    slimtensors.save(tensors, path)
    assert same_tensors(slimtensors.load(path), tensors)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_archive_can_be_saved_over_itself(tensors, saved):
    with slimtensors.open(saved) as archive:
        slimtensors.save(archive, saved, preset="dense")
    assert load_file(saved).keys() == tensors.keys()
    assert same_tensors(slimtensors.load(saved), tensors)


def test_saving_into_a_folder_writes_the_model_there(tensors, tmp_path):
    summary = slimtensors.save(tensors, tmp_path)
    assert summary.files == [str(tmp_path / "model.safetensors")]
    assert same_tensors(slimtensors.load(tmp_path), tensors)


def test_a_folder_that_does_not_exist_is_an_error_for_a_file(tensors, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        slimtensors.save(tensors, tmp_path / "no" / "x.safetensors")


@pytest.mark.parametrize("limit", [None, "1GB"])
def test_a_url_that_nobody_can_write_is_named_and_no_folder_of_that_name_appears(
    tensors, tmp_path, monkeypatch, limit
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="nosuch://bucket/x"):
        slimtensors.save(tensors, "nosuch://bucket/x", max_shard_size=limit)
    assert list(tmp_path.iterdir()) == []


def test_paths_may_be_text(tensors, path):
    slimtensors.save(tensors, str(path))
    assert same_tensors(slimtensors.load(str(path)), tensors)


# verify


def test_verify_says_yes_where_all_is_well(saved, tensors, tmp_path):
    save_file(tensors, tmp_path / "plain")
    for found in (slimtensors.verify(saved), slimtensors.verify(saved, against=tmp_path / "plain")):
        assert found
        assert (found.tensors, found.damaged, found.different) == (6, {}, {})
        assert found.to_json() == {"ok": True, "tensors": 6, "damaged": {}, "different": {}}


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_verify_finds_every_flipped_byte_and_says_in_which_tensor(tmp_path, dialect):
    tensors = {"a": sparse(16, 16), "b": torch.ones(16), "c": two_four(16, 16), "tied": None}
    tensors["tied"] = tensors["a"]
    path = tmp_path / "x.safetensors"
    slimtensors.save(tensors, path, dialect=dialect)
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for at in range(start, len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        found = slimtensors.verify(path, threads=1)
        assert not found, at
        assert found.damaged.keys() in ({"a", "tied"}, {"b"}, {"c"}), at
        assert all(f"{path}: {name}: " in text for name, text in found.damaged.items())


def test_verify_tells_how_two_archives_differ(tmp_path, tensors):
    other = {name: x.clone() for name, x in tensors.items()}
    other["a.weight"][0, :2] += 1
    other["dense"] = other["dense"].double()
    other["norm"] = other["norm"][:32]
    other["new"] = other.pop("0-d")
    slimtensors.save(tensors, tmp_path / "x")
    slimtensors.save(other, tmp_path / "y")
    found = slimtensors.verify(tmp_path / "x", against=tmp_path / "y")
    assert not found
    assert found.damaged == {}
    assert found.different == {
        "0-d": f"is only in {tmp_path / 'x'}",
        "new": f"is only in {tmp_path / 'y'}",
        "a.weight": "2 of 4096 items differ",
        "dense": "float32 [8, 8] here, float64 [8, 8] there",
        "norm": "bfloat16 [64] here, bfloat16 [32] there",
    }


def test_verify_tells_zero_from_negative_zero_and_nan_from_nan(tmp_path):
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    slimtensors.save({"zero": torch.zeros(2), "nan": nan}, tmp_path / "x")
    slimtensors.save({"zero": torch.tensor([0.0, -0.0]), "nan": nan.flip(0)}, tmp_path / "y")
    found = slimtensors.verify(tmp_path / "x", against=tmp_path / "y")
    assert found.different == {"zero": "1 of 2 items differ", "nan": "2 of 2 items differ"}
    assert slimtensors.verify(tmp_path / "x", against=tmp_path / "x")


# what can be saved


def test_files_of_other_programs_load(tmp_path, tensors):
    save_file(tensors, tmp_path / "x", metadata={"format": "pt", "note": "mine"})
    back = slimtensors.load(tmp_path / "x")
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], x) for name, x in tensors.items())
    assert {t.codec for t in slimtensors.inspect(tmp_path / "x").tensors} == {"plain"}


def test_a_plain_file_of_ours_is_read_by_others(tmp_path, tensors):
    slimtensors.save(tensors, tmp_path / "x", preset="dense")
    back = load_file(tmp_path / "x")
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], x) for name, x in tensors.items())


def test_parameters_gradients_and_views_are_saved_as_their_values(path):
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight[:, ::2] = 0
        layer.weight[:, 1] = 0
    x = torch.randn(32, 32, dtype=torch.complex64)
    x[:, ::2] = 0
    computed = layer.weight * 2
    tensors = {
        "parameter": layer.weight,
        "bias": layer.bias,
        "computed": computed,
        "buffer": nn.Buffer(torch.eye(64)),
        "conjugate": x.conj(),
        "conjugate across": x.t().conj(),
        "imaginary part": x.conj().imag,
        "real part": x.real,
        "across": layer.weight.t(),
        "every other": layer.weight[::2, ::2],
        "repeated": torch.eye(4)[:1].expand(64, 4),
        "one of two": torch.arange(2.0)[::2],
        "none of two": torch.arange(2.0)[2::2],
        "one column": torch.eye(64)[:1, 5:6],
    }
    assert tensors["imaginary part"].is_neg()
    slimtensors.save(tensors, path)
    back = slimtensors.load(path)
    assert same_tensors(back, tensors)
    assert not any(y.requires_grad or y.is_conj() or y.is_neg() for y in back.values())
    assert all(y.is_contiguous() for y in back.values())
    assert layer.weight.requires_grad


def test_a_module_takes_back_what_it_gave(path):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Conv2d(3, 4, 3))
    slimtensors.save(model.state_dict(), path)
    model.load_state_dict(slimtensors.load(path), strict=True)


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.eye(4).to_sparse(), "layout torch.sparse_coo; store x.to_dense"),
        (torch.quantize_per_tensor, "a builtins.builtin_function_or_method cannot be stored"),
        ({1, 2}, "a builtins.set cannot be stored"),
        (torch.empty(3, device="meta"), "meta device"),
        (torch.ones(3).as_subclass(Odd), "tensor type Odd"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name_before_anything_is_written(path, value, words):
    path.write_text("old")
    with pytest.raises(UnsupportedTensorError, match=r"layer\.odd: ") as caught:
        slimtensors.save({"fine": torch.eye(64), "layer.odd": value}, path)
    assert words in str(caught.value)
    assert path.read_text() == "old"
    assert len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_a_name_that_the_format_cannot_hold_is_refused(path, name):
    with pytest.raises(UnsupportedTensorError, match="name"):
        slimtensors.save({name: torch.ones(3)}, path)
    x = torch.ones(3)
    with pytest.raises(UnsupportedTensorError, match="name"):
        slimtensors.save({"tied": x, name: x}, path)


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_no_tensors_at_all_are_fine(path, dialect):
    summary = slimtensors.save({}, path, dialect=dialect)
    assert slimtensors.load(path) == {}
    assert slimtensors.verify(path)
    assert summary.ratio == 1.0
    assert load_file(path) == {}


# devices


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_tensors_go_to_the_device_that_is_asked_for(saved, tensors, device):
    back = slimtensors.load(saved, device=device)
    assert {x.device.type for x in back.values()} == {"meta"}
    assert {n: Spec.of(x) for n, x in back.items()} == {n: Spec.of(x) for n, x in tensors.items()}
    with slimtensors.open(saved) as archive:
        assert archive.get_tensor("norm", device=device).device.type == "meta"
        assert {x.device.type for _, x in archive.items(device=device)} == {"meta"}
    assert {x.device.type for _, x in slimtensors.load_compressed(saved, device=device)} == {"meta"}


def test_a_device_that_does_not_exist_is_an_error(saved):
    with pytest.raises(RuntimeError, match="nowhere"):
        slimtensors.load(saved, device="nowhere")


def test_tied_tensors_stay_tied_on_a_device(path):
    x = sparse()
    slimtensors.save({"a": x, "b": x}, path)
    back = slimtensors.load(path, device="meta")
    assert back["a"] is back["b"]


# compressed-tensors by name


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("sparse-bitmask", "bitmask"),
        ("sparse_bitmask", "bitmask"),
        ("sparse-24-bitmask", "bitmask24"),
        ("dense", "plain"),
        ("dense_sparsity", "plain"),
    ],
)
def test_formats_are_known_by_the_names_of_compressed_tensors(path, name, codec):
    x = two_four()
    summary = slimtensors.save_compressed({"x": x}, path, name)
    assert summary.tensors[0].codec == codec
    assert same_tensors(dict(slimtensors.load_compressed(path)), {"x": x})


def test_loading_compressed_is_lazy_and_in_order(saved, tensors):
    loading = slimtensors.load_compressed(saved)
    assert iter(loading) is loading
    name, x = next(loading)
    assert name == "a.weight"
    assert same_bits(x, tensors[name])
    loading.close()


def test_a_config_says_its_format():
    assert slimtensors.BitmaskConfig().format == "sparse-bitmask"
    assert slimtensors.Sparse24BitmaskConfig().to_dict() == {
        "format": "sparse-24-bitmask",
        "sparsity_structure": "2:4",
        "global_sparsity": 0.0,
    }
    assert slimtensors.SparsityConfig().format == "dense_sparsity"
    old = {"format": "sparse_bitmask", "global_sparsity": "0.5"}
    assert slimtensors.BitmaskConfig.from_dict(old).global_sparsity == 0.5


# no warnings


@pytest.mark.parametrize("shape", [(0,), (), (64, 64)])
def test_loading_warns_about_nothing_not_even_half_precision_complex_numbers(tmp_path, shape):
    slimtensors.save({"x": torch.zeros(shape, dtype=torch.int32).view(torch.complex32)}, tmp_path)
    code = f"import slimtensors; slimtensors.load({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_bits_of_pages_that_were_given_back_are_read_again(tmp_path):
    tensors = {f"{i}": torch.full((100_000,), i, dtype=torch.int64) for i in range(20)}
    slimtensors.save(tensors, tmp_path / "x")
    with slimtensors.open(tmp_path / "x") as archive:
        for _ in range(2):
            for name, x in tensors.items():
                assert raw_bytes(archive.get_tensor(name)) == raw_bytes(x)


def test_a_folder_that_holds_no_model_is_a_format_error_that_says_what_it_holds(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(FormatError, match=r"no safetensors files here; it holds pytorch_model\.b"):
        slimtensors.load(tmp_path)
    Path(tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(FormatError, match="it holds nothing"):
        slimtensors.load(tmp_path)
