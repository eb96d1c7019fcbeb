#pragma once
#include "bytes.h"

namespace slimtensors {

// The difference between two arrays of numbers of 1, 2, 4 or 8 bytes, as unsigned numbers of the same width:
// 0 where they are equal, and small where they are close. The bits of floats are first mapped to integers
// that have the order of the floats, so that neighbours differ by one across every exponent and across zero;
// then b - a is taken modulo 2^bits and written in zigzag: 0, -1, 1, -2, … become 0, 1, 2, 3, …. All spans
// have the same size; throws std::invalid_argument otherwise.
void difference(Bytes items, Bytes base, std::size_t itemsize, bool floats, MutableBytes out);

// Undo it.
void add_difference(Bytes difference, Bytes base, std::size_t itemsize, bool floats, MutableBytes items);

}  // namespace slimtensors
