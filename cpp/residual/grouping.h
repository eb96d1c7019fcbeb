#pragma once
#include "core/bytes.h"

namespace slimtensors::residual {

// Sort items stably by the exponents of the floats at the same positions of `by`. Items and floats have the
// same width of 1, 2, 4 or 8 bytes; `mantissa` is the number of bits below the exponent, and the top bit is
// the sign. All spans must have the same size, and exponents at most 11 bits; throws std::invalid_argument
// otherwise.
void group(Bytes items, Bytes by, std::size_t itemsize, unsigned mantissa, MutableBytes out);

// Inverse of group().
void ungroup(Bytes grouped, Bytes by, std::size_t itemsize, unsigned mantissa, MutableBytes items);

}  // namespace slimtensors::residual
