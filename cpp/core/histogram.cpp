#include "core/histogram.h"

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "core/prefetch.h"

namespace slimtensors {

ByteCounts histogram(Bytes bytes, Bytes prefetch) {
    std::array<ByteCounts, 4> parts{};  // incrementing the same counter twice in a row would stall
    Prefetcher<false, 1> prefetcher(prefetch);
    const std::uint8_t* const from = bytes.data();
    std::size_t i = 0;
    for (; i + 16 <= bytes.size(); i += 16) {
        for (std::size_t half = 0; half < 16; half += 8) {
            const std::uint64_t word = load<std::uint64_t>(from + i + half);
            for (unsigned k = 0; k < 8; ++k) ++parts[k % 4][word >> 8 * k & 255u];
        }
        prefetcher.fetch();
    }
    for (; i < bytes.size(); ++i) ++parts[0][from[i]];
    for (std::size_t byte = 0; byte < 256; ++byte)
        parts[0][byte] += parts[1][byte] + parts[2][byte] + parts[3][byte];
    return parts[0];
}

void count_bytes(Bytes items, ItemFormat format, MutableBytes counts) {
    check_planes(items.size(), format);
    check(counts.size() == format.itemsize * 256 * sizeof(std::uint64_t),
          "counts must have 256 entries for each byte of an item");
    constexpr std::size_t block = std::size_t{1} << 16;
    const std::size_t total = items.size() / format.itemsize;
    std::vector<std::uint8_t> plane(std::min(block, total));
    for (std::size_t j = 0; j < format.itemsize; ++j) {
        std::array<std::uint64_t, 256> sums{};
        for (std::size_t start = 0; start < total; start += block) {
            const std::size_t size = std::min(block, total - start);
            take_plane(items.data() + start * format.itemsize, size, format, j, plane.data());
            const ByteCounts found = histogram(Bytes(plane).first(size));
            for (std::size_t byte = 0; byte < 256; ++byte) sums[byte] += found[byte];
        }
        std::memcpy(counts.data() + j * sizeof sums, sums.data(), sizeof sums);
    }
}

}  // namespace slimtensors
