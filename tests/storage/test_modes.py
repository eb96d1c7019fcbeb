"""Modes of files and folders: the umask for new ones, the old mode for replaced ones."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from slimtensors.distributed import StorageWriter
from tiny_models import llama

import slimtensors
from slimtensors.checkpoint import save_checkpoint
from slimtensors.folder import compress_folder, decompress_folder, diff_folder, restore_folder
from slimtensors.folder.quantize import quantize_folder
from slimtensors.quantization import QuantizationConfig
from slimtensors.recipe import MagnitudePruning, Quantize
from slimtensors.report.collect import collect
from slimtensors.report.data import write_report
from slimtensors.report.page import write_page
from slimtensors.transformers import enable
from slimtensors.transformers.oneshot import oneshot


@pytest.fixture(params=[0o022, 0o077])
def umask(request):
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def find_modes(folder: Path) -> dict[str, str]:
    paths = [folder, *folder.rglob("*")]
    return {str(path): oct(stat.S_IMODE(path.stat().st_mode)) for path in paths}


def assert_default_modes(folder: Path, umask: int) -> None:
    for path, mode in find_modes(folder).items():
        assert mode == oct((0o777 if Path(path).is_dir() else 0o666) & ~umask), path


def make_folder(folder: Path) -> Path:
    slimtensors.save(
        {f"x{i}.weight": torch.randn(64, 64) for i in range(4)}, folder, max_shard_size=20_000
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "sub").mkdir()
    (folder / "sub" / "vocab.txt").write_text("a")
    return folder


def test_files_and_shards_have_the_mode_of_the_umask(tmp_path, umask):
    folder = tmp_path / "all"
    folder.mkdir()
    slimtensors.save({"x": torch.ones(9)}, folder / "x.safetensors")
    make_folder(folder / "new" / "model")
    assert_default_modes(folder, umask)


def test_folder_verbs_respect_the_umask(tmp_path, umask):
    source, folder = make_folder(tmp_path / "model"), tmp_path / "all"
    compress_folder(source, folder / "small")
    decompress_folder(folder / "small", folder / "dense")
    quantize_folder(source, folder / "quantized", QuantizationConfig.preset("FP8_DYNAMIC"))
    diff_folder(source, folder / "dense", folder / "delta")
    restore_folder(folder / "delta", source, folder / "restored")
    assert_default_modes(folder, umask)


def test_copies_of_private_files_stay_private(tmp_path):
    source = make_folder(tmp_path / "model")
    (source / "sub" / "vocab.txt").chmod(0o600)
    compress_folder(source, tmp_path / "small")
    copied = tmp_path / "small" / "sub" / "vocab.txt"
    assert stat.S_IMODE(copied.stat().st_mode) == 0o600


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_and_reports_respect_the_umask(tmp_path, umask):
    folder = tmp_path / "all"
    save_checkpoint({"x": torch.ones(9), "step": 1}, folder / "1")
    save_checkpoint({"x": torch.ones(9), "step": 2}, folder / "2", base=folder / "1")
    state = {"model": {"weight": torch.ones(64, 64)}}
    dcp.save(state, storage_writer=StorageWriter(folder / "3"), no_dist=True)
    report = collect(folder / "1" / "state.safetensors")
    write_report(report, folder / "report.json")
    write_page(report, folder / "report.html")
    assert_default_modes(folder, umask)


@pytest.mark.parametrize(
    "modifier",
    [MagnitudePruning(0.7), MagnitudePruning(0.1), Quantize("FP8_DYNAMIC")],
    ids=["sparse", "dense", "quantized"],
)
def test_oneshot_respects_the_umask(tmp_path, umask, modifier):
    model = llama()
    oneshot(model, recipe=[modifier], output_dir=tmp_path / "all" / "model")
    assert_default_modes(tmp_path / "all", umask)


def test_save_pretrained_respects_the_umask(tmp_path, umask):
    model = enable(llama(), preset="sparse")
    model.save_pretrained(tmp_path / "all" / "model", max_shard_size="40kB")
    assert_default_modes(tmp_path / "all", umask)
    loaded = type(model).from_pretrained(tmp_path / "all" / "model")
    loaded.save_pretrained(tmp_path / "again" / "model")
    assert_default_modes(tmp_path / "again", umask)


def test_a_replaced_folder_keeps_its_mode(tmp_path):
    source = make_folder(tmp_path / "model")
    compress_folder(source, tmp_path / "small")
    (tmp_path / "small").chmod(0o700)
    compress_folder(source, tmp_path / "small", replace=True)
    assert stat.S_IMODE((tmp_path / "small").stat().st_mode) == 0o700


def test_a_replaced_small_file_keeps_its_mode(tmp_path):
    slimtensors.save({"x": torch.ones(9)}, tmp_path / "x.safetensors")
    report = collect(tmp_path / "x.safetensors")
    for _ in range(2):
        write_report(report, tmp_path / "report.json")
        (tmp_path / "report.json").chmod(0o600)
    write_report(report, tmp_path / "report.json")
    assert stat.S_IMODE((tmp_path / "report.json").stat().st_mode) == 0o600
