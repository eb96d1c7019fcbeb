#pragma once
#include <string_view>

#include "core/floats.h"

// Rounding weights to codes and back. All functions throw std::invalid_argument for inconsistent sizes,
// before anything is written.
namespace slimtensors::quantize {

// How codes are stored: integers, one per byte; integers minus the smallest one, packed without gaps into
// rows of whole 32-bit words; 4-bit floats, two per byte; 8-bit floats (e4m3).
struct CodeFormat {
    enum Kind : std::uint8_t { ints, packed, fp4, fp8 } kind;
    unsigned bits = 8;
};

// Parse the name of a torch dtype, or of a kind of codes.
FloatType parse_float_type(std::string_view name);
CodeFormat parse_code_format(std::string_view kind, unsigned bits);

// The items of a matrix that share a scale: `columns` consecutive items of a row, in `rows` consecutive rows.
// Blocks at the edges may be smaller.
struct Blocks {
    std::size_t row;  // items per row of the matrix
    std::size_t columns, rows;
};

// One scale per block, row by row, each divided by `divisor` before use. Zero points are int8, or empty.
struct Scales {
    Bytes values;
    FloatType type;
    Blocks blocks;
    float divisor = 1.0f;
    Bytes zero_points = {};
};

// Write the minimum and maximum of every run of `columns` items of a row. Infinity and NaN compare beyond all
// numbers, so that they are never hidden.
void find_ranges(Bytes items, FloatType type, std::size_t row, std::size_t columns, MutableBytes low,
                 MutableBytes high);

// Divide, add the zero point, clamp, round half to even; the first two results are rounded to `compute_type`.
// Returns whether all items are finite; the codes of others are unspecified.
bool quantize(Bytes items, FloatType type, FloatType compute_type, const Scales& scales, CodeFormat format,
              MutableBytes codes);

// Subtract the zero point, multiply, round to `type`.
void dequantize(Bytes codes, CodeFormat format, const Scales& scales, FloatType type, MutableBytes items);

// Sums of squares: of the difference between items and their codes, and of the items. Equal to the result of
// dequantizing and comparing, without a dequantized copy.
struct RoundingLoss {
    double distance, items;
};
RoundingLoss rounding_loss(Bytes items, FloatType type, Bytes codes, CodeFormat format, const Scales& scales);

// Convert between one code per byte and packed codes.
void pack_codes(Bytes codes, unsigned bits, std::size_t row, MutableBytes words);
void unpack_codes(Bytes words, unsigned bits, std::size_t row, MutableBytes codes);

}  // namespace slimtensors::quantize
