#pragma once
#include "core/bytes.h"

namespace slimtensors::residual {

// The order in which differences are counted.
enum class Order {
    integers,  // unsigned integers
    floats,    // floats: adjacent floats differ by one, across exponents and across zero
    outward,   // floats, but a difference is positive if it points away from zero as seen from the base
};

// Write the difference of two arrays of items of 1, 2, 4 or 8 bytes as unsigned numbers of the same width: 0
// where equal, small where close. Floats are first mapped to integers of the same order; then b - a modulo
// 2^bits is written in zigzag order: 0, -1, 1, -2, … become 0, 1, 2, 3, …. All spans must have the same size;
// throws std::invalid_argument otherwise.
void difference(Bytes items, Bytes base, std::size_t itemsize, Order order, MutableBytes out);

// Inverse of difference().
void add_difference(Bytes difference, Bytes base, std::size_t itemsize, Order order, MutableBytes items);

}  // namespace slimtensors::residual
