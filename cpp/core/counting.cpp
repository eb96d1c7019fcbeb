#include "core/counting.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <vector>

#include "core/dispatch.h"

namespace slimtensors {
namespace {

constexpr std::size_t vector_bytes = 32;

std::size_t popcount_plain(Bytes bytes) {
    std::size_t ones = 0, i = 0;
    for (; i + 8 <= bytes.size(); i += 8) ones += std::popcount(load<std::uint64_t>(bytes.data() + i));
    for (; i < bytes.size(); ++i) ones += std::popcount(bytes[i]);
    return ones;
}

// Counters as narrow as the items let the compiler use whole vectors; a block is short enough for eight bits.
template <class Item>
ZeroCounts count_zeros_plain(Bytes bytes) {
    constexpr Item top = static_cast<Item>(Item{1} << (8 * sizeof(Item) - 1));
    constexpr std::size_t block = 240;
    const std::size_t items = bytes.size() / sizeof(Item);
    ZeroCounts counts;
    for (std::size_t start = 0; start < items; start += block) {
        const std::size_t stop = std::min(start + block, items);
        Item zero = 0, negative_zero = 0;
        for (std::size_t i = start; i < stop; ++i) {
            const Item item = load<Item>(bytes.data() + i * sizeof(Item));
            zero += item == 0;
            negative_zero += item == top;
        }
        counts.zero += static_cast<std::size_t>(zero);
        counts.negative_zero += static_cast<std::size_t>(negative_zero);
    }
    return counts;
}

__extension__ using Item16 = unsigned __int128;

ZeroCounts count_zeros_plain(Bytes bytes, std::size_t itemsize) {
    switch (itemsize) {
        case 1:
            return count_zeros_plain<std::uint8_t>(bytes);
        case 2:
            return count_zeros_plain<std::uint16_t>(bytes);
        case 4:
            return count_zeros_plain<std::uint32_t>(bytes);
        case 8:
            return count_zeros_plain<std::uint64_t>(bytes);
        default:
            return count_zeros_plain<Item16>(bytes);
    }
}

}  // namespace

void count_bytes(Bytes items, ItemKind kind, MutableBytes counts) {
    if (!std::has_single_bit(kind.size) || kind.size > 8)
        throw std::invalid_argument("itemsize must be 1, 2, 4 or 8");
    if (kind.rotated && kind.size == 1) throw std::invalid_argument("items of one byte cannot be rotated");
    if (items.size() % kind.size != 0) throw std::invalid_argument("items are not a whole number of items");
    if (counts.size() != kind.size * 256 * sizeof(std::uint64_t))
        throw std::invalid_argument("there must be 256 counts for each byte of an item");
    constexpr std::size_t block = 1 << 14;
    std::vector<std::uint8_t> plane(block);
    const std::size_t total = items.size() / kind.size;
    for (std::size_t j = 0; j < kind.size; ++j) {
        // Equal neighbours would wait for each other's counter, so four take turns.
        std::array<std::array<std::uint64_t, 256>, 4> found{};
        for (std::size_t start = 0; start < total; start += block) {
            const std::size_t size = std::min(block, total - start);
            take_plane(items.data() + start * kind.size, size, kind, j, plane.data());
            for (std::size_t i = 0; i < size; ++i) ++found[i % 4][plane[i]];
        }
        for (std::size_t byte = 0; byte < 256; ++byte)
            store(counts.data() + (j * 256 + byte) * sizeof(std::uint64_t),
                  found[0][byte] + found[1][byte] + found[2][byte] + found[3][byte]);
    }
}

std::size_t popcount(Bytes mask) {
#if defined(SLIMTENSORS_X86)
    if (cpu().avx2) {
        const std::size_t vectors = mask.size() / vector_bytes;
        return popcount_avx2(mask.data(), vectors) + popcount_plain(mask.subspan(vectors * vector_bytes));
    }
#endif
    return popcount_plain(mask);
}

ZeroCounts count_zeros(Bytes items, std::size_t itemsize) {
    if (!std::has_single_bit(itemsize) || itemsize > 16)
        throw std::invalid_argument("itemsize must be 1, 2, 4, 8 or 16");
    if (items.size() % itemsize != 0) throw std::invalid_argument("items are not a whole number of items");
#if defined(SLIMTENSORS_X86)
    if (cpu().avx2) {
        const std::size_t vectors = items.size() / vector_bytes;
        const ZeroCounts most = count_zeros_avx2(items.data(), vectors, itemsize);
        const ZeroCounts rest = count_zeros_plain(items.subspan(vectors * vector_bytes), itemsize);
        return {most.zero + rest.zero, most.negative_zero + rest.negative_zero};
    }
#endif
    return count_zeros_plain(items, itemsize);
}

}  // namespace slimtensors
