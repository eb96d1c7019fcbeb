#pragma once
#include "quantize.h"

namespace slimtensors {

// Sums of squares in double precision, the same on every machine. Items are float32, float16 or bfloat16;
// std::invalid_argument if they are not, or are not whole.
double sum_of_squares(Bytes items, Number kind);

// Of the differences between items in the same places.
double squared_distance(Bytes items, Bytes others, Number kind);

double sum_of_squares_avx2(Bytes items, Number kind);
double squared_distance_avx2(Bytes items, Bytes others, Number kind);

}  // namespace slimtensors
