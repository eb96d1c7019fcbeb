"""Codecs: the parts of a tensor to its items (docs/format.md#codecs)."""

import numpy as np
from independent.reader import bins, huffman, masks, quantized, trellis
from independent.reader.tensor import ITEM_BYTES, Tensor, check, from_numbers

_PAIRS = [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
"""Positions of the kept items: 0011, 0101, 0110, 1001, 1010, 1100, lowest bit first."""


def decode(codec, parts, dtype, shape):
    """Return the tensor, or the named parts of a quantized tensor of torch."""
    name = codec["name"]
    count = int(np.prod(shape, dtype=np.int64))
    match name:
        case "dense":
            return Tensor(dtype, shape, parts["data"].data)
        case "bitmask":
            return decode_bitmask(parts, dtype, shape, count)
        case "bitmask24":
            return decode_bitmask24(parts, dtype, shape, count)
        case "huffman":
            return huffman.decode(parts, dtype, shape, count)
        case "bins":
            return bins.decode(parts, dtype, shape, count)
        case "trellis":
            layout = {key: codec[key] for key in ("row_dims", "transposed") if key in codec}
            return trellis.decode(parts, dtype, shape, count, **layout)
        case "gaps":
            return masks.decode_gaps(parts, dtype, shape, count)
        case "density":
            return masks.decode_density(parts, dtype, shape, count)
        case "int":
            per_row = codec.get("per_row", False)
            return scale_integers(parts, dtype, shape, count // shape[0] if per_row else count)
        case "int-blocks":
            return scale_integers(parts, dtype, shape, codec.get("block", 64))
        case "quantized":
            return quantized.decode(codec, parts, dtype, shape)
        case "dynamic-inputs":
            return parts["weight"]
        case "torch-quantized":
            return {"dtype": dtype, **parts}
    raise AssertionError(f"unknown codec {name}")


def decode_bitmask(parts, dtype, shape, count):
    """Put the values where the mask has ones."""
    mask = np.unpackbits(parts["mask"].words(), count=None, bitorder="little")
    check(len(mask) == -(-count // 8) * 8 and not mask[count:].any(), "wrong size of the mask")
    return scatter(mask[:count].astype(bool), parts["values"], dtype, shape)


def scatter(mask, values, dtype, shape):
    """Return the tensor with `values` where `mask` is true, and zeros."""
    check(values.dtype == dtype and values.count == mask.sum(), "wrong number of values")
    item = ITEM_BYTES.get(dtype, 1)
    items = np.zeros((len(mask), item), np.uint8)
    items[mask] = np.frombuffer(values.data, np.uint8).reshape(-1, item)
    return Tensor(dtype, shape, items.tobytes())


def decode_bitmask24(parts, dtype, shape, count):
    """Put two values into each group of four."""
    groups = count // 4
    codes = parts["codes"].words().astype(np.int64)
    digits = np.stack([codes % 6, codes // 6 % 6, codes // 36], axis=1).reshape(-1)[:groups]
    check(len(digits) == groups and (digits < 6).all(), "invalid codes")
    mask = np.zeros((groups, 4), bool)
    np.put_along_axis(mask, np.array(_PAIRS)[digits].reshape(-1, 2), True, axis=1)
    return scatter(mask.reshape(-1), parts["values"], dtype, shape)


def scale_integers(parts, dtype, shape, block):
    """Return integers times the scale of their block, in float32, rounded to the dtype."""
    q, scale = parts["q"].numbers().astype(np.float32), parts["scale"].numbers()
    check(parts["q"].shape == shape and parts["scale"].dtype == "float32", "wrong parts")
    check(len(scale) == (-(-len(q) // block) if len(q) else len(scale)), "wrong number of scales")
    scales = np.repeat(scale, block)[: len(q)]
    return from_numbers(dtype, shape, q * scales)
