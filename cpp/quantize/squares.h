#pragma once
#include <array>

#include "quantize/quantize.h"

namespace slimtensors {

// Sums of squares in double precision, the same on every machine. Items are float32, float16 or bfloat16;
// std::invalid_argument if they are not, or are not whole.
double sum_of_squares(Bytes items, Number kind);

// Of the differences between items in the same places.
double squared_distance(Bytes items, Bytes others, Number kind);

// Sums that take turns, so that vector code adds in the same order. What is added in pieces gives the same
// sum as all at once if all pieces but the last have a multiple of 16 items.
class SquareSums {
  public:
    using Lanes = std::array<double, 16>;

    void add(Bytes items, Number kind);
    void add_differences(Bytes items, Bytes others, Number kind);
    double total() const;

  private:
    Lanes lanes_{};
};

// The inner loops for one instruction set.
struct SquaresKernels {
    void (*add)(Bytes items, Number kind, SquareSums::Lanes& lanes);
    void (*add_differences)(Bytes items, Bytes others, Number kind, SquareSums::Lanes& lanes);
};

const SquaresKernels& squares_kernels_plain();
const SquaresKernels& squares_kernels_avx2();

}  // namespace slimtensors
