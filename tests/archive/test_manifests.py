"""Forged manifests."""

import json

import pytest
from forging import DIALECTS, EIGHT, X, save_sample
from reliability_tools import assert_refused, build_file, edit_manifest, seal_manifest, split

from slimtensors.errors import CorruptFileError, FormatError, UnsupportedVersionError

pytestmark = pytest.mark.hostile


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda m: m.update(version=5), UnsupportedVersionError),
        (lambda m: m.update(version=10**9), UnsupportedVersionError),
        (lambda m: m.update(version=0), FormatError),
        (lambda m: m.update(version=-1), FormatError),
        (lambda m: m.update(version=True), FormatError),
        (lambda m: m.update(version="1"), FormatError),
        (lambda m: m.pop("version"), FormatError),
        (lambda m: m.update(dialect="klingon"), FormatError),
        (lambda m: m.pop("dialect"), FormatError),
        (lambda m: m.pop("checksums"), FormatError),
        (lambda m: m["checksums"].pop(), FormatError),
        (lambda m: m["checksums"].append(0), FormatError),
        (lambda m: m.update(checksums={}), FormatError),
        (lambda m: m.update(checksums=["x"] * len(m["checksums"])), FormatError),
        (lambda m: m.update(checksums=[float("inf")] * len(m["checksums"])), FormatError),
        (lambda m: m.update(checksums=[0] * len(m["checksums"])), FormatError),
        (lambda m: m.pop("table"), FormatError),
        (lambda m: m.update(table=[0, 0]), FormatError),
        (lambda m: m.update(table=[m["table"][0] - 1, m["table"][1]]), FormatError),
        (lambda m: m.update(table=[-5, m["table"][1]]), FormatError),
        (lambda m: m.update(table=[2**70, m["table"][1]]), FormatError),
        (lambda m: m.update(table=[1.5, m["table"][1]]), FormatError),
        (lambda m: m.update(tied={"t": "nowhere"}), FormatError),
        (lambda m: m.update(tied={"t": "t"}), FormatError),
        (lambda m: m.update(tied={"steps": "flags"}), FormatError),
        (lambda m: m.update(tied={"t": 1}), FormatError),
        (lambda m: m.update(tied=["t"]), FormatError),
        (lambda m: m.update(tied="t"), FormatError),
        (lambda m: m.update(plans={"nowhere": "bitmask"}), FormatError),
        (lambda m: m.update(plans={"steps": "bitmask"}), FormatError),
        (lambda m: m.update(plans={"steps": 1}), FormatError),
        (lambda m: m.update(plans=["steps"]), FormatError),
        (lambda m: m.update(version=2, copies={"t": "nowhere"}), FormatError),
        (lambda m: m.update(version=2, copies={"t": "t"}), FormatError),
        (lambda m: m.update(version=2, copies={"steps": "flags"}), FormatError),
        (lambda m: m.update(version=2, copies={"t": 1}), FormatError),
        (lambda m: m.update(version=2, copies=["t"]), FormatError),
        (lambda m: m.update(version=2, copies={f"t{i}": "steps" for i in range(16)}), FormatError),
        (lambda m: m.update(version=2, tied={"t": "steps"}, copies={"t": "flags"}), FormatError),
        (lambda m: m.update(version=2, tied={"t": "steps"}, copies={"u": "t"}), FormatError),
        (lambda m: m.update(version=2, generation=7), FormatError),
        (lambda m: m.update(version=2, source=["x"]), FormatError),
    ],
)
@DIALECTS
def test_a_forged_manifest_is_rejected(path, dialect, change, kind):
    path.write_bytes(edit_manifest(save_sample(path, dialect), change))
    assert_refused(path, kind=kind)


@DIALECTS
def test_names_tied_to_tied_names_are_rejected(path, dialect):
    raw = save_sample(path, dialect)
    path.write_bytes(edit_manifest(raw, lambda m: m.update(tied={"b": "a", "a": "b"})))
    assert_refused(path)


def test_an_unknown_codec_of_parts_is_rejected_with_its_name(path):
    raw = save_sample(path, "compressed-tensors")
    path.write_bytes(edit_manifest(raw, lambda m: m["plans"].update(sparse="zip")))
    assert_refused(path, tensor="sparse")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", "null", '"x"', "{}", '{"version":1}', "[" * 10**5],
    ids=lambda t: t[:9],
)
def test_a_malformed_manifest_is_rejected(path, text):
    path.write_bytes(build_file({"__metadata__": {"slimtensors": text}, "x": X}, EIGHT))
    assert_refused(path)


def test_a_manifest_with_invalid_unicode_is_rejected(path):
    text = json.dumps({"__metadata__": {"slimtensors": '{"version":1,"\ud800":1}'}, "x": X})
    path.write_bytes(build_file(text.encode(), EIGHT))
    assert_refused(path)


@pytest.mark.parametrize("key", ["tied", "plans"])
def test_an_invalid_name_in_a_manifest_is_rejected(path, key):
    header, data = split(save_sample(path, "slim"))
    manifest = json.loads(header["__metadata__"]["slimtensors"])
    manifest[key] = {"x\ud800": "steps"}
    header["__metadata__"]["slimtensors"] = seal_manifest(manifest, ensure_ascii=True)
    path.write_bytes(build_file(header, data))
    assert_refused(path)


def test_a_tensor_list_changed_by_another_program_is_rejected(path):
    header, data = split(save_sample(path, "slim"))
    header["renamed"] = header.pop("steps")
    path.write_bytes(build_file(header, data))
    assert "another program" in assert_refused(path, kind=CorruptFileError)


@pytest.mark.parametrize("key", ["sLimtensors", "slimtensor", "other"])
def test_a_manifest_with_a_damaged_key_is_rejected(path, key):
    """Read as a plain file, it would contain other tensors; the manifest is damaged as well."""
    raw = save_sample(path, "compressed-tensors")
    header, data = split(raw)
    manifest = header["__metadata__"].pop("slimtensors")
    header["__metadata__"][key] = manifest.replace("version", "versiom")
    path.write_bytes(build_file(header, data))
    assert "manifest is damaged" in assert_refused(path, kind=CorruptFileError)
