#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace slimtensors {

// Arithmetic modulo the CRC-32C polynomial with reflected bits: the highest bit is the coefficient of x^0.
inline constexpr std::uint32_t crc32c_polynomial = 0x82f63b78;
inline constexpr std::uint32_t crc32c_one = 0x80000000;

constexpr std::uint32_t crc32c_times_x(std::uint32_t a) {
    return a >> 1 ^ (crc32c_polynomial & (0u - (a & 1u)));
}

constexpr std::uint32_t crc32c_multiply(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (; a != 0; a <<= 1, b = crc32c_times_x(b)) product ^= b & (0u - (a >> 31));
    return product;
}

// x^(2^k) for every k.
inline constexpr std::array<std::uint32_t, 67> crc32c_powers = [] {
    std::array<std::uint32_t, 67> powers{};
    powers[0] = crc32c_times_x(crc32c_one);
    for (std::size_t k = 1; k < powers.size(); ++k) powers[k] = crc32c_multiply(powers[k - 1], powers[k - 1]);
    return powers;
}();

// Factor by which `length` zero bytes multiply a remainder: x^(8 * length).
constexpr std::uint32_t crc32c_shift(std::uint64_t length) {
    std::uint32_t product = crc32c_one;
    for (std::size_t k = 3; length != 0; length >>= 1, ++k)
        if (length & 1) product = crc32c_multiply(crc32c_powers[k], product);
    return product;
}

}  // namespace slimtensors
