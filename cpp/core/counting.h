#pragma once
#include "core/bytes.h"
#include "core/planes.h"

namespace slimtensors {

// Number of ones in all bytes together.
std::size_t popcount(Bytes mask);

struct ZeroCounts {
    std::size_t zero = 0;           // all bits zero
    std::size_t negative_zero = 0;  // only the top bit set: -0.0 if the items are floats
};

// Count both kinds of zero. Items have 1, 2, 4, 8 or 16 bytes; throws std::invalid_argument for anything
// else.
ZeroCounts count_zeros(Bytes items, std::size_t itemsize);

// Count how often each byte occurs in each plane of items: 256 numbers of 64 bits for plane 0, then for plane
// 1, and so on. Throws std::invalid_argument if `counts` has another size, or the items no such planes.
void count_bytes(Bytes items, ItemKind kind, MutableBytes counts);

// Whole vectors of 32 bytes only; the caller counts the rest.
std::size_t popcount_avx2(const std::uint8_t* bytes, std::size_t vectors);
ZeroCounts count_zeros_avx2(const std::uint8_t* bytes, std::size_t vectors, std::size_t itemsize);

}  // namespace slimtensors
