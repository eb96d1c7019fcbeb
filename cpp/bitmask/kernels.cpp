// Loops over groups of eight items; the primitives for one group depend on the instruction set.
#include "bitmask/kernels.h"

#if defined(__AVX2__)
#include "bitmask/groups_avx2.h"
#else
#include "bitmask/groups_plain.h"
#endif

namespace slimtensors::bitmask::SLIM_TARGET {
namespace {

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
        // A third faster for results larger than the caches, neutral for smaller ones.
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
constexpr ItemKernels kernels_of() {
    return {find_groups<Group>, gather_groups<Group>, scatter_groups<Group>};
}

}  // namespace

constinit const Kernels kernels{{kernels_of<Group1>(), kernels_of<Group2>(), kernels_of<Group4>(),
                                 kernels_of<Group8>(), kernels_of<Group16>()}};

}  // namespace slimtensors::bitmask::SLIM_TARGET
