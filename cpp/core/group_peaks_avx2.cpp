#include <immintrin.h>

#include "core/group_peaks.h"

namespace slimtensors {
namespace {

__m256i vector(const std::uint8_t* items, std::size_t i) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(items) + i);
}

std::uint32_t byte_signs(__m256i v) { return static_cast<std::uint32_t>(_mm256_movemask_epi8(v)); }
std::uint32_t word_signs(__m256i v) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(v)));
}
std::uint32_t long_signs(__m256i v) {
    return static_cast<std::uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(v)));
}

// Each returns the bits of 32 items that equal neither of two values which count as zero.
std::uint32_t bits1(const std::uint8_t* items, __m256i other) {
    const __m256i v = vector(items, 0);
    return ~byte_signs(
        _mm256_or_si256(_mm256_cmpeq_epi8(v, _mm256_setzero_si256()), _mm256_cmpeq_epi8(v, other)));
}

__m256i zeros2(__m256i v, __m256i other) {
    return _mm256_or_si256(_mm256_cmpeq_epi16(v, _mm256_setzero_si256()), _mm256_cmpeq_epi16(v, other));
}

std::uint32_t bits2(const std::uint8_t* items, __m256i other) {
    // Packing works within halves of vectors; the permutation puts the quarters in order again.
    const __m256i zeros =
        _mm256_packs_epi16(zeros2(vector(items, 0), other), zeros2(vector(items, 1), other));
    return ~byte_signs(_mm256_permute4x64_epi64(zeros, 0xd8));
}

std::uint32_t bits4(const std::uint8_t* items, __m256i other) {
    std::uint32_t zeros = 0;
    for (unsigned i = 0; i < 4; ++i) {
        const __m256i v = vector(items, i);
        const __m256i zero = _mm256_cmpeq_epi32(v, _mm256_setzero_si256());
        zeros |= word_signs(_mm256_or_si256(zero, _mm256_cmpeq_epi32(v, other))) << (8 * i);
    }
    return ~zeros;
}

std::uint32_t bits8(const std::uint8_t* items, __m256i other) {
    std::uint32_t zeros = 0;
    for (unsigned i = 0; i < 8; ++i) {
        const __m256i v = vector(items, i);
        const __m256i zero = _mm256_cmpeq_epi64(v, _mm256_setzero_si256());
        zeros |= long_signs(_mm256_or_si256(zero, _mm256_cmpeq_epi64(v, other))) << (4 * i);
    }
    return ~zeros;
}

template <class Bits>
void fill(const std::uint8_t* items, std::size_t words, std::size_t itemsize, __m256i other,
          std::uint32_t* bits, Bits&& of) {
    for (std::size_t i = 0; i < words; ++i) bits[i] = of(items + i * 32 * itemsize, other);
}

}  // namespace

void nonzero_bits_avx2(const std::uint8_t* items, std::size_t words, std::size_t itemsize, bool signed_zero,
                       std::uint32_t* bits) {
    const __m256i none = _mm256_setzero_si256();
    switch (itemsize) {
        case 1:
            return fill(items, words, itemsize, signed_zero ? _mm256_set1_epi8(INT8_MIN) : none, bits, bits1);
        case 2:
            return fill(items, words, itemsize, signed_zero ? _mm256_set1_epi16(INT16_MIN) : none, bits,
                        bits2);
        case 4:
            return fill(items, words, itemsize, signed_zero ? _mm256_set1_epi32(INT32_MIN) : none, bits,
                        bits4);
        default:
            return fill(items, words, itemsize, signed_zero ? _mm256_set1_epi64x(INT64_MIN) : none, bits,
                        bits8);
    }
}

}  // namespace slimtensors
