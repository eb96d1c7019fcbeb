import importlib.util
from pathlib import Path

import pytest
from safetensors.torch import load_file
from strategies import raw_bytes

import slimtensors

GOLDEN = Path(__file__).parent.parent / "golden" / "slim"
VERSION_1 = GOLDEN / "1"

_spec = importlib.util.spec_from_file_location("make_golden", GOLDEN / "make.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)

every_file = pytest.mark.parametrize("name", make.FILES)


def stored(path):
    return sorted(path.rglob("*.*")) if path.is_dir() else [path]


@every_file
def test_a_golden_file_loads_to_the_bits_that_went_in(name):
    path = make.target(VERSION_1, name)
    content = name.rpartition("/")[2]
    want = load_file(VERSION_1 / f"expected-{content}.safetensors")
    back = slimtensors.load(path)
    assert back.keys() == want.keys()
    for key, x in make.CONTENT[content]().items():
        assert (back[key].dtype, back[key].shape) == (x.dtype, x.shape)
        assert raw_bytes(back[key]) == raw_bytes(want[key])
    assert slimtensors.verify(path)


@pytest.mark.parametrize("name", [name for name in make.FILES if "shards" not in name])
def test_todays_library_still_writes_the_same_bytes(name, tmp_path):
    path, golden = make.target(tmp_path, name), make.target(VERSION_1, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    make.write(name, path)
    assert [p.relative_to(tmp_path) for p in stored(path)] == [
        p.relative_to(VERSION_1) for p in stored(golden)
    ]
    for ours, theirs in zip(stored(path), stored(golden), strict=True):
        assert ours.read_bytes() == theirs.read_bytes(), ours


def test_what_goes_into_the_golden_files_does_not_depend_on_the_machine():
    for content, tensors in make.CONTENT.items():
        want = load_file(VERSION_1 / f"expected-{content}.safetensors")
        bits = make.bits(tensors())
        assert all(raw_bytes(bits[key]) == raw_bytes(x) for key, x in want.items())


def test_every_codec_has_a_golden_file():
    used = {t.codec for name in make.FILES for t in summary(name).tensors}
    assert {"bitmask", "bitmask24", "dense", "plain", "tied"} <= used
    assert {"bins", "int-blocks", "quantized"} <= used
    assert any(codec.startswith("dynamic-inputs(weight=quantized") for codec in used)
    assert any(codec.startswith("bitmask24(codes=bitmask") for codec in used)


def summary(name):
    return slimtensors.inspect(make.target(VERSION_1, name))
