#include "core/counting.h"

#include <algorithm>

#include "core/check.h"

namespace slimtensors {
namespace {

constexpr KernelTable<core::CountingKernels> kernels{.plain = &core::plain::counting_kernels,
                                                     .avx2 = SLIM_X86(&core::avx2::counting_kernels)};

constexpr std::size_t word_items = 32;
constexpr std::size_t block_words = 128;  // short: a dense tensor is finished after a few thousand items
constexpr GroupPeaks full = {4, 8, 16, 32};

// Return the largest of the packed numbers in `counts`, each `width` bits wide.
std::uint8_t largest(std::uint32_t counts, unsigned width) {
    std::uint8_t peak = 0;
    for (unsigned at = 0; at < word_items; at += width)
        peak = std::max(peak,
                        static_cast<std::uint8_t>(counts >> at & 0xff & ((std::uint64_t{1} << width) - 1)));
    return peak;
}

void update_peaks(GroupPeaks& peaks, std::uint32_t bits) {
    std::uint32_t counts = bits - (bits >> 1 & 0x55555555u);  // of pairs; each step doubles the group
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

std::size_t popcount(Bytes bytes) { return kernels.active().popcount(bytes); }

ZeroCounts count_zeros(Bytes items, std::size_t itemsize) {
    check_wide_items(items.size(), itemsize);
    return kernels.active().count_zeros(items, itemsize);
}

GroupPeaks group_peaks(Bytes items, std::size_t itemsize, bool signed_zero) {
    check_wide_items(items.size(), itemsize);
    const auto nonzero_bits = kernels.active().nonzero_bits;
    const std::size_t word_bytes = word_items * itemsize;
    std::array<std::uint32_t, block_words> bits;
    GroupPeaks peaks{};
    std::size_t at = 0;
    while (items.size() - at >= word_bytes && peaks != full) {
        const std::size_t words = std::min((items.size() - at) / word_bytes, block_words);
        nonzero_bits(items.data() + at, words, itemsize, signed_zero, bits.data());
        for (std::size_t i = 0; i < words; ++i) update_peaks(peaks, bits[i]);
        at += words * word_bytes;
    }
    if (peaks != full && at < items.size()) {
        std::array<std::uint8_t, word_items * 16> tail{};  // padded with zeros
        std::memcpy(tail.data(), items.data() + at, items.size() - at);
        nonzero_bits(tail.data(), 1, itemsize, signed_zero, bits.data());
        update_peaks(peaks, bits[0]);
    }
    return peaks;
}

}  // namespace slimtensors
