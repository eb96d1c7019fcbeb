#pragma once
#include "core/bytes.h"

namespace slimtensors {

// A bit mask says which items of a dense array are kept: bit i % 8 of byte i / 8, lowest first. Every row of
// `row` items starts on a new byte; the bits that pad its last byte are zero. Items are opaque bit patterns
// of 1, 2, 4, 8 or 16 bytes, and only all bits zero is zero: -0.0 is kept. All functions throw
// std::invalid_argument when sizes, bits or counts do not fit together.

// Mark the nonzero items in `mask` and return how many there are.
std::size_t bitmask_find(Bytes items, std::size_t itemsize, std::size_t row, MutableBytes mask);

// Copy the marked items, in order, to `values`, which must have room for exactly those.
void bitmask_gather(Bytes items, std::size_t itemsize, std::size_t row, Bytes mask, MutableBytes values);

// Write `values` where the mask has a one and zeros elsewhere. Throws before anything is written.
void bitmask_scatter(Bytes mask, std::size_t row, Bytes values, std::size_t itemsize, MutableBytes items);

}  // namespace slimtensors
