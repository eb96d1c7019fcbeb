#pragma once
#include <string_view>

#include "core/bytes.h"

namespace slimtensors {

// Floats that weights and scales are stored in. `e8m0` is a power of two, its exponent plus 127.
enum class Number : std::uint8_t { f32, f16, bf16, e4m3, e8m0 };

// Codes of a quantized weight: integers, one per byte; integers less their lowest, packed without gaps into
// rows of whole 32-bit words; 4-bit floats, two per byte; 8-bit floats (e4m3).
struct Codes {
    enum Kind : std::uint8_t { ints, packed, fp4, fp8 } kind;
    unsigned bits = 8;
};

Number number_named(std::string_view name);
Codes codes_named(std::string_view name, unsigned bits);

// Which items of a matrix share a scale: `columns` neighbours in a row, in `rows` rows below each other. What
// is left at the edges is a smaller block.
struct Blocks {
    std::size_t row;  // items of a row of the matrix
    std::size_t columns, rows;
};

// One scale per block, row by row. Each is divided by `divisor` before use. Zero points are int8, or none.
struct Scales {
    Bytes values;
    Number kind;
    float divisor;
    Bytes zero_points;
};

// All functions throw std::invalid_argument, before they write anything, when sizes do not fit each other.

// The least and the greatest item of every run of `columns` items of a row. Infinity and NaN lie beyond all
// numbers, so that they show.
void find_ranges(Bytes items, Number kind, std::size_t row, std::size_t columns, MutableBytes low,
                 MutableBytes high);

// Divide, add the zero point, clamp, round half to even; after each of the first two steps the result is
// rounded to `steps`. Returns whether all items are finite; codes of others are unspecified.
bool quantize(Bytes items, Number kind, Number steps, const Scales& scales, const Blocks& blocks, Codes to,
              MutableBytes codes);

// Subtract the zero point, multiply, round to `kind`.
void dequantize(Bytes codes, Codes from, const Scales& scales, const Blocks& blocks, Number kind,
                MutableBytes items);

// What rounding cost, as sums of squares: of how far codes are from the items they were made of, and of
// these. The same as to dequantize and to compare, without memory for what is compared.
struct Loss {
    double distance, items;
};
Loss rounding_loss(Bytes items, Number kind, Bytes codes, Codes from, const Scales& scales,
                   const Blocks& blocks);

// Codes of `bits` bits between one per byte and packed.
void pack_codes(Bytes codes, unsigned bits, std::size_t row, MutableBytes words);
void unpack_codes(Bytes words, unsigned bits, std::size_t row, MutableBytes codes);

}  // namespace slimtensors
