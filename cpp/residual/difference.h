#pragma once
#include "core/bytes.h"

namespace slimtensors {

// What it means that one number is larger than another.
enum class Order {
    integers,  // their bits are
    floats,    // they are as floats: neighbours differ by one across every exponent and across zero
    outward,  // as floats, and a difference counts as positive if it leads away from zero, seen from the base
};

// The difference between two arrays of numbers of 1, 2, 4 or 8 bytes, as unsigned numbers of the same width:
// 0 where they are equal, and small where they are close. The bits of floats are first mapped to integers
// that have the order of the floats; then b - a is taken modulo 2^bits and written in zigzag: 0, -1, 1, -2, …
// become 0, 1, 2, 3, …. All spans have the same size; throws std::invalid_argument otherwise.
void difference(Bytes items, Bytes base, std::size_t itemsize, Order order, MutableBytes out);

// Undo it.
void add_difference(Bytes difference, Bytes base, std::size_t itemsize, Order order, MutableBytes items);

}  // namespace slimtensors
