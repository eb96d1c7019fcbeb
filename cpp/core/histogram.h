#pragma once
#include <array>

#include "core/planes.h"

namespace slimtensors {

using ByteCounts = std::array<std::uint32_t, 256>;

// Count how often each byte occurs among fewer than 2^32. `prefetch` is memory that the caller reads next.
ByteCounts histogram(Bytes bytes, Bytes prefetch = {});

// Write the histogram of each plane of items as 64-bit numbers: 256 for plane 0, 256 for plane 1, and so on.
// Throws std::invalid_argument for invalid sizes.
void count_bytes(Bytes items, ItemFormat format, MutableBytes counts);

}  // namespace slimtensors
