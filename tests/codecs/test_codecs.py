import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import bits, keep_two_of_four, raw_bytes, same_bits, tensors, two_four_tensors

from slimtensors import codecs
from slimtensors.codecs import Bitmask, Bitmask24, Dense, Huffman, Int, IntBlocks, bitmask
from slimtensors.codecs.plan import (
    Encoded,
    Plan,
    chain,
    decode,
    describe,
    encode,
    encode_measured,
    rebuild,
    relative_error,
)
from slimtensors.errors import ConfigError, CorruptFileError, FormatError, UnknownCodecError
from slimtensors.parallel import Workers, serially
from slimtensors.tensor import DTYPES, Spec, relative_distance

FITTING = {"bitmask24": two_four_tensors()}
"""Tensors for codecs that cannot encode every tensor."""

LOSSY = {name for name in codecs.names() if getattr(codecs.find(name), "lossy", False)}
GENERAL = [name for name in codecs.names() if name not in {*LOSSY, "torch-quantized"}]
"""Lossless codecs for any tensor; `torch-quantized` is for the torch quantized dtypes only."""

every_codec = pytest.mark.parametrize("name", GENERAL)
relaxed = settings(deadline=None, max_examples=100)


def fitting(name):
    return FITTING.get(name, tensors())


def flat(seed, count, dtype=torch.float32, density=0.5):
    """Return items that every codec can encode."""
    return keep_two_of_four(bits(seed, count, dtype, density), seed)


@every_codec
@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_lossless_codecs_keep_every_bit_and_leave_their_input_alone(name, data):
    codec, x = codecs.find(name)(), data.draw(fitting(name))
    before = raw_bytes(x)
    back = codec.decode(codec.encode(x), Spec.of(x))
    assert same_bits(back, x)
    assert back.is_contiguous()
    assert raw_bytes(x) == before


@every_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_survives_every_codec(name, dtype):
    x = flat(7, 24 * 40, DTYPES[dtype]).view(24, 40)
    codec = codecs.find(name)()
    assert same_bits(codec.decode(codec.encode(x), Spec.of(x)), x)


@every_codec
@given(data=st.data())
@relaxed
def test_parts_are_plain_tensors_that_a_result_does_not_share(name, data):
    codec, x = codecs.find(name)(), data.draw(fitting(name))
    parts = codec.encode(x)
    back = codec.decode(parts, Spec.of(x))
    assert all(type(part) is torch.Tensor and part.is_contiguous() for part in parts.values())
    memory = {part.untyped_storage().data_ptr() for part in parts.values() if part.numel()}
    assert back.untyped_storage().data_ptr() not in memory or not back.numel()


@pytest.mark.parametrize(
    "plan",
    [
        chain(Dense()),
        chain(Bitmask(), values=Huffman()),
        chain(Int(8), q=Huffman()),
        chain(IntBlocks(16), q=Huffman(), scale=Huffman()),
        chain(
            Bitmask(), mask=Huffman(), values=chain(Int(8), q=chain(Bitmask(), values=Huffman()))
        ),
    ],
    ids=str,
)
def test_measuring_a_plan_s_error_changes_nothing_of_what_it_encodes(plan):
    x = flat(3, 40 * 24).view(40, 24).nan_to_num(0.5, 0.5, 0.5).clamp(-4, 4)
    encoded, wanted = encode_measured(plan, x)[0], encode(plan, x)
    assert encoded.plan == wanted.plan == plan
    for (name, leaf), (other, same) in zip(encoded.leaves(), wanted.leaves(), strict=True):
        assert name == other
        assert same_bits(leaf, same)
    error = relative_distance(decode(wanted), x) if plan.is_lossy else None
    assert encode_measured(plan, x)[1] == relative_error(plan, x) == error


def test_measuring_refuses_unknown_parts():
    with pytest.raises(ConfigError, match="has no part 'qq'"):
        encode_measured(chain(IntBlocks(), qq=Huffman()), torch.ones(4, 4))


@given(x=tensors())
@relaxed
def test_bitmask_stores_a_bit_for_each_item_and_the_nonzero_items(x):
    parts = Bitmask().encode(x)
    items = [raw_bytes(x)[i : i + x.element_size()] for i in range(0, x.nbytes, x.element_size())]
    mask = int.from_bytes(raw_bytes(parts["mask"]), "little")
    assert [bool(mask >> i & 1) for i in range(x.numel())] == [any(item) for item in items]
    assert mask < 1 << x.numel()
    assert raw_bytes(parts["values"]) == b"".join(item for item in items if any(item))
    assert parts["values"].dtype == x.dtype


@given(x=tensors())
@relaxed
def test_bitmask24_refuses_exactly_the_tensors_that_are_not_24(x):
    size = x.element_size()
    raw = raw_bytes(x)
    nonzero = [any(raw[i : i + size]) for i in range(0, len(raw), size)]
    fits = x.dim() > 0 and x.shape[-1] % 4 == 0
    fits = fits and all(sum(nonzero[i : i + 4]) <= 2 for i in range(0, len(nonzero), 4))
    if fits:
        assert same_bits(Bitmask24().decode(Bitmask24().encode(x), Spec.of(x)), x)
    else:
        with pytest.raises(ConfigError, match="2:4"):
            Bitmask24().encode(x)


@given(x=two_four_tensors())
@relaxed
def test_bitmask24_stores_half_of_the_items_and_a_byte_for_three_groups(x):
    parts = Bitmask24().encode(x)
    assert parts["values"].shape == (x.numel() // 2,)
    assert parts["codes"].numel() == math.ceil(2 * math.ceil(x.numel() / 8) / 3)


@every_codec
def test_a_configuration_round_trips_through_json(name):
    codec = codecs.find(name)()
    data = json.loads(json.dumps(codecs.to_json(codec)))
    assert data["name"] == name
    assert codecs.from_json(data) == codec


@every_codec
def test_an_option_that_a_codec_does_not_have_is_refused(name):
    with pytest.raises(FormatError, match=r"no option 'levle'"):
        codecs.from_json({"name": name, "levle": 3})


def test_an_unknown_codec_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownCodecError, match="'bitmsk'; did you mean 'bitmask'"):
        codecs.from_json({"name": "bitmsk"})
    with pytest.raises(UnknownCodecError, match=r"known: .*dense"):
        codecs.find("zzz")


def test_a_second_codec_cannot_take_a_name():
    class Other:
        name = "bitmask"

    with pytest.raises(ConfigError, match="'bitmask' is already registered"):
        codecs.register(Other)
    assert codecs.find("bitmask") is Bitmask
    assert codecs.register(Bitmask) is Bitmask


# Plans


def extend(inner):
    return st.one_of(
        st.builds(lambda a, b: chain(Bitmask(), mask=a, values=b), inner, inner),
        st.builds(lambda a: chain(Bitmask(), values=a), inner),
        st.builds(lambda a: chain(Dense(), data=a), inner),
    )


plans = st.recursive(st.sampled_from([Plan(Bitmask()), Plan(Dense())]), extend, max_leaves=6)
plans_24 = st.builds(lambda a, b: chain(Bitmask24(), codes=a, values=b), plans, plans)


def through_json(encoded):
    """Write an encoded tensor as JSON and bytes, and parse it again."""
    at, body = {}, b""
    for path, leaf in encoded.leaves():
        raw = raw_bytes(leaf)
        at[path] = len(body), len(body) + len(raw)
        body += raw
    text = json.dumps(describe(encoded, at))
    return rebuild(json.loads(text), memoryview(bytearray(body)))


@given(x=tensors(), plan=plans)
@relaxed
def test_trees_of_codecs_keep_every_bit_through_their_description(x, plan):
    encoded = through_json(encode(plan, x))
    assert encoded.plan == plan
    assert encoded.spec == Spec.of(x)
    assert same_bits(decode(encoded), x)


@given(x=two_four_tensors(), plan=plans_24)
@relaxed
def test_trees_over_two_of_four_keep_every_bit(x, plan):
    assert same_bits(decode(through_json(encode(plan, x))), x)


@given(plan=st.one_of(plans, plans_24))
def test_a_plan_round_trips_through_json(plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_prints_as_its_codecs():
    plan = chain(Bitmask(), mask=Dense(), values=chain(Bitmask(), values=Dense()))
    assert str(plan) == "bitmask(mask=dense, values=bitmask(values=dense))"
    assert str(Plan(Bitmask())) == "bitmask"


def test_a_plan_for_an_unknown_part_is_refused():
    with pytest.raises(ConfigError, match="'bitmask' has no part 'valuse', only mask, values"):
        encode(chain(Bitmask(), valuse=Dense()), torch.zeros(3))


@pytest.mark.parametrize(
    "data", [{}, {"codec": "bitmask"}, {"codec": {"name": "bitmask"}, "then": []}]
)
def test_an_invalid_plan_is_refused(data):
    with pytest.raises(FormatError, match="invalid plan"):
        Plan.from_json(data)


# Threads


@pytest.fixture(scope="module")
def workers():
    with Workers(3) as threads:
        yield threads


@every_codec
@given(data=st.data())
@relaxed
def test_chunks_on_threads_give_the_same_parts_and_the_same_tensor(name, workers, data):
    x = data.draw(fitting(name))
    with pytest.MonkeyPatch.context() as patch:
        whole = encode(Plan(codecs.find(name)()), x, serially)
        patch.setattr(bitmask, "_CHUNK", 16)
        shared = encode(Plan(codecs.find(name)()), x, workers.each)
        assert [n for n, _ in shared.leaves()] == [n for n, _ in whole.leaves()]
        assert all(
            same_bits(a, b) for (_, a), (_, b) in zip(shared.leaves(), whole.leaves(), strict=True)
        )
        assert same_bits(decode(whole, workers.each), x)
        assert same_bits(decode(whole, serially), x)


@every_codec
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("extra", [0, 4])
def test_a_tensor_of_several_chunks_keeps_every_bit(name, workers, dtype, extra):
    x = flat(3, (5 << 19) + extra, dtype)
    plan = Plan(codecs.find(name)())
    shared = encode(plan, x, workers.each)
    assert same_bits(decode(shared, workers.each), x)
    for (_, a), (_, b) in zip(shared.leaves(), encode(plan, x).leaves(), strict=True):
        assert same_bits(a, b)


# Damage


def damaged(parts, name, part):
    return decode(Encoded(codecs.find(name)(), Spec(torch.float32, (12, 16)), {**parts, **part}))


CASES = [
    (name, part)
    for name, parts in {
        "dense": ["data"],
        "bitmask": ["mask", "values"],
        "bitmask24": ["codes", "values"],
    }.items()
    for part in parts
]


@pytest.mark.parametrize(("name", "part"), CASES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda x: x[:-1],
        lambda x: x[1:],
        lambda x: x[:0],
        lambda x: torch.cat([x, x[-1:]]),
        lambda x: torch.cat([x, x]),
        lambda x: x.flatten().double().repeat(16),
        lambda x: x[:0].view(0, 5),
        lambda x: x[0],
    ],
)
def test_a_part_of_the_wrong_size_is_corrupt(name, part, damage):
    parts = codecs.find(name)().encode(flat(1, 192).view(12, 16))
    with pytest.raises(CorruptFileError):
        damaged(parts, name, {part: damage(parts[part])})


@pytest.mark.parametrize(("name", "part"), CASES)
def test_a_missing_part_is_corrupt(name, part):
    parts = codecs.find(name)().encode(flat(1, 192).view(12, 16))
    del parts[part]
    with pytest.raises(CorruptFileError, match=f"{name!r}: part '{part}' is missing"):
        damaged(parts, name, {})


@pytest.mark.parametrize(("name", "part"), [("bitmask", "mask"), ("bitmask24", "codes")])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e5m2, torch.int16])
def test_positions_of_the_wrong_dtype_are_corrupt(name, part, dtype):
    parts = codecs.find(name)().encode(flat(1, 192).view(12, 16))
    assert parts[part].numel() % 2 == 0
    with pytest.raises(CorruptFileError):
        damaged(parts, name, {part: parts[part].view(dtype)})


@pytest.mark.parametrize(("name", "part"), CASES)
@pytest.mark.parametrize("shape", [(1, -1), (-1, 1), (1, 1, -1)])
def test_a_part_of_another_shape_but_the_right_size_is_corrupt_or_harmless(name, part, shape):
    x = flat(1, 192).view(12, 16)
    parts = codecs.find(name)().encode(x)
    try:
        back = damaged(parts, name, {part: parts[part].view(shape)})
    except CorruptFileError:
        return
    assert same_bits(back, x)


def test_any_flipped_bit_in_a_mask_is_corrupt():
    parts = Bitmask().encode(flat(1, 192).view(12, 16))
    for bit in range(192):
        mask = parts["mask"].clone()
        mask.view(-1)[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFileError):
            damaged(parts, "bitmask", {"mask": mask})


@pytest.mark.parametrize("chunk", [1 << 20, 16])
def test_a_bit_past_the_end_of_a_mask_is_corrupt(chunk, monkeypatch):
    monkeypatch.setattr(bitmask, "_CHUNK", chunk)
    x = torch.ones(1, 91)
    parts = Bitmask().encode(x)
    parts["mask"][0] ^= 1
    parts["mask"][-1] ^= 128
    with pytest.raises(CorruptFileError):
        decode(Encoded(Bitmask(), Spec.of(x), parts))


@pytest.mark.parametrize("chunk", [1 << 20, 16])
def test_more_or_fewer_values_than_mask_bits_are_corrupt(chunk, monkeypatch, workers):
    monkeypatch.setattr(bitmask, "_CHUNK", chunk)
    x = flat(1, 192)
    parts = Bitmask().encode(x)
    for values in (parts["values"][1:], torch.cat([parts["values"], parts["values"][:1]])):
        with pytest.raises(CorruptFileError):
            decode(Encoded(Bitmask(), Spec.of(x), {**parts, "values": values}), workers.each)


@every_codec
@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_decoding_any_parts_returns_a_tensor_or_raises_corrupt_file_error(name, data):
    x = data.draw(fitting(name))
    parts = codecs.find(name)().encode(x)
    part = data.draw(st.sampled_from(sorted(parts)))
    parts[part] = data.draw(
        st.one_of(
            tensors(),
            st.integers(0, 2**32).map(lambda seed: noise_like(parts[part], seed)),
        )
    )
    like = data.draw(st.sampled_from([Spec.of(x), Spec(x.dtype, (x.numel() + 1,))]))
    try:
        back = decode(Encoded(codecs.find(name)(), like, parts))
    except CorruptFileError:
        return
    assert Spec.of(back) == like


def noise_like(part, seed):
    return bits(seed, part.numel(), part.dtype, 0.9).view(part.shape)


@every_codec
@pytest.mark.parametrize("items", [1 << 40, 1 << 50, 3 << 55])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_shape_beyond_memory_is_corrupt_before_anything_is_allocated(name, items, dtype):
    parts = codecs.find(name)().encode(flat(1, 192, dtype).view(12, 16))
    for like in (Spec(dtype, (items,)), Spec(dtype, (items >> 8, 256)), Spec(dtype, (items, 0, 8))):
        with pytest.raises(CorruptFileError):
            decode(Encoded(codecs.find(name)(), like, parts))


# What rebuild refuses


def description(x=None):
    x = flat(1, 64) if x is None else x
    encoded = encode(chain(Bitmask(), values=Dense()), x)
    leaves = dict(encoded.leaves())
    at, end = {}, 0
    for path, leaf in leaves.items():
        at[path] = end, end + leaf.nbytes
        end += leaf.nbytes
    return describe(encoded, at), memoryview(bytearray(end))


def changed(data, path, value):
    data = json.loads(json.dumps(data))
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["codec"], "bitmask"),
        (["codec"], None),
        (["codec"], {"name": "none"}),
        (["codec"], {"name": ["bitmask"]}),
        (["codec"], {"name": "bitmask", "level": 1}),
        (["dtype"], "float33"),
        (["dtype"], ["float32"]),
        (["dtype"], None),
        (["shape"], [-1]),
        (["shape"], [1.5]),
        (["shape"], [True]),
        (["shape"], "64"),
        (["shape"], None),
        (["shape"], [1 << 70]),
        (["shape"], [1 << 40, 1 << 40, 0]),
        (["shape"], [1] * 65),
        (["parts"], []),
        (["parts", "mask"], None),
        (["parts", "mask"], {}),
        (["parts", "mask", "at"], None),
        (["parts", "mask", "at"], [0]),
        (["parts", "mask", "at"], [-8, 0]),
        (["parts", "mask", "at"], [8, 0]),
        (["parts", "mask", "at"], [0, 1 << 60]),
        (["parts", "mask", "at"], ["0", "8"]),
        (["parts", "mask", "at"], [0.0, 8.0]),
        (["parts", "mask", "at"], [0, 7]),
        (["parts", "mask", "dtype"], "int64"),
        (["parts", "mask", "shape"], [9]),
        (["parts", "values", "codec"], {"name": "bitmask", "x": 1}),
        (["parts", "values", "parts"], None),
    ],
)
def test_a_description_that_does_not_fit_is_a_format_error(path, value):
    data, payload = description()
    rebuild(data, payload)
    with pytest.raises(FormatError):
        rebuild(changed(data, path, value), payload)


def test_a_tree_that_is_too_deep_is_corrupt():
    data, payload = description()
    for _ in range(40):
        data = {**data, "parts": {"data": data}}
    with pytest.raises(CorruptFileError):
        rebuild(data, payload)
