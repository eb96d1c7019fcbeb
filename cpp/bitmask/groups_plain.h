// Groups of items in portable C++: one item at a time, without branches on the mask.
#pragma once
#include "bitmask/kernels.h"

namespace slimtensors::bitmask::SLIM_TARGET {
namespace {

template <class Item>
struct Group {
    static constexpr std::size_t itemsize = sizeof(Item);

    static std::uint8_t find(const std::uint8_t* items) {
        unsigned mask = 0;
        for (unsigned k = 0; k < group_items; ++k)
            mask |= unsigned{load<Item>(items + k * itemsize) != 0} << k;
        return static_cast<std::uint8_t>(mask);
    }

    static std::uint8_t* gather(const std::uint8_t* items, std::uint8_t mask, std::uint8_t* to) {
        for (unsigned k = 0; k < group_items; ++k) {
            store(to, load<Item>(items + k * itemsize));  // overwritten by the next item unless marked
            to += (mask >> k & 1u) * itemsize;
        }
        return to;
    }

    static const std::uint8_t* scatter(std::uint8_t mask, const std::uint8_t* from, std::uint8_t* items) {
        for (unsigned k = 0; k < group_items; ++k) {
            const unsigned bit = mask >> k & 1u;
            store(items + k * itemsize, static_cast<Item>(load<Item>(from) & -static_cast<Item>(bit)));
            from += bit * itemsize;
        }
        return from;
    }
};

using Group1 = Group<std::uint8_t>;
using Group2 = Group<std::uint16_t>;
using Group4 = Group<std::uint32_t>;
using Group8 = Group<std::uint64_t>;
using Group16 = Group<Uint128>;

}  // namespace
}  // namespace slimtensors::bitmask::SLIM_TARGET
