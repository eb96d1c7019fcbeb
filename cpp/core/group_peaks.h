#pragma once
#include <array>

#include "core/bytes.h"

namespace slimtensors {

// The most items that are not zero in any group of 4, 8, 16 and 32 neighbours. Groups start at the first
// item; the last ones may have fewer items.
using GroupPeaks = std::array<std::uint8_t, 4>;

// Items have 1, 2, 4, 8 or 16 bytes; throws std::invalid_argument for anything else. With `signed_zero`,
// an item that has only its top bit set is zero too, as -0.0 is.
GroupPeaks group_peaks(Bytes items, std::size_t itemsize, bool signed_zero);

// One bit per item that is not zero, lowest first, for `words` times 32 items of up to 8 bytes.
void nonzero_bits_avx2(const std::uint8_t* items, std::size_t words, std::size_t itemsize, bool signed_zero,
                       std::uint32_t* bits);

}  // namespace slimtensors
