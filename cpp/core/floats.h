// Conversions of small floats, without branches so that loops over them are vectorized.
#pragma once
#include "core/bytes.h"

namespace slimtensors {

// Float types of weights and scales. `e8m0` is a power of two, stored as its exponent plus 127.
enum class FloatType : std::uint8_t { f32, f16, bf16, e4m3, e8m0 };

inline namespace SLIM_TARGET {

inline float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t to_bits(float x) { return std::bit_cast<std::uint32_t>(x); }

// Round to a multiple of 2^drop, half to even; the lowest `drop` bits of the result are arbitrary.
inline std::uint32_t round_bits(std::uint32_t bits, unsigned drop) {
    return bits + ((1u << (drop - 1)) - 1) + (bits >> drop & 1);
}

struct F32 {
    using Bits = std::uint32_t;
    static constexpr Bits infinity = 0x7f800000;
    static float value(Bits bits) { return from_bits(bits); }
    static Bits nearest(float x) { return to_bits(x); }
    static float round(float x) { return x; }
};

struct BF16 {
    using Bits = std::uint16_t;
    static constexpr Bits infinity = 0x7f80;
    static float value(Bits bits) { return from_bits(std::uint32_t{bits} << 16); }
    static Bits nearest(float x) {
        const std::uint32_t quiet = 0x7fc0;
        return static_cast<Bits>(x != x ? quiet : round_bits(to_bits(x), 16) >> 16);
    }
    static float round(float x) { return from_bits(round_bits(to_bits(x), 16) & 0xffff0000); }
};

struct F16 {
    using Bits = std::uint16_t;
    static constexpr Bits infinity = 0x7c00;
    static float value(Bits bits) {
        const std::uint32_t size = std::uint32_t{bits & 0x7fffu} << 13,
                            sign = std::uint32_t{bits & 0x8000u} << 16;
        const float scaled = from_bits(size) * 0x1p112f;  // exponent bias 127 instead of 15
        return from_bits(to_bits(scaled) | sign | (size >= 0x0f800000 ? 0x7f800000 : 0));
    }
    static Bits nearest(float x) {
        const std::uint32_t sign = to_bits(x) >> 16 & 0x8000, size = to_bits(x) & 0x7fffffff;
        const std::uint32_t normal = (round_bits(size, 13) >> 13) - (112u << 10);
        const std::uint32_t tiny = to_bits(from_bits(size) + 0.5f) - to_bits(0.5f);  // units of 2^-24
        const std::uint32_t limit = size > 0x7f800000 ? 0x7e00 : infinity;           // NaN stays NaN
        const std::uint32_t half = size < to_bits(0x1p-14f) ? tiny : normal;
        return static_cast<Bits>((half < limit ? half : limit) | sign);
    }
    static float round(float x) { return value(nearest(x)); }
};

// 8-bit floats without infinity and with one NaN per sign.
struct E4M3 {
    static float value(std::uint8_t code) {
        const std::uint32_t size = code & 0x7fu, sign = std::uint32_t{code & 0x80u} << 24;
        const float scaled = from_bits(size << 20) * 0x1p120f;
        return from_bits(size == 0x7f ? 0x7fc00000 | sign : to_bits(scaled) | sign);
    }
    // Requires |x| <= 448.
    static std::uint8_t nearest(float x) {
        const std::uint32_t sign = to_bits(x) >> 24 & 0x80, size = to_bits(x) & 0x7fffffff;
        const std::uint32_t normal = (round_bits(size, 20) >> 20) - (120u << 3);
        const std::uint32_t tiny = to_bits(from_bits(size) + 0x1p14f) - to_bits(0x1p14f);  // units of 2^-9
        return static_cast<std::uint8_t>((size < to_bits(0x1p-6f) ? tiny : normal) | sign);
    }
};

// 4-bit floats: 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign.
struct E2M1 {
    static float value(std::uint8_t code) {
        const std::uint32_t size = code & 7u, sign = std::uint32_t{code & 8u} << 28;
        const std::uint32_t normal = (size << 22) + (126u << 23);
        const std::uint32_t bits = size < 2 ? size * to_bits(0.5f) : normal;
        return from_bits(bits | sign);
    }
    static std::uint8_t nearest(float x) {
        const float size = from_bits(to_bits(x) & 0x7fffffff);
        const int index = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) +
                          (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
        return static_cast<std::uint8_t>(index | (x < 0) << 3);
    }
};

}  // namespace SLIM_TARGET
}  // namespace slimtensors
