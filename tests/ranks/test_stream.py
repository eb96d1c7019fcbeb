"""The stream transform for torch's own files."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks.one import SINGLE
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat

from slimtensors.distributed import SlimStream, stream_registry
from slimtensors.errors import CorruptFileError, UnsupportedVersionError

pytestmark = pytest.mark.filterwarnings(SINGLE)

FRAME = 1 << 20


class Kept(io.BytesIO):
    """Remembers its content and that it was closed."""

    content = b""

    def close(self):
        if not self.closed:
            self.content = self.getvalue()
        super().close()


def coded(raw, steps=(1 << 30,)):
    """Write bytes in pieces of these sizes, over and over."""
    out = Kept()
    stream = SlimStream().transform_to(out)
    at = i = 0
    while at < len(raw):
        size = steps[i % len(steps)]
        assert stream.write(raw[at : at + size]) == len(raw[at : at + size])
        at, i = at + size, i + 1
    stream.close()
    assert out.closed
    return out.content


def decoded(raw):
    return SlimStream().transform_from(io.BytesIO(raw)).read(-1)


def floats(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=g).numpy().tobytes()


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([1, 3, 100, FRAME - 1, FRAME, FRAME + 5, 2 * FRAME + 77]),
    st.lists(st.integers(1, 700_000), min_size=1, max_size=3),
    st.integers(0, 3),
)
def test_every_byte_comes_back(count, steps, seed):
    steps = [max(step, count // 50) for step in steps]
    raw = floats(count // 4 + 1, seed)[:count]
    assert decoded(coded(raw, steps)) == raw


def test_reading_in_small_steps_gives_the_same():
    raw = floats(400_000)
    stream = SlimStream().transform_from(io.BytesIO(coded(raw)))
    parts = []
    while part := stream.read(77_777):
        parts.append(part)
    assert b"".join(parts) == raw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_floats_get_smaller_whatever_their_width(dtype):
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    raw = x.view(torch.uint8).numpy().tobytes()
    least = {2: 0.7, 4: 0.85, 8: 0.8}[dtype.itemsize]
    assert len(coded(raw)) < least * len(raw)
    assert decoded(coded(raw)) == raw


def test_noise_grows_by_little():
    raw = torch.randint(0, 256, (3_000_000,), dtype=torch.uint8).numpy().tobytes()
    assert len(coded(raw)) < len(raw) + 200


def test_any_flipped_bit_is_found():
    raw = coded(floats(300_000))
    for at in range(0, len(raw), len(raw) // 150):
        with pytest.raises(CorruptFileError):
            decoded(raw[:at] + bytes([raw[at] ^ 2]) + raw[at + 1 :])


def test_a_stream_that_ends_early_is_found():
    raw = coded(floats(600_000))
    for end in (0, 5, 100, len(raw) // 2, len(raw) - 1, len(raw) - 25):
        with pytest.raises(CorruptFileError, match="truncated"):
            decoded(raw[:end])


def test_a_frame_that_was_taken_out_is_found():
    one, two = coded(floats(FRAME // 4)), coded(floats(FRAME // 4) + floats(FRAME // 4, 1))
    end = len(one) - 25
    assert one[:end] == two[:end]
    with pytest.raises(CorruptFileError, match="frames are missing"):
        decoded(two[end:])


def test_a_format_that_torch_does_not_pass_through_it_is_refused(tmp_path):
    writer = dcp.FileSystemWriter(
        tmp_path / "a",
        _extensions=[SlimStream()],
        serialization_format=SerializationFormat.SAFETENSORS,
    )
    with pytest.raises(CheckpointException, match="torch passes by"):
        dcp.save({"w": torch.randn(30, 30)}, storage_writer=writer, no_dist=True)


def test_another_version_is_refused():
    with pytest.raises(UnsupportedVersionError, match="update"):
        SlimStream.from_descriptor("2")


def test_torch_writes_and_reads_with_it(tmp_path):
    state = {"w": torch.randn(900, 700), "b": torch.randn(40).bfloat16(), "step": 3}
    plain = dcp.FileSystemWriter(tmp_path / "plain")
    small = dcp.FileSystemWriter(tmp_path / "small", _extensions=[SlimStream()])
    for writer in (plain, small):
        dcp.save(state, storage_writer=writer, no_dist=True)
    out = {"w": torch.zeros(900, 700), "b": torch.zeros(40).bfloat16(), "step": 0}
    reader = dcp.FileSystemReader(tmp_path / "small", _extension_registry=stream_registry())
    dcp.load(out, storage_reader=reader, no_dist=True)
    assert torch.equal(out["w"], state["w"])
    assert torch.equal(out["b"], state["b"])
    assert out["step"] == 3
    files = [tmp_path / name / "__0_0.distcp" for name in ("small", "plain")]
    assert files[0].stat().st_size < 0.9 * files[1].stat().st_size

    raw = bytearray(files[0].read_bytes())
    raw[len(raw) // 2] ^= 1
    files[0].write_bytes(raw)
    with pytest.raises(CheckpointException, match="damaged"):
        dcp.load(out, storage_reader=reader, no_dist=True)
