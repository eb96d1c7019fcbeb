#pragma once
#include <cstdint>

namespace slimtensors {

// Logarithms and powers of two in fixed point, the same on every machine.
inline constexpr int octave = 4096;             // a factor of two
inline constexpr std::int64_t max_log2 = 2050;  // largest argument of fixed_log2()
inline constexpr int max_power = 30 * octave;   // largest result of fixed_power()

// round(4096 log2(n)) for 0 < n <= max_log2; 0 for 0.
std::int32_t fixed_log2(std::int64_t n);

// round(2^30 2^(-i / 4096)) for 0 <= i < 4096.
std::int64_t fixed_fraction(std::int64_t i);

// 2^(t / 4096) in units of 1/4096, at most max_power.
std::int64_t fixed_power(std::int64_t t);

}  // namespace slimtensors
