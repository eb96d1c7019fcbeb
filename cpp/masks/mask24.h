#pragma once
#include "core/bytes.h"

// Masks of 2:4 sparsity: each nibble is a group of four items of which two are kept, so it has one of six
// patterns. Three groups are packed into one byte in base 6, the first group as the lowest digit: 0.667 bits
// per item instead of 1.
namespace slimtensors::masks {

// Set the lowest clear bits of every nibble with fewer than two ones until it has two, and return -1. If a
// nibble has more than two ones, return the index of the first such nibble; the mask is then unspecified.
std::ptrdiff_t mask24_fill(MutableBytes mask);

// `codes` must have ceil(2 * mask.size() / 3) bytes; digits past the last nibble are zero. Both functions
// throw std::invalid_argument for an invalid size, nibble or code; the output is then unspecified.
void mask24_pack(Bytes mask, MutableBytes codes);
void mask24_unpack(Bytes codes, MutableBytes mask);

}  // namespace slimtensors::masks
