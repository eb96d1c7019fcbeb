// CRC instructions, table lookups and joining give the same checksum.
#include "core/crc32c.h"
#include "fuzz/input.h"

using namespace slimtensors;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t repeats = 1 + input.number(32);  // long enough for interleaved blocks
    const std::vector<std::uint8_t> piece = input.bytes(input.left());
    std::vector<std::uint8_t> whole;
    for (std::size_t k = 0; k < repeats; ++k) whole.insert(whole.end(), piece.begin(), piece.end());

    std::vector<std::uint32_t> sums;
    fuzz::on_best_and_plain([&] {
        sums.push_back(crc32c(whole));
        const std::uint32_t one = crc32c(piece);
        std::uint32_t joined = 0;
        for (std::size_t k = 0; k < repeats; ++k) joined = crc32c_join(joined, one, piece.size());
        fuzz::require(joined == sums.back());
    });
    fuzz::require(sums[0] == sums[1]);
    return 0;
}
