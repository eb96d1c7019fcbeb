#include <immintrin.h>

#include "core/counting.h"

namespace slimtensors {
namespace {

struct Equal1 {
    static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi8(a, b); }
    static __m256i top() { return _mm256_set1_epi8(INT8_MIN); }
};
struct Equal2 {
    static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi16(a, b); }
    static __m256i top() { return _mm256_set1_epi16(INT16_MIN); }
};
struct Equal4 {
    static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi32(a, b); }
    static __m256i top() { return _mm256_set1_epi32(INT32_MIN); }
};
struct Equal8 {
    static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi64(a, b); }
    static __m256i top() { return _mm256_set1_epi64x(INT64_MIN); }
};
struct Equal16 {
    static __m256i equal(__m256i a, __m256i b) {
        const __m256i halves = _mm256_cmpeq_epi64(a, b);
        return _mm256_and_si256(halves, _mm256_shuffle_epi32(halves, 0x4e));  // the other half, too
    }
    static __m256i top() { return _mm256_set_epi64x(INT64_MIN, 0, INT64_MIN, 0); }
};

std::size_t equal_bytes(__m256i equal) {
    return static_cast<std::size_t>(_mm_popcnt_u32(static_cast<unsigned>(_mm256_movemask_epi8(equal))));
}

template <class Items>
ZeroCounts count(const std::uint8_t* bytes, std::size_t vectors, std::size_t itemsize) {
    const __m256i zero = _mm256_setzero_si256(), top = Items::top();
    ZeroCounts counts;  // in bytes until the end: an item that is equal has all its bytes marked
    for (std::size_t i = 0; i < vectors; ++i) {
        const __m256i items = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes) + i);
        counts.zero += equal_bytes(Items::equal(items, zero));
        counts.negative_zero += equal_bytes(Items::equal(items, top));
    }
    return {counts.zero / itemsize, counts.negative_zero / itemsize};
}

}  // namespace

std::size_t popcount_avx2(const std::uint8_t* bytes, std::size_t vectors) {
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i nibble =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
    __m256i sums = _mm256_setzero_si256();
    for (std::size_t i = 0; i < vectors; ++i) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes) + i);
        const __m256i ones =
            _mm256_add_epi8(_mm256_shuffle_epi8(nibble, _mm256_and_si256(v, low)),
                            _mm256_shuffle_epi8(nibble, _mm256_and_si256(_mm256_srli_epi16(v, 4), low)));
        sums = _mm256_add_epi64(sums, _mm256_sad_epu8(ones, _mm256_setzero_si256()));
    }
    const __m128i halves = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return static_cast<std::size_t>(_mm_extract_epi64(halves, 0) + _mm_extract_epi64(halves, 1));
}

ZeroCounts count_zeros_avx2(const std::uint8_t* bytes, std::size_t vectors, std::size_t itemsize) {
    switch (itemsize) {
        case 1:
            return count<Equal1>(bytes, vectors, itemsize);
        case 2:
            return count<Equal2>(bytes, vectors, itemsize);
        case 4:
            return count<Equal4>(bytes, vectors, itemsize);
        case 8:
            return count<Equal8>(bytes, vectors, itemsize);
        default:
            return count<Equal16>(bytes, vectors, itemsize);
    }
}

}  // namespace slimtensors
