"""Quantized weights of compressed-tensors releases decode as in those releases."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from strategies import same_bits

from slimtensors.quantization import QuantizationArgs, formats

pytestmark = pytest.mark.interop

GOLDEN = Path(__file__).parent.parent / "golden" / "compressed_tensors"
RELEASES = ("0.14.0.1", "0.17.1", "0.20.0")
CASES = [
    (release, case)
    for release in (*RELEASES, "0.20.0-floats")
    for case in json.loads((GOLDEN / release / "quantized.json").read_text())
]


def stored(release, case):
    """Return the format, the arguments, and the stored tensors by suffix."""
    about = json.loads((GOLDEN / release / "quantized.json").read_text())[case]
    tensors = load_file(GOLDEN / release / "quantized.safetensors")
    parts = {k.removeprefix(f"{case}."): v for k, v in tensors.items() if k.startswith(f"{case}.")}
    return formats.find(about["format"]), QuantizationArgs.from_dict(about["weights"]), parts


@pytest.mark.parametrize(("release", "case"), CASES)
def test_weights_of_each_release_equal_its_own_decoding(release, case):
    stored_format, args, parts = stored(release, case)
    dense = load_file(GOLDEN / release / "quantized-dense.safetensors")[case]
    assert same_bits(stored_format.decompress(parts, args), dense)


@pytest.mark.parametrize(("release", "case"), [x for x in CASES if x[0].startswith("0.20.0")])
def test_weights_are_rewritten_in_the_current_layout(release, case):
    stored_format, args, parts = stored(release, case)
    codes, params = stored_format.parse(parts, args)
    again = stored_format.store(codes, params, args)
    assert again.keys() == parts.keys()
    assert all(same_bits(again[suffix], part) for suffix, part in parts.items())


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_releases_before_018_use_another_layout(bits):
    words = {r: stored(r, f"w{bits}-group")[2]["weight_packed"].shape[1] for r in RELEASES}
    assert words["0.14.0.1"] == words["0.17.1"] > words["0.20.0"]
