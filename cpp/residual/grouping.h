#pragma once
#include "core/bytes.h"

namespace slimtensors {

// Sort items by the exponents that the floats of `by` have in the same places, smallest first; items of one
// exponent keep their order. Items and floats have the same width of 1, 2, 4 or 8 bytes; `mantissa` is the
// number of bits below the exponent, the top bit is the sign. All spans have the same size. Throws
// std::invalid_argument for anything else, and for exponents of more than 11 bits.
void group(Bytes items, Bytes by, std::size_t itemsize, unsigned mantissa, MutableBytes out);

// Undo it.
void ungroup(Bytes grouped, Bytes by, std::size_t itemsize, unsigned mantissa, MutableBytes items);

}  // namespace slimtensors
