#pragma once
#include "core/bytes.h"

namespace slimtensors {

constexpr unsigned rows_at_once = 6;     // with the inputs at once, as many sums as there are registers for
constexpr unsigned most_inputs = 4;      // at once, of any instruction set
constexpr std::size_t one_piece = 1024;  // columns of so many rows, as floats, stay in the nearest cache
constexpr std::size_t whole = 32;  // two of the widest vectors: pieces end in zeros up to a multiple of this
constexpr std::size_t apart = one_piece + 16;  // of rows; powers of two would compete for places in a cache

// What the codes of one row mean: `(code - zero) * scale`, with one zero and one scale per block of columns.
// Nibbles count from 0; 8-bit floats have no zeros.
struct RowScales {
    const float* scales;
    const std::int32_t* zeros;
    std::size_t block;
};

// Where the floats of nibbles go: those of two vectors, first the even, then the odd ones.
static inline std::size_t sorted(std::size_t i, std::size_t width) {
    const std::size_t within = i % (2 * width);
    return i - within + within % 2 * width + within / 2;
}

// Turn the codes of columns `begin`, a multiple of `one_piece`, to `end` into floats.
using Decode = void (*)(const std::uint8_t* codes, const RowScales& row, std::size_t begin, std::size_t end,
                        float* floats);

// Add to `sums`, which lie row by row for each input, the products of `length` floats of each row and each
// input. Rows lie `apart`, inputs `stride`.
using Multiply = void (*)(const float* rows, const float* inputs, std::size_t stride, std::size_t length,
                          float* sums);

// Do what decoding and then multiplying does, to the same bits, without floats in between: for `rows_at_once`
// rows, whose codes lie `row_bytes` apart and whose scales `across`. A block, and the columns from `begin` to
// `end`, are multiples of `whole`.
using MultiplyCodes = void (*)(const std::uint8_t* codes, std::size_t row_bytes, const RowScales& rows,
                               std::size_t across, std::size_t begin, std::size_t end, const float* inputs,
                               std::size_t stride, float* sums);

struct CodeKernels {
    Decode decode;
    MultiplyCodes multiply[most_inputs + 1];  // by the number of inputs
};

struct ProductKernels {
    CodeKernels ints, nibbles, fp8;
    std::size_t width;  // of vectors
    unsigned inputs_at_once;
    Multiply multiply[most_inputs + 1];  // by the number of inputs
};

const ProductKernels& product_kernels_plain();
const ProductKernels& product_kernels_avx2();
const ProductKernels& product_kernels_avx512();

}  // namespace slimtensors
