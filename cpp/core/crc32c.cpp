#include "core/crc32c.h"

#include "core/crc32c_polynomial.h"

namespace slimtensors {
namespace {

// Slicing by 8: tables[k][b] is the remainder of byte b followed by k zero bytes.
constexpr auto tables = [] {
    std::array<std::array<std::uint32_t, 256>, 8> result{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t remainder = byte;
        for (int bit = 0; bit < 8; ++bit) remainder = crc32c_times_x(remainder);
        result[0][byte] = remainder;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t before = result[k - 1][byte];
            result[k][byte] = before >> 8 ^ result[0][before & 255u];
        }
    return result;
}();

std::uint32_t update(Bytes data, std::uint32_t state) {
    std::size_t i = 0;
    for (; i + 8 <= data.size(); i += 8) {
        const std::uint64_t word = load<std::uint64_t>(data.data() + i) ^ state;
        state = 0;
        for (int k = 0; k < 8; ++k) state ^= tables[7 - k][word >> 8 * k & 255u];
    }
    for (; i < data.size(); ++i) state = state >> 8 ^ tables[0][(state ^ data[i]) & 255u];
    return state;
}

}  // namespace

namespace core::plain {
constinit const Crc32cKernels crc32c_kernels{update};
}

std::uint32_t crc32c(Bytes data, std::uint32_t seed) {
#if defined(SLIMTENSORS_X86) || defined(__ARM_FEATURE_CRC32)
    constexpr KernelTable<core::Crc32cKernels> table{.plain = &core::plain::crc32c_kernels,
                                                     .crc = &core::crc::crc32c_kernels};
#else
    constexpr KernelTable<core::Crc32cKernels> table{.plain = &core::plain::crc32c_kernels};
#endif
    return ~table.active().update(data, ~seed);
}

std::uint32_t crc32c_join(std::uint32_t a, std::uint32_t b, std::uint64_t length_b) {
    return crc32c_multiply(crc32c_shift(length_b), a) ^ b;
}

}  // namespace slimtensors
