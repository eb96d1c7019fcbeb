#pragma once
#include "core/bytes.h"
#include "core/dispatch.h"

namespace slimtensors::bitmask {

// A group is eight items and their mask byte. Packed values are read and written in whole vectors, beyond the
// last valid one. A kernel therefore stops before a group if fewer than `packed_margin` items are left
// between `next` and `end`, and returns the number of groups done. It stays between `next` and `end` whatever
// the mask contains.
inline constexpr std::size_t group_items = 8;
inline constexpr std::size_t packed_margin = 64;

struct ItemKernels {
    void (*find)(const std::uint8_t* items, std::size_t groups, std::uint8_t* mask);
    std::size_t (*gather)(const std::uint8_t* items, const std::uint8_t* mask, std::size_t groups,
                          std::uint8_t*& next, std::uint8_t* end);
    std::size_t (*scatter)(const std::uint8_t* mask, std::size_t groups, const std::uint8_t*& next,
                           const std::uint8_t* end, std::uint8_t* items);
};

struct Kernels {
    ItemKernels by_log2_itemsize[5];
};

namespace plain {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}

}  // namespace slimtensors::bitmask
