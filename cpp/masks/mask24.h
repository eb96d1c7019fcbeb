#pragma once
#include "core/bytes.h"

namespace slimtensors {

// Masks of 2:4 sparsity: each nibble is a group of four items of which two are kept, so it has one of six
// patterns. Three groups make one byte in base 6, the first group the lowest digit: 0.667 bit per item,
// not 1.

// Set the lowest clear bits of every nibble with fewer than two ones until it has two. Returns the index of
// the first nibble with more than two, or -1 when there is none; the mask is then unspecified in the first
// case.
std::ptrdiff_t mask24_fill(MutableBytes mask);

// `codes` must have ceil(2 * mask.size() / 3) bytes; digits past the last nibble are zero. Both throw
// std::invalid_argument when a size, a nibble or a code is wrong, and may have written before they noticed.
void mask24_pack(Bytes mask, MutableBytes codes);
void mask24_unpack(Bytes codes, MutableBytes mask);

}  // namespace slimtensors
