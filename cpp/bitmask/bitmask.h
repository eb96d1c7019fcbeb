#pragma once
#include "core/bytes.h"

// A bit mask marks the items of a dense array that are kept: bit i % 8 of byte i / 8, lowest bit first. Every
// row of `row` items starts on a new byte; the bits that pad its last byte are zero. Items are opaque bit
// patterns of 1, 2, 4, 8 or 16 bytes, and only all bits zero is zero: -0.0 is kept. All functions throw
// std::invalid_argument if sizes, padding or counts are inconsistent.
namespace slimtensors::bitmask {

// Mark the nonzero items in `mask` and return their number.
std::size_t find(Bytes items, std::size_t itemsize, std::size_t row, MutableBytes mask);

// Copy the marked items, in order, to `values`, which must have exactly their size.
void gather(Bytes items, std::size_t itemsize, std::size_t row, Bytes mask, MutableBytes values);

// Write `values` where the mask has a one and zeros elsewhere. Throws before anything is written.
void scatter(Bytes mask, std::size_t row, Bytes values, std::size_t itemsize, MutableBytes items);

}  // namespace slimtensors::bitmask
