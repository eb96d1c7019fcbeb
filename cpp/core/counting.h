#pragma once
#include <array>

#include "core/bytes.h"
#include "core/dispatch.h"

namespace slimtensors {

// Items have 1, 2, 4, 8 or 16 bytes; the functions throw std::invalid_argument for anything else.

// Return the number of ones in all bytes.
std::size_t popcount(Bytes bytes);

struct ZeroCounts {
    std::size_t zero = 0;           // all bits zero
    std::size_t negative_zero = 0;  // only the top bit set: -0.0 if the items are floats
};

ZeroCounts count_zeros(Bytes items, std::size_t itemsize);

// The maximum number of nonzero items in any group of 4, 8, 16 and 32 consecutive items. Groups start at the
// first item; the last one may be shorter.
using GroupPeaks = std::array<std::uint8_t, 4>;

// With `signed_zero`, items with only the top bit set count as zero, as -0.0 does.
GroupPeaks group_peaks(Bytes items, std::size_t itemsize, bool signed_zero);

namespace core {

struct CountingKernels {
    std::size_t (*popcount)(Bytes bytes);
    ZeroCounts (*count_zeros)(Bytes items, std::size_t itemsize);
    // One bit per nonzero item, lowest first, for `words` times 32 items.
    void (*nonzero_bits)(const std::uint8_t* items, std::size_t words, std::size_t itemsize, bool signed_zero,
                         std::uint32_t* bits);
};

namespace plain {
extern const CountingKernels counting_kernels;
}
namespace avx2 {
extern const CountingKernels counting_kernels;
}

}  // namespace core
}  // namespace slimtensors
