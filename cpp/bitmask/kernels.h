#pragma once
#include "core/bytes.h"

namespace slimtensors {

// The inner loops of bitmask.h for one item size and one instruction set. A group is eight items and their
// mask byte. Packed values are read and written in whole vectors, beyond the last one that counts; so a
// kernel stops before a group as soon as fewer than `packed_margin` items lie between `next` and `end`, and
// says how many groups it has done. It thus stays between `next` and `end` whatever the mask contains.
inline constexpr std::size_t group_items = 8;
inline constexpr std::size_t packed_margin = 64;

struct BitmaskKernels {
    void (*find)(const std::uint8_t* items, std::size_t groups, std::uint8_t* mask);
    std::size_t (*gather)(const std::uint8_t* items, const std::uint8_t* mask, std::size_t groups,
                          std::uint8_t*& next, std::uint8_t* end);
    std::size_t (*scatter)(const std::uint8_t* mask, std::size_t groups, const std::uint8_t*& next,
                           const std::uint8_t* end, std::uint8_t* items);
};

const BitmaskKernels& bitmask_kernels_plain(std::size_t itemsize);
const BitmaskKernels& bitmask_kernels_avx2(std::size_t itemsize);

// The loops around one `Group` of primitives. A Group lives in the unnamed namespace of its unit, which keeps
// the code made from these templates there as well: the linker cannot mix plain and AVX2 copies.

template <class Group>
void find_groups(const std::uint8_t* items, std::size_t groups, std::uint8_t* mask) {
    std::size_t i = 0;
    if constexpr (requires { Group::find4(items); })
        for (; i + 4 <= groups; i += 4)
            store(mask + i, Group::find4(items + i * group_items * Group::itemsize));
    for (; i < groups; ++i) mask[i] = Group::find(items + i * group_items * Group::itemsize);
}

template <class Group>
std::size_t gather_groups(const std::uint8_t* items, const std::uint8_t* mask, std::size_t groups,
                          std::uint8_t*& next, std::uint8_t* end) {
    constexpr std::ptrdiff_t margin = packed_margin * Group::itemsize;
    constexpr std::size_t stride = group_items * Group::itemsize;
    std::uint8_t* to = next;
    std::size_t i = 0;
    for (; i + 8 <= groups && end - to >= margin; i += 8) {
        const std::uint64_t word = load<std::uint64_t>(mask + i);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j)
            to = Group::gather(items + (i + j) * stride, static_cast<std::uint8_t>(word >> 8 * j), to);
    }
    for (; i < groups && end - to >= margin; ++i) to = Group::gather(items + i * stride, mask[i], to);
    next = to;
    return i;
}

template <class Group>
std::size_t scatter_groups(const std::uint8_t* mask, std::size_t groups, const std::uint8_t*& next,
                           const std::uint8_t* end, std::uint8_t* items) {
    constexpr std::ptrdiff_t margin = packed_margin * Group::itemsize;
    constexpr std::size_t stride = group_items * Group::itemsize;
    const std::uint8_t* from = next;
    std::size_t i = 0;
    for (; i + 8 <= groups && end - from >= margin; i += 8) {
        const std::uint64_t word = load<std::uint64_t>(mask + i);
        // Results larger than the caches are a third faster for it; smaller ones do not mind.
        for (std::size_t k = 0; k < Group::itemsize; ++k)
            __builtin_prefetch(items + i * stride + 1024 + 64 * k, 1);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j)
            from = Group::scatter(static_cast<std::uint8_t>(word >> 8 * j), from, items + (i + j) * stride);
    }
    for (; i < groups && end - from >= margin; ++i) from = Group::scatter(mask[i], from, items + i * stride);
    next = from;
    return i;
}

template <class Group>
constexpr BitmaskKernels kernels_of() {
    return {find_groups<Group>, gather_groups<Group>, scatter_groups<Group>};
}

}  // namespace slimtensors
