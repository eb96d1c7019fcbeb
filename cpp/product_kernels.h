#pragma once
#include "bytes.h"

namespace slimtensors {

// A few inputs, as the loops want them.
struct Inputs {
    const float* plain;  // one after the other, `columns` items each
    const float*
        sorted;  // for nibbles: of every 16 from the start of a block, first the even, then the odd ones
    std::size_t columns;
    std::size_t block;  // columns that share a scale
};

constexpr unsigned most_inputs = 4;  // that are multiplied at once
constexpr std::size_t at_once = 32;  // codes; what is left of a block is multiplied one by one

// The sum of (code - zero) * scale * input over a row, for each of several inputs; one zero and one scale per
// block. Nibbles count from 0; 8-bit floats have no zeros.
using RowProduct = void (*)(const std::uint8_t* codes, const float* scales, const std::int32_t* zeros,
                            const Inputs& inputs, float* sums);

// By the number of inputs.
struct ProductKernels {
    RowProduct ints[most_inputs + 1];
    RowProduct nibbles[most_inputs + 1];
    RowProduct fp8[most_inputs + 1];
};

const ProductKernels& product_kernels_plain();
const ProductKernels& product_kernels_avx2();

}  // namespace slimtensors
