import pytest
import torch
from models import pruned, weights
from safetensors.torch import load_file, save_file
from strategies import same_bits, same_tensors

import slimtensors
from slimtensors.cli import main


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(weights(), path)
    return path


def run(*arguments):
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as usage:
        return usage.code


@pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
def test_a_file_round_trips(source, tmp_path, capsys, dialect):
    small, back = tmp_path / "small", tmp_path / "back"
    before = source.read_bytes()
    assert run("compress", source, "-o", small, "--dialect", dialect) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("7 tensors, 4 compressed: 32.6 kB -> ")
    assert captured.err == ""
    assert small.stat().st_size < source.stat().st_size / 2
    assert run("verify", small, "--against", source) == 0
    verdict = "the original files come back byte for byte"
    expected = f"7 tensors intact, bitwise equal to {source}; {verdict}\n"
    assert capsys.readouterr().out == expected
    assert run("decompress", small, "-o", back) == 0
    assert capsys.readouterr().out == "7 tensors, 32.6 kB\n"
    assert load_file(back).keys() == load_file(source).keys()
    assert all(same_bits(load_file(back)[name], x) for name, x in load_file(source).items())
    assert source.read_bytes() == back.read_bytes() == before


def test_tied_tensors_stay_tied_in_a_decompressed_file(tmp_path):
    x = pruned(64, 64)
    slimtensors.save({"a": x, "b": x}, tmp_path / "x")
    assert run("decompress", tmp_path / "x", "-o", tmp_path / "y") == 0
    back = slimtensors.load(tmp_path / "y")
    assert back["a"].data_ptr() == back["b"].data_ptr()
    assert same_tensors(back, {"a": x, "b": x})


@pytest.mark.parametrize("verb", ["compress", "decompress"])
def test_an_existing_target_is_refused_without_force(source, tmp_path, capsys, verb):
    target = tmp_path / "there"
    target.write_text("old")
    assert run(verb, source, "-o", target) == 2
    assert (
        capsys.readouterr().err == f"slimtensors: {target} already exists; use -f to replace it\n"
    )
    assert target.read_text() == "old"
    assert run(verb, source, "-o", target, "-f") == 0
    assert slimtensors.verify(target, against=source)


def test_a_dry_run_prints_the_sizes_and_writes_nothing(source, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    assert run("compress", source, "-o", tmp_path / "small", "--dry-run") == 0
    estimate = capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before
    assert run("compress", source, "-o", tmp_path / "small") == 0
    assert capsys.readouterr().out == estimate


def test_a_dry_run_ignores_an_existing_target(source, tmp_path):
    (tmp_path / "there").write_text("old")
    assert run("compress", source, "-o", tmp_path / "there", "--dry-run", "-q") == 0
    assert (tmp_path / "there").read_text() == "old"


def codecs(path):
    return {t.name: t.codec for t in slimtensors.inspect(path).tensors}


def test_only_and_skip_select_tensors_to_compress(source, tmp_path):
    target = tmp_path / "small"
    run("compress", source, "-o", target, "--only", "*.0.*", "--only", "*.2.*", "-q")
    chosen = {name for name, codec in codecs(target).items() if codec != "plain"}
    assert chosen == {"model.layers.0.mlp.weight", "model.layers.2.mlp.weight"}
    run("compress", source, "-o", target, "-f", "--skip", "*embed*", "--skip", "*.1.*", "-q")
    chosen = {name for name, codec in codecs(target).items() if codec != "plain"}
    assert chosen == {"model.layers.0.mlp.weight", "model.layers.2.mlp.weight"}
    run("compress", source, "-o", target, "-f", "--only", "*layers*", "--skip", "*.1.*", "-q")
    assert {name for name, codec in codecs(target).items() if codec != "plain"} == chosen
    assert len(codecs(target)) == 7
    assert slimtensors.verify(target, against=source)


def test_only_and_skip_select_tensors_to_decompress_and_show(source, tmp_path, capsys):
    run("decompress", source, "-o", tmp_path / "some", "--only", "*mlp*", "--skip", "*.1.*", "-q")
    names = ["model.layers.0.mlp.weight", "model.layers.2.mlp.weight"]
    assert sorted(load_file(tmp_path / "some")) == names
    assert capsys.readouterr().out == ""
    run("inspect", source, "--only", "*mlp*", "--skip", "*.1.*")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["tensor", *names, "total"]


def test_presets_are_selected_by_name(source, tmp_path):
    run("compress", source, "-o", tmp_path / "a", "--preset", "dense", "-q")
    assert set(codecs(tmp_path / "a").values()) == {"plain"}
    run("compress", source, "-o", tmp_path / "b", "--preset", "bitmask24", "-q")
    assert set(codecs(tmp_path / "b").values()) == {"plain"}


@pytest.mark.parametrize("threads", ["1", "3"])
def test_the_number_of_threads_does_not_change_the_result(source, tmp_path, threads):
    run("compress", source, "-o", tmp_path / "a", "-q")
    run("compress", source, "-o", tmp_path / "b", "-q", "-T", threads)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert run("verify", tmp_path / "b", "-T", threads) == 0
    run("decompress", tmp_path / "b", "-o", tmp_path / "c", "--threads", threads, "-q")
    assert slimtensors.verify(tmp_path / "c", against=source)


def test_a_file_is_split_into_shards(source, tmp_path, capsys):
    target = tmp_path / "shards"
    assert run("compress", source, "-o", target, "--max-shard-size", "5kB") == 0
    assert len(list(target.glob("model-*-of-*.safetensors"))) > 1
    assert slimtensors.verify(target, against=source)


def test_incompressible_tensors_stay_plain(tmp_path, capsys):
    save_file({"x": torch.ones(9)}, tmp_path / "x")
    assert run("compress", tmp_path / "x", "-o", tmp_path / "y") == 0
    assert capsys.readouterr().out == "1 tensor, 0 compressed: 36 B -> 36 B (1.00x smaller)\n"
