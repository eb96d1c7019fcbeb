from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from bins_samples import CONTENTS, DTYPE_NAMES, make_tensor, make_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from reliability_tools import ENVIRONMENT, run_program
from strategies import same_bits

from slimtensors import _core
from slimtensors.codecs import Bins, Huffman
from slimtensors.errors import CorruptFileError
from slimtensors.tensor import DTYPES, Spec, as_bytes

CHUNK = _core.BINS_CHUNK
ENCODE_BINS = Path(__file__).parent / "programs" / "encode_bins.py"


# A slow reference decoder, written from docs/format-bins.md.


class Bits:
    def __init__(self, data):
        self.number, self.at = int.from_bytes(data, "little"), 0
        self.size = 8 * len(data)

    def take(self, count):
        assert self.at + count <= self.size
        value = self.number >> self.at & ((1 << count) - 1)
        self.at += count
        return value

    def take_small(self):
        length = 0
        while not self.take(1):
            length += 1
        high = 1 << length | self.take(length)
        return 2 * (high - 1) + self.take(1)

    def rest(self):
        assert self.take(-self.at % 8) == 0
        return (self.number >> self.at).to_bytes((self.size - self.at) // 8, "little")


def slow_codes(bits, count, widths, before):
    codes = []
    for i in range(count):
        last = codes[-1] if codes else 0
        if before is None:
            guess = last + 8 * (widths[i] - widths[i - 1]) if last else 0
        elif before[i] == 0:
            guess = 0
        else:
            guess = before[i] + (last - before[i - 1] if i and last and before[i - 1] else 0)
        u = bits.take_small()
        codes.append(min(max(guess, 0), 80) + (-(u + 1) // 2 if u % 2 else u // 2))
        assert 0 <= codes[-1] <= 80
    return codes


def slow_table(codes):
    """Return (symbol, frequency, index) of each slot."""
    frequencies = [c if c < 8 else (8 + c % 8) << (c // 8 - 1) for c in codes]
    most = codes.index(max(codes))
    frequencies[most] = 0
    frequencies[most] = 4096 - sum(frequencies)
    assert frequencies[most] > 0
    return [(s, f, k) for s, f in enumerate(frequencies) for k in range(f)]


class Run:
    def __init__(self, states, data):
        self.states = np.frombuffer(data[: 4 * states], "<u4").tolist()
        self.words = np.frombuffer(data[4 * states :], "<u2").tolist()[::-1]

    def decode(self, tables):
        symbols = []
        for i, table in enumerate(tables):
            state = self.states[i % len(self.states)]
            symbol, frequency, place = table[state % 4096]
            state = frequency * (state // 4096) + place
            if state < 1 << 16:
                state = state << 16 | self.words.pop()
            self.states[i % len(self.states)] = state
            symbols.append(symbol)
        return symbols

    def finish(self):
        assert not self.words
        assert set(self.states) == {1 << 16}


class Model:
    def __init__(self, data, w):
        bits = Bits(data)
        self.mapping, self.drop, tables, self.width = map(bits.take, (2, 6, 4, 20))
        self.bins = []
        self.halve(bits, 0, w)
        sums = [0]
        self.labels = None
        if self.width:
            sums += np.cumsum([bits.take(1) for _ in range(30)]).tolist()
            self.labels = slow_table(slow_codes(bits, 32, [0] * 32, None))
        assert sums[-1] == tables
        codes = None
        slots = []
        for _ in range(tables + 1):
            codes = slow_codes(bits, len(self.bins), [b for _, b in self.bins], codes)
            slots.append(slow_table(codes))
        self.tables = [slots[t] for t in sums]
        self.columns = [0]
        if self.width:
            table = slow_table(slow_codes(bits, 16, [0] * 16, None))
            run = Run(8, bits.rest())
            self.columns = run.decode([table] * self.width)
            run.finish()
        else:
            assert bits.rest() == b""

    def halve(self, bits, lower, width):
        if width and bits.take(1):
            self.halve(bits, lower, width - 1)
            self.halve(bits, lower + (1 << width - 1), width - 1)
        else:
            self.bins.append((lower, width))


def slow_chunk(model, data, w, first, count):
    size = int.from_bytes(data[:4], "little")
    states = 8 if count < 8192 else 32 if count < 65536 else 64
    run = Run(states, data[4 : 4 + 4 * states + size])
    raw = Bits(data[4 + 4 * states + size :])
    width = model.width or count + first
    begin, end = first // width, (first + count - 1) // width + 1
    labels = run.decode([model.labels] * (end - begin)) if model.width else [16]
    rows = [labels[i // width - begin] for i in range(first, first + count)]
    columns = [model.columns[i % width if model.width else 0] for i in range(first, first + count)]
    symbols = run.decode(
        [model.tables[r % 16 + c] for r, c in zip(rows, columns, strict=True)]
        if model.width
        else [model.tables[0]] * count
    )
    run.finish()
    items = []
    for label, symbol in zip(rows, symbols, strict=True):
        lower, bits = model.bins[symbol]
        drop = model.drop if label >= 16 else 0
        value = raw.take(bits - drop)
        v = lower + (value >> 1 << 1 + drop | value & 1 if model.mapping == 1 else value << drop)
        match model.mapping:
            case 1:
                v = v >> 1 | (v & 1) << w - 1
            case 2:
                v = (v >> 1 ^ -(v & 1)) % (1 << w)
        items.append(v)
    assert raw.rest() == b""
    return items


def slow_decode(stream, itemsize, count):
    size = int.from_bytes(stream[:4], "little")
    model, rest = stream[4 : 4 + size], stream[4 + size :]
    chunks = -(-count // CHUNK)
    rows = np.frombuffer(rest[: 8 * chunks], "<u4").reshape(-1, 2).tolist()
    data, out = rest[8 * chunks :], b""
    for c, (length, checksum) in enumerate(rows):
        chunk, data = data[:length], data[length:]
        assert _core.crc32c(model + chunk) == checksum
        items = min(CHUNK, count - c * CHUNK)
        if length < items * itemsize:
            slow = slow_chunk(Model(model, 8 * itemsize), chunk, 8 * itemsize, c * CHUNK, items)
            chunk = np.array(slow, dtype=f"<u{itemsize}").tobytes()
        out += chunk
    assert data == b""
    return out


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from([*DTYPE_NAMES, "uint8", "int64", "complex64"]),
    shape=st.sampled_from([(1,), (7,), (300,), (4100,), (60, 80), (9000,), (3, 3001)]),
    kind=st.sampled_from(CONTENTS),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_core_agrees_with_the_definition(dtype, shape, kind, seed):
    x = make_tensor(np.random.default_rng(seed), kind, Spec(DTYPES[dtype], shape))
    stream = Bins().encode(x)["stream"]
    assert same_bits(Bins().decode({"stream": stream}, Spec.of(x)), x)
    itemsize = x.element_size() // (2 if x.is_complex() else 1)
    again = slow_decode(bytes(stream.numpy()), itemsize, x.nbytes // itemsize)
    assert again == bytes(as_bytes(x).numpy())


def test_whole_chunks_agree_with_the_definition():
    x = make_tensor(np.random.default_rng(1), "marked", Spec(torch.float32, (321, 700)))
    assert CHUNK < x.numel() < 2 * CHUNK  # rows go on from one chunk to the next
    stream = Bins().encode(x)["stream"]
    model = Model(bytes(stream[4:][: int(stream[:4].view(torch.int32))].numpy()), 32)
    assert (model.width, model.drop) == (700, 13)
    assert len({id(table) for table in model.tables}) > 4
    assert slow_decode(bytes(stream.numpy()), 4, x.numel()) == x.numpy().tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(deadline=None, max_examples=200)
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.sampled_from([(), (0,), (1,), (3, 0, 2), (7,), (5, 9), (40, 300), (30, 9, 50)]),
    kind=st.sampled_from(CONTENTS),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_bit_of_every_dtype_survives(dtype, shape, kind, seed):
    spec = Spec(DTYPES[dtype], shape)
    x = make_tensor(np.random.default_rng(seed), kind, spec)
    parts = Bins().encode(x)
    assert parts["stream"].numel() <= spec.nbytes + 4 + 8 * -(-spec.numel // CHUNK)
    assert same_bits(Bins().decode(parts, spec), x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64", "int64", "uint8"])
@pytest.mark.parametrize("kind", ["weights", "integers"])
def test_large_tensors_survive_on_several_threads(dtype, kind):
    spec = Spec(DTYPES[dtype], (9 * CHUNK // 1000, 1003))
    x = make_tensor(np.random.default_rng(2), kind, spec)

    def each(work, count):
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(work, range(count)))

    parts = Bins().encode(x, each)
    assert torch.equal(parts["stream"], Bins().encode(x)["stream"])
    assert same_bits(Bins().decode(parts, spec, each), x)
    out = torch.empty_like(x)
    Bins().decode_into(parts, out, each)
    assert same_bits(out, x)


def test_both_kinds_of_code_write_and_read_the_same_bytes():
    outputs = [
        run_program(ENCODE_BINS, env={**ENVIRONMENT, "SLIMTENSORS_CPU": cpu})
        for cpu in ("plain", "")
    ]
    assert outputs[0] == outputs[1] != ""


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "int8"])
def test_a_range_of_items_is_decoded_alone(dtype):
    x = make_tensor(np.random.default_rng(3), "weights", Spec(DTYPES[dtype], (400, 1000))).flatten()
    parts, total = Bins().encode(x), x.numel()
    for begin, end in [(0, 0), (0, total), (5, 6), (CHUNK - 3, CHUNK + 3), (total - 1, total)]:
        found = Bins().decode_range(parts, Spec.of(x), begin, end)
        assert same_bits(found.clone(), x[begin:end].clone())
    for begin, end in [(-1, 3), (4, 3), (0, total + 1)]:
        with pytest.raises(IndexError):
            Bins().decode_range(parts, Spec.of(x), begin, end)


def size(codec, x):
    return sum(part.nbytes for part in codec.encode(x).values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
def test_rows_and_columns_of_different_scale_cost_less_than_with_huffman(dtype):
    x = make_tensor(np.random.default_rng(4), "weights", Spec(DTYPES[dtype], (512, 768)))
    assert size(Bins(), x) < 0.975 * size(Huffman(), x)


def test_items_that_are_all_equal_cost_next_to_nothing():
    assert size(Bins(), torch.full((1 << 20,), 0.125)) < 3000


def test_random_bytes_grow_by_the_sizes_of_chunks_only():
    x = torch.randint(0, 256, (5 * CHUNK,), dtype=torch.uint8)
    assert size(Bins(), x) == x.numel() + 4 + 5 * 8


# Bad input.


@settings(deadline=None, max_examples=300)
@given(dtype=st.sampled_from(["bfloat16", "float32", "int8"]), seed=st.integers(0, 2**31))
def test_a_flipped_bit_is_always_noticed(dtype, seed):
    rng = np.random.default_rng(seed)
    x = make_tensor(rng, "weights", Spec(DTYPES[dtype], (64, 100)))
    stream = Bins().encode(x)["stream"].clone()
    stream[int(rng.integers(stream.numel()))] ^= 1 << int(rng.integers(8))
    with pytest.raises(CorruptFileError):
        Bins().decode({"stream": stream}, Spec.of(x))
    with pytest.raises(CorruptFileError):
        Bins().decode_range({"stream": stream}, Spec.of(x), 10, 20)


def test_streams_that_do_not_fit_are_refused():
    x = make_weights(np.random.default_rng(5), 300, 1000).float()
    stream, spec = Bins().encode(x)["stream"], Spec.of(x)
    more = torch.cat([stream, stream[:1]])
    for bad in [stream[:-1], more, stream[:20], stream[:0], stream.view(torch.int8), stream[None]]:
        with pytest.raises(CorruptFileError):
            Bins().decode({"stream": bad}, spec)
    for shape in [(1 << 57,), (0,)]:
        with pytest.raises(CorruptFileError):
            Bins().decode({"stream": stream}, Spec(torch.float32, shape))
    for short in [b"", b"\1\0\0\0"]:
        with pytest.raises(CorruptFileError):
            Bins().decode(
                {"stream": torch.tensor(list(short), dtype=torch.uint8)}, Spec(x.dtype, (0,))
            )
    with pytest.raises(CorruptFileError):
        Bins().decode({"stream": stream}, Spec(torch.float64, (150, 1000)))


def put(*fields):
    """Concatenate fields of (value, bits)."""
    number = at = 0
    for value, bits in fields:
        number |= value << at
        at += bits
    return number.to_bytes(-(-at // 8), "little")


def small(u):
    length = (u // 2 + 1).bit_length() - 1
    return [(0, length), (1, 1), (u // 2 + 1 - (1 << length), length), (u % 2, 1)]


def head(mapping=0, drop=0, tables=0, width=0):
    return [(mapping, 2), (drop, 6), (tables, 4), (width, 20)]


TWO_BINS = [(1, 1), (0, 1), (0, 1)]
ONE_AND_ONE = [*small(2 * 72), *small(0)]  # 2048 each, guessed from the first
STATES = np.full(8, 1 << 16, "<u4").tobytes()
ROWS = [(0, 30), *small(2 * 80), *small(2 * 80 - 1), *small(0) * 30]
HOSTILE = {
    "mapping": put(*head(mapping=3), *TWO_BINS, *ONE_AND_ONE),
    "cut off in its head": put(*head())[:3],
    "cut off in its bins": put(*head(), *[(1, 1)] * 8)[:5],
    "too many bins": put(*head(), *[(1, 1)] * 600),
    "a drop that bins cannot bear": put(*head(drop=8), *TWO_BINS, *ONE_AND_ONE),
    "a drop with zigzag": put(*head(mapping=2, drop=1), *TWO_BINS, *ONE_AND_ONE),
    "unused tables": put(*head(tables=1), *TWO_BINS, *ONE_AND_ONE, *ONE_AND_ONE),
    "no frequency": put(*head(), *TWO_BINS, *small(0), *small(0)),
    "frequencies beyond all": put(*head(), *TWO_BINS, *small(2 * 80), *small(0)),
    "a code below zero": put(*head(), *TWO_BINS, *small(1), *small(0)),
    "a code above all": put(*head(), *TWO_BINS, *small(2 * 81), *small(0)),
    "an endless number": put(*head(), *TWO_BINS, (0, 64)),
    "bits behind": put(*head(), *TWO_BINS, *ONE_AND_ONE, (1, 1)),
    "bytes behind": put(*head(), *TWO_BINS, *ONE_AND_ONE) + b"\0",
    "narrow rows": put(*head(width=7), *TWO_BINS, *ROWS, *ONE_AND_ONE, *ROWS[1:17]) + STATES,
    "no columns": put(*head(width=8), *TWO_BINS, *ROWS, *ONE_AND_ONE, *ROWS[1:17]),
    "words behind columns": put(*head(width=8), *TWO_BINS, *ROWS, *ONE_AND_ONE) + STATES + b"\0\0",
}


def chunk(words, raw, states=STATES, size=None):
    return (len(words) if size is None else size).to_bytes(4, "little") + states + words + raw


def decode(model, data, items=64, size=None):
    rows = np.array([len(data) if size is None else size, _core.crc32c(model + data)], "<u4")
    out = np.zeros(items, np.uint8)
    _core.bins_decode(rows.view(np.uint8), data, 1, 0, model, out)
    return out


@pytest.mark.parametrize("model", HOSTILE.values(), ids=HOSTILE)
def test_hostile_models_are_refused(model):
    with pytest.raises(ValueError, match=r"model|chunk"):
        decode(model, chunk(b"", b""))


ONE_OF_TWO = put(*head(), *TWO_BINS, *small(2 * 80), *small(2 * 80 - 1))  # 7 raw bits an item
RAW = bytes(875)
BAD_CHUNKS = {
    "empty": b"",
    "cut off in its states": chunk(b"", b"")[:35],
    "fewer words than its header": chunk(b"", RAW, size=876),
    "a word too many": chunk(b"\0\0", RAW),
    "too few raw bits": chunk(b"", RAW[:-1]),
    "too many raw bits": chunk(b"", RAW + b"\0"),
    "states that are too low": chunk(b"", RAW, states=bytes(32)),
    "states that are not used up": chunk(b"", RAW, states=b"\1" * 32),
}


@pytest.mark.parametrize("data", BAD_CHUNKS.values(), ids=BAD_CHUNKS)
def test_hostile_chunks_are_refused(data):
    assert not decode(ONE_OF_TWO, chunk(b"", RAW), items=1000).any()
    with pytest.raises(ValueError, match="chunk"):
        decode(ONE_OF_TWO, data, items=1000)


def test_bits_behind_the_last_item_are_refused():
    assert not decode(ONE_OF_TWO, chunk(b"", bytes(876)), items=1001).any()
    with pytest.raises(ValueError, match="bits"):
        decode(ONE_OF_TWO, chunk(b"", bytes(875) + b"\x80"), items=1001)


def test_chunks_without_a_model_are_copies():
    assert decode(b"", bytes(range(64))).tolist() == list(range(64))
    with pytest.raises(ValueError, match="no model"):
        decode(b"", bytes(63))
    with pytest.raises(ValueError, match="size"):
        decode(b"", bytes(65))
    with pytest.raises(ValueError, match="size"):
        decode(b"", bytes(64), size=65)
    with pytest.raises(ValueError, match="checksum"):
        decode(b"", bytes(64), size=63)
