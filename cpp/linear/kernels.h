#pragma once
#include "core/bytes.h"
#include "core/dispatch.h"

namespace slimtensors::linear {

constexpr unsigned panel_rows = 6;           // times the inputs per call: as many sums as there are registers
constexpr unsigned max_inputs = 4;           // per call, of any instruction set
constexpr std::size_t piece_columns = 1024;  // a panel of this width, as floats, fits into the L1 cache
// Two of the widest vectors; pieces are padded with zeros to a multiple of this.
constexpr std::size_t column_multiple = 32;
// Distance of the rows of a panel; a power of two would cause cache conflicts.
constexpr std::size_t row_stride = piece_columns + 16;

// The codes of one row represent `(code - zero) * scale`, with one zero and one scale per block of columns.
// 4-bit codes count from 0; 8-bit floats have no zeros.
struct RowScales {
    const float* scales;
    const std::int32_t* zeros;
    std::size_t block;
};

// Position of 4-bit code i after decoding: in every two vectors, first the even codes, then the odd ones.
// Static, so that no code is shared between instruction sets.
static constexpr std::size_t deinterleave(std::size_t i, std::size_t width) {
    const std::size_t within = i % (2 * width);
    return i - within + within % 2 * width + within / 2;
}

// Convert the codes of columns `begin`, a multiple of `piece_columns`, to `end` to floats.
using Decode = void (*)(const std::uint8_t* codes, const RowScales& row, std::size_t begin, std::size_t end,
                        float* floats);

// Add the products of `length` floats of each row and each input to `sums`, which are stored row by row for
// each input. Consecutive rows are `row_stride` floats apart, inputs `stride`.
using Multiply = void (*)(const float* rows, const float* inputs, std::size_t stride, std::size_t length,
                          float* sums);

// Decode and multiply, with bitwise the same result, without storing floats: for `panel_rows` rows whose
// codes are `row_bytes` apart and whose scales are `across` apart. Blocks and the columns `begin` to `end`
// are multiples of `column_multiple`.
using MultiplyCodes = void (*)(const std::uint8_t* codes, std::size_t row_bytes, const RowScales& rows,
                               std::size_t across, std::size_t begin, std::size_t end, const float* inputs,
                               std::size_t stride, float* sums);

struct CodeKernels {
    Decode decode;
    MultiplyCodes multiply[max_inputs + 1];  // by the number of inputs
};

struct Kernels {
    CodeKernels ints, nibbles, fp8;
    std::size_t width;  // of vectors
    unsigned inputs_per_call;
    Multiply multiply[max_inputs + 1];  // by the number of inputs
};

namespace plain {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace slimtensors::linear
