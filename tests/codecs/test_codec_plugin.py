import json
import os
import subprocess
import sys

import pytest

CODEC = '''
"""A codec of another package, for the protocol before `each` was added."""

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class Flip:
    """Store the bytes xored with a key. Lossless."""

    name: ClassVar[str] = "acme.flip"
    key: int = 0x55

    def encode(self, x):
        raw = x.contiguous().view(-1).view(torch.uint8)
        return {"flipped": raw ^ self.key}

    def decode(self, parts, like):
        return (parts["flipped"] ^ self.key).view(like.dtype).view(like.shape)
'''

SAVE = """
import sys, torch, slimtensors
from acme_flip import Flip
x = torch.eye(64)
plan = slimtensors.chain(slimtensors.Bitmask(), values=Flip(7))
summary = slimtensors.save({"layer.weight": x}, sys.argv[1], preset=plan)
print(summary.tensors[0].codec)
"""

LOAD = """
import sys, torch, slimtensors
with slimtensors.open(sys.argv[1]) as archive:
    print(archive.info("layer.weight").codec)
    assert torch.equal(archive.get_tensor("layer.weight"), torch.eye(64))
assert slimtensors.verify(sys.argv[1])
assert slimtensors.codecs.find("acme.flip").__module__ == "acme_flip"
"""

FAIL = """
import sys, slimtensors
from slimtensors.errors import UnknownCodecError
for ask in (slimtensors.load, slimtensors.inspect):
    try:
        ask(sys.argv[1])
    except UnknownCodecError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Return the folder of an installed package with a codec."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "acme_flip.py").write_text(CODEC)
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
    assert python(SAVE, path, package=package).stdout == "bitmask(values=acme.flip)\n"
    return path


def run(*command, package=None, check=True):
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    if package:
        environment["PYTHONPATH"] = str(package)
    return subprocess.run(command, env=environment, check=check, capture_output=True, text=True)


def python(code, *arguments, package=None):
    return run(sys.executable, "-W", "error", "-c", code, *arguments, package=package)


def slimtensors(*arguments, package=None, check=True):
    return run(sys.executable, "-m", "slimtensors", *arguments, package=package, check=check)


def test_a_codec_of_another_package_is_found_by_its_entry_point(saved, package):
    assert python(LOAD, saved, package=package).stdout == "bitmask(values=acme.flip)\n"


def test_a_codec_of_another_package_is_listed(package):
    listed = json.loads(slimtensors("codecs", "--json", package=package).stdout)
    assert {
        "name": "acme.flip",
        "about": "Store the bytes xored with a key. Lossless.",
        "options": ["key"],
    } in listed["codecs"]
    line = next(
        line
        for line in slimtensors("codecs", package=package).stdout.splitlines()
        if line.startswith("acme.flip")
    )
    assert line.split()[:3] == ["acme.flip", "key", "Store"]


def test_without_the_package_the_error_names_codec_tensor_and_file(saved):
    messages = python(FAIL, saved).stdout.splitlines()
    assert len(messages) == 2
    for message in messages:
        assert message.startswith(f"{saved}: layer.weight: unknown codec 'acme.flip'; ")
    failed = slimtensors("decompress", saved, "-o", saved.with_name("y"), check=False)
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
    code = """
import sys, torch, slimtensors
slimtensors.save({"x": torch.eye(64)}, sys.argv[1])
slimtensors.load(sys.argv[1])
"""
    python(code, tmp_path / "x", package=tmp_path)
