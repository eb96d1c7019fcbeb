"""Codecs of other packages, registered by an entry point."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Return the folder of an installed package with a codec."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(PROGRAMS / "acme" / "acme_flip.py", folder)
    info = folder / "acme_flip-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-flip\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[slimtensors.codecs]\nacme.flip = acme_flip:Flip\n", newline="\n"
    )
    return folder


@pytest.fixture(scope="module")
def saved(package, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "x.safetensors"
    assert (
        run_program("save_flipped.py", path, package=package).stdout
        == "bitmask(values=acme.flip)\n"
    )
    return path


def run(*command, package=None, check=True):
    """Run a command with no other package installed than this one."""
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    if package:
        environment["PYTHONPATH"] = str(package)
    return subprocess.run(command, env=environment, check=check, capture_output=True, text=True)


def run_program(name, *arguments, package=None):
    return run(sys.executable, "-W", "error", PROGRAMS / name, *arguments, package=package)


def run_command(*arguments, package=None, check=True):
    return run(sys.executable, "-m", "slimtensors", *arguments, package=package, check=check)


def test_a_codec_of_another_package_is_found_by_its_entry_point(saved, package):
    assert (
        run_program("load_flipped.py", saved, package=package).stdout
        == "bitmask(values=acme.flip)\n"
    )


def test_a_codec_of_another_package_is_listed(package):
    listed = json.loads(run_command("codecs", "--json", package=package).stdout)
    assert {
        "name": "acme.flip",
        "about": "Store the bytes xored with a key. Lossless.",
        "options": ["key"],
    } in listed["codecs"]
    line = next(
        line
        for line in run_command("codecs", package=package).stdout.splitlines()
        if line.startswith("acme.flip")
    )
    assert line.split()[:3] == ["acme.flip", "key", "Store"]


def test_without_the_package_the_error_names_codec_tensor_and_file(saved):
    messages = run_program("unknown_codec.py", saved).stdout.splitlines()
    assert len(messages) == 2
    for message in messages:
        assert message.startswith(f"{saved}: layer.weight: unknown codec 'acme.flip'; ")
    failed = run_command("decompress", saved, "-o", saved.with_name("y"), check=False)
    assert failed.returncode == 3
    assert "unknown codec 'acme.flip'" in failed.stderr
    assert not saved.with_name("y").exists()


def test_the_key_that_was_chosen_is_in_the_file(saved):
    assert b'"codec":{"name":"acme.flip","key":7}' in saved.read_bytes()


def test_a_broken_package_affects_only_its_own_codec(package, tmp_path):
    (tmp_path / "acme_flip.py").write_text("import does_not_exist")
    info = tmp_path / "acme_flip-1.0.dist-info"
    info.mkdir()
    for file in ("METADATA", "entry_points.txt"):
        (info / file).write_text((package / "acme_flip-1.0.dist-info" / file).read_text())
    run_program("round_trip.py", tmp_path / "x", package=tmp_path)
