// Vectors of sixteen floats.
#pragma once
#include <immintrin.h>

#include "core/floats.h"
#include "linear/kernels.h"

namespace slimtensors::linear::SLIM_TARGET {
namespace {

__m128i sixteen(const std::uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }

struct Set {
    static constexpr std::size_t width = 16;
    static constexpr unsigned inputs_per_call = 4;
    using Vector = __m512;

    static __m512 zero() { return _mm512_setzero_ps(); }
    static __m512 load(const float* at) { return _mm512_loadu_ps(at); }
    static void store(float* at, __m512 v) { _mm512_storeu_ps(at, v); }

    struct Ints {
        static constexpr std::size_t vectors = 1;
        __m512 scale;
        __m512i zero;

        Ints(float s, std::int32_t z) : scale(_mm512_set1_ps(s)), zero(_mm512_set1_epi32(z)) {}
        void read(const std::uint8_t* codes, __m512* weights) const {
            const __m512i less = _mm512_sub_epi32(_mm512_cvtepi8_epi32(sixteen(codes)), zero);
            weights[0] = _mm512_mul_ps(_mm512_cvtepi32_ps(less), scale);
        }
    };

    // A permutation looks up the value of each code; only its lowest four bits are used.
    struct Nibbles {
        static constexpr std::size_t vectors = 2;
        __m512 values;

        Nibbles(float scale, std::int32_t zero) {
            const __m512i codes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const __m512i less = _mm512_sub_epi32(codes, _mm512_set1_epi32(zero));
            values = _mm512_mul_ps(_mm512_cvtepi32_ps(less), _mm512_set1_ps(scale));
        }
        void read(const std::uint8_t* codes, __m512* weights) const {
            const __m512i pairs = _mm512_cvtepu8_epi32(sixteen(codes));
            weights[0] = _mm512_permutexvar_ps(pairs, values);
            weights[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), values);
        }
    };

    struct Fp8 {
        static constexpr std::size_t vectors = 1;
        __m512 scale;

        Fp8(float s, std::int32_t) : scale(_mm512_set1_ps(s)) {}
        void read(const std::uint8_t* codes, __m512* weights) const {
            const __m512i size = _mm512_set1_epi32(0x07f00000), sign_and_size = _mm512_set1_epi32(0x87f00000);
            const __m512i bits =
                _mm512_and_si512(_mm512_slli_epi32(_mm512_cvtepi8_epi32(sixteen(codes)), 20), sign_and_size);
            const __mmask16 real = _mm512_cmpneq_epi32_mask(_mm512_and_si512(bits, size), size);
            const __m512 number = _mm512_mask_mul_ps(_mm512_set1_ps(__builtin_nanf("")), real,
                                                     _mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
            weights[0] = _mm512_mul_ps(number, scale);
        }
    };

    static __m512 multiply_add(__m512 a, __m512 b, __m512 sum) { return _mm512_fmadd_ps(a, b, sum); }
    static float sum(__m512 v) { return _mm512_reduce_add_ps(v); }
};

}  // namespace
}  // namespace slimtensors::linear::SLIM_TARGET
