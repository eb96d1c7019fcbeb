#include "core/logarithms.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

namespace slimtensors {
namespace {

struct Logarithms {
    std::array<std::int32_t, max_log2 + 1> log2;
    std::array<std::int64_t, octave> power;

    Logarithms() {
        log2[0] = 0;
        for (std::size_t n = 1; n < log2.size(); ++n)
            log2[n] = static_cast<std::int32_t>(std::lround(octave * std::log2(static_cast<double>(n))));
        for (std::size_t i = 0; i < power.size(); ++i)
            power[i] = std::llround(0x1p30 * std::exp2(-static_cast<double>(i) / octave));
    }
};

const Logarithms& logarithms() {
    static const Logarithms tables;
    return tables;
}

}  // namespace

std::int32_t fixed_log2(std::int64_t n) { return logarithms().log2[static_cast<std::size_t>(n)]; }

std::int64_t fixed_fraction(std::int64_t i) { return logarithms().power[static_cast<std::size_t>(i)]; }

std::int64_t fixed_power(std::int64_t t) {
    constexpr std::int64_t limit = 5 * octave;  // 2^5 > 30
    if (t >= limit) return max_power;
    if (t < -13 * octave) return 0;
    const std::int64_t whole = t >> 12, part = t & (octave - 1);
    // 2^part = 2 / 2^(1 - part)
    const std::int64_t mantissa = part == 0 ? std::int64_t{1} << 30 : 2 * fixed_fraction(octave - part);
    const std::int64_t shift = 30 - 12 - whole;
    return std::min<std::int64_t>(mantissa >> shift, max_power);
}

}  // namespace slimtensors
