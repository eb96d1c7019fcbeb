#pragma once
#include "core/dispatch.h"
#include "trellis/quantize.h"

namespace slimtensors::trellis {

// Bits of each symbol of a table.
struct Prices {
    int low_bits;
    std::array<float, symbols> bits;
};

// One column of a chunk.
struct Column {
    const Prices* even;  // of each row's class; the table for odd states follows
    const std::int16_t* row_classes;
    int first_class, column_class;
    const float* row_steps;
    float column_step, price_of_bit;
    const std::uint8_t* zero;  // nonzero for weights that must be zero; may be null
    std::size_t rows;
};

struct QuantizeKernels {
    // Choose the integers of a column; replace its weights by their errors.
    void (*quantize_column)(const Column& column, float* weights, std::int32_t* integers);
    // later[i] -= sum of factors[j] * errors[j][i] over `count` rows of `errors`.
    void (*subtract)(const float* errors, std::size_t stride, const float* factors, std::size_t count,
                     std::size_t rows, float* later);
};

namespace plain {
extern const QuantizeKernels quantize_kernels;
}
namespace avx2 {
extern const QuantizeKernels quantize_kernels;
}

}  // namespace slimtensors::trellis
