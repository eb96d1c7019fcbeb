#pragma once
#include "quantize/kernels.h"

namespace slimtensors::quantize {

// Sums of squares in double precision, identical on every machine. Items are float32, float16 or bfloat16;
// throws std::invalid_argument otherwise.
double sum_of_squares(Bytes items, FloatType type);

// The same for the differences between corresponding items.
double squared_distance(Bytes items, Bytes others, FloatType type);

// Accumulates in interleaved lanes, so that vector code adds in the same order. Adding parts gives the same
// sum as adding everything at once if all parts but the last have a multiple of 16 items.
class SquareSums {
  public:
    void add(Bytes items, FloatType type);
    void add_differences(Bytes items, Bytes others, FloatType type);
    double total() const;

  private:
    SquareLanes lanes_{};
};

}  // namespace slimtensors::quantize
