"""Quantized weights: codes, scales and zero points (docs/quantization-formats.md)."""

import numpy as np
from independent.reader.tensor import (
    check,
    e4m3_to_float32,
    from_numbers,
)

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP6 = np.array(
    [i / 8 if i < 16 else (8 + i % 8) * 2.0 ** (i // 8 - 4) for i in range(32)], np.float32
)


def decode(codec, parts, dtype, shape):
    """Return the tensor of codec `quantized`."""
    args, bits = codec["args"], codec["args"].get("num_bits", 8)
    packed = codec.get("packed", True)
    q = parts["q"]
    if args.get("type", "int") == "float":
        codes = unpack_floats(q, shape, bits, packed)
    elif packed and bits < 8:
        codes = unpack_integers(q.numbers().reshape(q.shape), bits, shape[-1])
    else:
        codes = q.numbers()
    return dequantize(codes.reshape(shape), parts, args, dtype, shape)


def unpack_floats(q, shape, bits, packed):
    """Return the numbers that float codes of 4, 6 or 8 bits stand for."""
    if bits == 8:
        return e4m3_to_float32(q.words())
    codes = q.words()
    if packed:
        stream = np.unpackbits(codes, bitorder="little").reshape(-1, bits)
        codes = stream @ (1 << np.arange(bits))
    check(len(codes) == np.prod(shape), "wrong number of codes")
    sign = 1 << bits - 1
    values = (_FP4 if bits == 4 else _FP6)[codes & sign - 1]
    return np.where(codes & sign, -1, 1).astype(np.float32) * values


def unpack_integers(words, bits, columns, *, crosses=True):
    """Return the codes of rows of 32-bit words: a little-endian stream of `bits` bits each.

    Releases before 0.18 began each word with a new code (`crosses=False`).
    """
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    stream = np.unpackbits(raw, axis=-1, bitorder="little")
    if not crosses:
        stream = stream[..., : 32 // bits * bits]
    stream = stream.reshape(*words.shape[:-1], -1)[..., : columns * bits]
    numbers = stream.reshape(*words.shape[:-1], columns, bits) @ (1 << np.arange(bits))
    return numbers - (1 << bits - 1)


def decode_module(tensors, args, dtype):
    """Return the weight of a module, stored as compressed-tensors does; keys are suffixes."""
    bits = args["num_bits"]
    parts = {key.removeprefix("weight_"): x for key, x in tensors.items()}
    stored = parts.get("packed", parts.get("weight"))
    if args["type"] == "float":
        columns = stored.shape[-1] * 8 // bits
        shape = (*stored.shape[:-1], columns)
        codes = unpack_floats(stored, shape, bits, packed=True)
    elif "packed" in parts:
        shape = tuple(parts["shape"].numbers().tolist())
        crosses = choose_layout(stored.shape[-1], bits, shape[-1])
        words = stored.numbers().reshape(stored.shape)
        codes = unpack_integers(words, bits, shape[-1], crosses=crosses)
        zeros = parts.get("zero_point")
        if zeros is not None and zeros.dtype == "int32":
            parts["zero_point"] = unpack_zero_points(zeros, bits, shape[-2], crosses=crosses)
    else:
        shape, codes = stored.shape, stored.numbers()
    return dequantize(codes.reshape(shape), parts, args, dtype, shape)


def choose_layout(words, bits, columns):
    """Return True if codes cross words: the number of words determines it."""
    crosses = words == -(-columns * bits // 32)
    check(crosses or words == -(-columns // (32 // bits)), "wrong number of words")
    return crosses


def unpack_zero_points(stored, bits, rows, *, crosses):
    """Return zero points, which are packed along the rows, in the layout of the codes."""
    words = stored.numbers().reshape(stored.shape).swapaxes(-1, -2)
    zeros = unpack_integers(words, bits, rows, crosses=crosses).swapaxes(-1, -2)
    return from_numbers("int8", zeros.shape, zeros)


def dequantize(codes, parts, args, dtype, shape):
    """Return (code - zero point) · scale, rounded to the dtype of the scale, then to `dtype`."""
    scale = spread(read_scale(parts), parts, args, shape)
    if "zero_point" in parts:
        zero = parts["zero_point"]
        numbers = e4m3_to_float32(zero.words()) if zero.dtype == "float8_e4m3fn" else zero.numbers()
        zeros = spread(numbers.reshape(zero.shape), parts, args, shape)
        codes = codes.astype(scale.dtype) - zeros.astype(scale.dtype)
        if parts["scale"].item_bytes > 1:  # the difference has the dtype of the scale
            codes = from_numbers(parts["scale"].dtype, shape, codes).numbers().reshape(shape)
    product = codes.astype(scale.dtype) * scale
    if "global_scale" not in parts and parts["scale"].item_bytes > 1:
        product = from_numbers(parts["scale"].dtype, shape, product).numbers().reshape(shape)
    return from_numbers(dtype, shape, product)


def read_scale(parts):
    """Return the scales, in float32 unless they are float64."""
    scale = parts["scale"]
    numbers = scale.numbers()
    if scale.dtype == "uint8":  # MX: a power of two
        numbers = np.ldexp(np.float32(1), numbers.astype(np.int32) - 127)
    if scale.dtype != "float64":
        numbers = numbers.astype(np.float32)
    if "global_scale" in parts:
        numbers = numbers / parts["global_scale"].numbers().astype(np.float32)
    return numbers.reshape(scale.shape)


def spread(params, parts, args, shape):
    """Return one parameter per item."""
    rows, columns = shape[-2:]
    strategy = args.get("strategy")
    if params.size == 1:
        return params.reshape(())
    if "g_idx" in parts and (parts["g_idx"].numbers() >= 0).all():
        return params[..., parts["g_idx"].numbers()]
    if strategy == "block":
        height, width = args["block_structure"]
        return params.repeat(height, axis=-2)[..., :rows, :].repeat(width, axis=-1)[..., :columns]
    return params.repeat(columns // params.shape[-1], axis=-1)
