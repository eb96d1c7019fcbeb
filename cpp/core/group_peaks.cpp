#include "core/group_peaks.h"

#include <algorithm>
#include <stdexcept>

#include "core/dispatch.h"

namespace slimtensors {
namespace {

constexpr std::size_t word_items = 32;
constexpr std::size_t block_words = 128;  // short, so that a dense tensor is known after a few thousand items
constexpr GroupPeaks full = {4, 8, 16, 32};

__extension__ using Item16 = unsigned __int128;

template <class Item>
std::uint32_t nonzero_bits(const std::uint8_t* items, std::size_t count, bool signed_zero) {
    constexpr Item top = static_cast<Item>(Item{1} << (8 * sizeof(Item) - 1));
    const Item ignored = signed_zero ? top : Item{0};
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const Item item = load<Item>(items + i * sizeof(Item));
        bits |= std::uint32_t{item != 0 && item != ignored} << i;
    }
    return bits;
}

std::uint32_t nonzero_bits(const std::uint8_t* items, std::size_t count, std::size_t itemsize,
                           bool signed_zero) {
    switch (itemsize) {
        case 1:
            return nonzero_bits<std::uint8_t>(items, count, signed_zero);
        case 2:
            return nonzero_bits<std::uint16_t>(items, count, signed_zero);
        case 4:
            return nonzero_bits<std::uint32_t>(items, count, signed_zero);
        case 8:
            return nonzero_bits<std::uint64_t>(items, count, signed_zero);
        default:
            return nonzero_bits<Item16>(items, count, signed_zero);
    }
}

void find_bits(Bytes items, std::size_t words, std::size_t itemsize, bool signed_zero, std::uint32_t* bits) {
#if defined(SLIMTENSORS_X86)
    if (cpu().avx2 && itemsize <= 8)
        return nonzero_bits_avx2(items.data(), words, itemsize, signed_zero, bits);
#endif
    for (std::size_t i = 0; i < words; ++i)
        bits[i] = nonzero_bits(items.data() + i * word_items * itemsize, word_items, itemsize, signed_zero);
}

// The largest of the numbers that fill `counts`, each `width` bits wide.
std::uint8_t largest(std::uint32_t counts, unsigned width) {
    std::uint8_t most = 0;
    for (unsigned at = 0; at < word_items; at += width)
        most = std::max(most,
                        static_cast<std::uint8_t>(counts >> at & 0xff & ((std::uint64_t{1} << width) - 1)));
    return most;
}

void raise(GroupPeaks& peaks, std::uint32_t bits) {
    std::uint32_t counts = bits - (bits >> 1 & 0x55555555u);  // of pairs, then of twice as many at each step
    counts = (counts & 0x33333333u) + (counts >> 2 & 0x33333333u);
    if (peaks[0] < full[0]) peaks[0] = std::max(peaks[0], largest(counts, 4));
    counts = (counts + (counts >> 4)) & 0x0f0f0f0fu;
    if (peaks[1] < full[1]) peaks[1] = std::max(peaks[1], largest(counts, 8));
    counts = (counts + (counts >> 8)) & 0x00ff00ffu;
    if (peaks[2] < full[2]) peaks[2] = std::max(peaks[2], largest(counts, 16));
    counts = (counts + (counts >> 16)) & 0xffu;
    peaks[3] = std::max(peaks[3], static_cast<std::uint8_t>(counts));
}

}  // namespace

GroupPeaks group_peaks(Bytes items, std::size_t itemsize, bool signed_zero) {
    if (!std::has_single_bit(itemsize) || itemsize > 16)
        throw std::invalid_argument("itemsize must be 1, 2, 4, 8 or 16");
    if (items.size() % itemsize != 0) throw std::invalid_argument("items are not a whole number of items");
    const std::size_t word_bytes = word_items * itemsize;
    std::array<std::uint32_t, block_words> bits;
    GroupPeaks peaks{};
    std::size_t at = 0;
    while (items.size() - at >= word_bytes && peaks != full) {
        const std::size_t words = std::min((items.size() - at) / word_bytes, block_words);
        find_bits(items.subspan(at), words, itemsize, signed_zero, bits.data());
        for (std::size_t i = 0; i < words; ++i) raise(peaks, bits[i]);
        at += words * word_bytes;
    }
    if (peaks != full)
        raise(peaks, nonzero_bits(items.data() + at, (items.size() - at) / itemsize, itemsize, signed_zero));
    return peaks;
}

}  // namespace slimtensors
