// The inner loops of products, compiled once for each instruction set.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "floats.h"
#include "product_kernels.h"

namespace slimtensors {

template <class Set>
struct ProductLoops {
    enum Kind { ints, nibbles, fp8 };

    template <Kind kind>
    static float number(const std::uint8_t* codes, std::size_t i, std::int32_t zero) {
        if constexpr (kind == fp8) return E4M3::value(codes[i]);
        const int code =
            kind == nibbles ? codes[i / 2] >> 4 * (i % 2) & 15 : static_cast<std::int8_t>(codes[i]);
        return static_cast<float>(code - zero);
    }

    template <Kind kind>
    static float one_by_one(const std::uint8_t* codes, std::size_t begin, std::size_t end, std::int32_t zero,
                            const float* input) {
        float sums[8] = {};  // several, so that the loop may become vector code
        std::size_t i = begin;
        for (; i + 8 <= end; i += 8)
            for (unsigned k = 0; k < 8; ++k) sums[k] += number<kind>(codes, i + k, zero) * input[i + k];
        for (; i < end; ++i) sums[0] += number<kind>(codes, i, zero) * input[i];
        return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    }

#if defined(__AVX2__)
    static __m256i eight_bytes(const std::uint8_t* at) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    }

    static __m256 of_e4m3(__m256i code) {
        const __m256i size = _mm256_and_si256(code, _mm256_set1_epi32(0x7f));
        const __m256i sign = _mm256_slli_epi32(_mm256_andnot_si256(_mm256_set1_epi32(0x7f), code), 24);
        const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi32(size, _mm256_set1_epi32(0x7f)),
                                             _mm256_set1_epi32(0x7f800000));
        const __m256i bits = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi32(size, 20), nan), sign);
        return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
    }

    // Four vectors of codes as floats, in the order of sorted inputs if they are nibbles.
    template <Kind kind>
    static void spread(const std::uint8_t* codes, std::size_t i, __m256i zero, __m256 numbers[4]) {
        const auto less_zero = [&](__m256i code) { return _mm256_cvtepi32_ps(_mm256_sub_epi32(code, zero)); };
        for (unsigned k = 0; k < 4; ++k) {
            if constexpr (kind == nibbles) {
                const __m256i both = eight_bytes(codes + i / 2 + k / 2 * 8);
                numbers[k] = less_zero(k % 2 != 0 ? _mm256_srli_epi32(both, 4)
                                                  : _mm256_and_si256(both, _mm256_set1_epi32(15)));
            } else if constexpr (kind == fp8) {
                numbers[k] = of_e4m3(eight_bytes(codes + i + 8 * k));
            } else {
                const auto* at = reinterpret_cast<const __m128i*>(codes + i + 8 * k);
                numbers[k] = less_zero(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at)));
            }
        }
    }

    static float sum(__m256 v) {
        const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        const __m128 two = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }

    // Sum most of a block; return how far that came.
    template <Kind kind, unsigned count>
    static std::size_t most(const std::uint8_t* codes, std::size_t i, std::size_t end, std::int32_t zero,
                            const Inputs& x, __m256 sums[count]) {
        constexpr unsigned chains = count < 3 ? 4 : 2;  // as many sums at once as there are registers for
        const float* const wide = kind == nibbles ? x.sorted : x.plain;
        __m256 part[count][chains];
        for (unsigned n = 0; n < count; ++n)
            for (auto& p : part[n]) p = _mm256_setzero_ps();
        for (; i + at_once <= end; i += at_once) {
            __m256 numbers[4];
            spread<kind>(codes, i, _mm256_set1_epi32(zero), numbers);
            for (unsigned n = 0; n < count; ++n)
                for (unsigned k = 0; k < 4; ++k) {
                    const __m256 input = _mm256_loadu_ps(wide + n * x.columns + i + 8 * k);
                    part[n][k % chains] = _mm256_fmadd_ps(numbers[k], input, part[n][k % chains]);
                }
        }
        for (unsigned n = 0; n < count; ++n) {
            sums[n] = _mm256_add_ps(part[n][0], part[n][1]);
            if constexpr (chains == 4)
                sums[n] = _mm256_add_ps(sums[n], _mm256_add_ps(part[n][2], part[n][3]));
        }
        return i;
    }

    template <Kind kind, unsigned count>
    static void row(const std::uint8_t* codes, const float* scales, const std::int32_t* zeros,
                    const Inputs& x, float* sums) {
        __m256 total[count], part[count];
        for (unsigned n = 0; n < count; ++n) total[n] = _mm256_setzero_ps(), sums[n] = 0;
        for (std::size_t begin = 0, b = 0; begin < x.columns; begin += x.block, ++b) {
            const std::size_t end = begin + x.block < x.columns ? begin + x.block : x.columns;
            const std::size_t left = most<kind, count>(codes, begin, end, zeros[b], x, part);
            for (unsigned n = 0; n < count; ++n) {
                total[n] = _mm256_fmadd_ps(part[n], _mm256_set1_ps(scales[b]), total[n]);
                if (left < end)
                    sums[n] +=
                        scales[b] * one_by_one<kind>(codes, left, end, zeros[b], x.plain + n * x.columns);
            }
        }
        for (unsigned n = 0; n < count; ++n) sums[n] += sum(total[n]);
    }
#else
    template <Kind kind, unsigned count>
    static void row(const std::uint8_t* codes, const float* scales, const std::int32_t* zeros,
                    const Inputs& x, float* sums) {
        for (unsigned n = 0; n < count; ++n) {
            sums[n] = 0;
            for (std::size_t begin = 0, b = 0; begin < x.columns; begin += x.block, ++b) {
                const std::size_t end = begin + x.block < x.columns ? begin + x.block : x.columns;
                sums[n] += scales[b] * one_by_one<kind>(codes, begin, end, zeros[b], x.plain + n * x.columns);
            }
        }
    }
#endif

    static constexpr ProductKernels kernels() {
        return {{nullptr, row<ints, 1>, row<ints, 2>, row<ints, 3>, row<ints, 4>},
                {nullptr, row<nibbles, 1>, row<nibbles, 2>, row<nibbles, 3>, row<nibbles, 4>},
                {nullptr, row<fp8, 1>, row<fp8, 2>, row<fp8, 3>, row<fp8, 4>}};
    }
};

}  // namespace slimtensors
