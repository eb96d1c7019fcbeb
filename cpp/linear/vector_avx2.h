// Vectors of eight floats.
#pragma once
#include <immintrin.h>

#include "core/floats.h"
#include "linear/kernels.h"

namespace slimtensors::linear::SLIM_TARGET {
namespace {

__m128i eight(const std::uint8_t* at) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)); }

struct Set {
    static constexpr std::size_t width = 8;
    static constexpr unsigned inputs_per_call = 2;
    using Vector = __m256;

    static __m256 zero() { return _mm256_setzero_ps(); }
    static __m256 load(const float* at) { return _mm256_loadu_ps(at); }
    static void store(float* at, __m256 v) { _mm256_storeu_ps(at, v); }

    struct Scaled {
        __m256 scale;
        __m256i zero;

        Scaled(float s, std::int32_t z) : scale(_mm256_set1_ps(s)), zero(_mm256_set1_epi32(z)) {}
        __m256 number(__m256i codes) const {
            return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(codes, zero)), scale);
        }
    };

    struct Ints : Scaled {
        static constexpr std::size_t vectors = 1;
        using Scaled::Scaled;
        void read(const std::uint8_t* codes, __m256* weights) const {
            weights[0] = number(_mm256_cvtepi8_epi32(eight(codes)));
        }
    };

    struct Nibbles : Scaled {
        static constexpr std::size_t vectors = 2;
        using Scaled::Scaled;
        void read(const std::uint8_t* codes, __m256* weights) const {
            const __m256i pairs = _mm256_cvtepu8_epi32(eight(codes));
            weights[0] = number(_mm256_and_si256(pairs, _mm256_set1_epi32(15)));
            weights[1] = number(_mm256_srli_epi32(pairs, 4));
        }
    };

    struct Fp8 {
        static constexpr std::size_t vectors = 1;
        __m256 scale;

        Fp8(float s, std::int32_t) : scale(_mm256_set1_ps(s)) {}
        void read(const std::uint8_t* codes, __m256* weights) const {
            const __m256i size = _mm256_set1_epi32(0x07f00000), sign_and_size = _mm256_set1_epi32(0x87f00000);
            const __m256i bits =
                _mm256_and_si256(_mm256_slli_epi32(_mm256_cvtepi8_epi32(eight(codes)), 20), sign_and_size);
            const __m256i nan = _mm256_cmpeq_epi32(_mm256_and_si256(bits, size), size);
            const __m256 number = _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
            weights[0] = _mm256_mul_ps(_mm256_or_ps(number, _mm256_castsi256_ps(nan)), scale);
        }
    };

    static __m256 multiply_add(__m256 a, __m256 b, __m256 sum) { return _mm256_fmadd_ps(a, b, sum); }
    static float sum(__m256 v) {
        const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        const __m128 two = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
};

}  // namespace
}  // namespace slimtensors::linear::SLIM_TARGET
