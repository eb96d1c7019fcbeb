// Counting ones and zeros: whole vectors first where there are vector loops, then item by item.
#include "core/counting.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace slimtensors::core::SLIM_TARGET {
namespace {

std::size_t popcount_words(Bytes bytes) {
    std::size_t ones = 0, i = 0;
    for (; i + 8 <= bytes.size(); i += 8) ones += std::popcount(load<std::uint64_t>(bytes.data() + i));
    for (; i < bytes.size(); ++i) ones += std::popcount(bytes[i]);
    return ones;
}

// Counters of the width of the items let the compiler vectorize; 8 bits suffice for a block.
template <class Item>
ZeroCounts count_zero_items(Bytes bytes) {
    constexpr Item top = static_cast<Item>(Item{1} << (8 * sizeof(Item) - 1));
    constexpr std::size_t block = 240;
    const std::size_t items = bytes.size() / sizeof(Item);
    ZeroCounts counts;
    for (std::size_t start = 0; start < items; start += block) {
        const std::size_t stop = items - start < block ? items : start + block;
        Item zero = 0, negative_zero = 0;
        for (std::size_t i = start; i < stop; ++i) {
            const Item item = load<Item>(bytes.data() + i * sizeof(Item));
            zero += item == 0;
            negative_zero += item == top;
        }
        counts.zero += static_cast<std::size_t>(zero);
        counts.negative_zero += static_cast<std::size_t>(negative_zero);
    }
    return counts;
}

ZeroCounts count_zero_items(Bytes bytes, std::size_t itemsize) {
    switch (itemsize) {
        case 1:
            return count_zero_items<std::uint8_t>(bytes);
        case 2:
            return count_zero_items<std::uint16_t>(bytes);
        case 4:
            return count_zero_items<std::uint32_t>(bytes);
        case 8:
            return count_zero_items<std::uint64_t>(bytes);
        default:
            return count_zero_items<Uint128>(bytes);
    }
}

template <class Item>
std::uint32_t item_bits(const std::uint8_t* items, std::size_t count, bool signed_zero) {
    constexpr Item top = static_cast<Item>(Item{1} << (8 * sizeof(Item) - 1));
    const Item ignored = signed_zero ? top : Item{0};
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const Item item = load<Item>(items + i * sizeof(Item));
        bits |= std::uint32_t{item != 0 && item != ignored} << i;
    }
    return bits;
}

std::uint32_t item_bits(const std::uint8_t* items, std::size_t count, std::size_t itemsize,
                        bool signed_zero) {
    switch (itemsize) {
        case 1:
            return item_bits<std::uint8_t>(items, count, signed_zero);
        case 2:
            return item_bits<std::uint16_t>(items, count, signed_zero);
        case 4:
            return item_bits<std::uint32_t>(items, count, signed_zero);
        case 8:
            return item_bits<std::uint64_t>(items, count, signed_zero);
        default:
            return item_bits<Uint128>(items, count, signed_zero);
    }
}

void item_bits_of_words(const std::uint8_t* items, std::size_t words, std::size_t itemsize, bool signed_zero,
                        std::uint32_t* bits) {
    constexpr std::size_t word_items = 32;
    for (std::size_t i = 0; i < words; ++i)
        bits[i] = item_bits(items + i * word_items * itemsize, word_items, itemsize, signed_zero);
}

#if defined(__AVX2__)
constexpr std::size_t vector_bytes = 32;

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
        return _mm256_and_si256(halves, _mm256_shuffle_epi32(halves, 0x4e));  // both halves must be equal
    }
    static __m256i top() { return _mm256_set_epi64x(INT64_MIN, 0, INT64_MIN, 0); }
};

std::size_t equal_bytes(__m256i equal) {
    return static_cast<std::size_t>(_mm_popcnt_u32(static_cast<unsigned>(_mm256_movemask_epi8(equal))));
}

template <class Items>
ZeroCounts count_zero_vectors(const std::uint8_t* bytes, std::size_t vectors, std::size_t itemsize) {
    const __m256i zero = _mm256_setzero_si256(), top = Items::top();
    ZeroCounts counts;  // in bytes until the end: every byte of an equal item is marked
    for (std::size_t i = 0; i < vectors; ++i) {
        const __m256i items = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes) + i);
        counts.zero += equal_bytes(Items::equal(items, zero));
        counts.negative_zero += equal_bytes(Items::equal(items, top));
    }
    return {counts.zero / itemsize, counts.negative_zero / itemsize};
}

ZeroCounts count_zero_vectors(const std::uint8_t* bytes, std::size_t vectors, std::size_t itemsize) {
    switch (itemsize) {
        case 1:
            return count_zero_vectors<Equal1>(bytes, vectors, itemsize);
        case 2:
            return count_zero_vectors<Equal2>(bytes, vectors, itemsize);
        case 4:
            return count_zero_vectors<Equal4>(bytes, vectors, itemsize);
        case 8:
            return count_zero_vectors<Equal8>(bytes, vectors, itemsize);
        default:
            return count_zero_vectors<Equal16>(bytes, vectors, itemsize);
    }
}

std::size_t popcount_vectors(const std::uint8_t* bytes, std::size_t vectors) {
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

// Each returns one bit per item, for 32 items, that is neither zero nor `other`.
std::uint32_t bits1(const std::uint8_t* items, __m256i other) {
    const __m256i v = vector(items, 0);
    return ~byte_signs(
        _mm256_or_si256(_mm256_cmpeq_epi8(v, _mm256_setzero_si256()), _mm256_cmpeq_epi8(v, other)));
}

__m256i zeros2(__m256i v, __m256i other) {
    return _mm256_or_si256(_mm256_cmpeq_epi16(v, _mm256_setzero_si256()), _mm256_cmpeq_epi16(v, other));
}

std::uint32_t bits2(const std::uint8_t* items, __m256i other) {
    // Packing works within 128-bit halves; the permutation restores the order.
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
          std::uint32_t* bits, Bits&& bits_of) {
    for (std::size_t i = 0; i < words; ++i) bits[i] = bits_of(items + i * 32 * itemsize, other);
}

void nonzero_bits(const std::uint8_t* items, std::size_t words, std::size_t itemsize, bool signed_zero,
                  std::uint32_t* bits) {
    const __m256i zero = _mm256_setzero_si256();
    switch (itemsize) {
        case 1:
            return fill(items, words, itemsize, signed_zero ? _mm256_set1_epi8(INT8_MIN) : zero, bits, bits1);
        case 2:
            return fill(items, words, itemsize, signed_zero ? _mm256_set1_epi16(INT16_MIN) : zero, bits,
                        bits2);
        case 4:
            return fill(items, words, itemsize, signed_zero ? _mm256_set1_epi32(INT32_MIN) : zero, bits,
                        bits4);
        case 8:
            return fill(items, words, itemsize, signed_zero ? _mm256_set1_epi64x(INT64_MIN) : zero, bits,
                        bits8);
        default:
            return item_bits_of_words(items, words, itemsize, signed_zero, bits);
    }
}

std::size_t popcount(Bytes bytes) {
    const std::size_t vectors = bytes.size() / vector_bytes;
    return popcount_vectors(bytes.data(), vectors) + popcount_words(bytes.subspan(vectors * vector_bytes));
}

ZeroCounts count_zeros(Bytes items, std::size_t itemsize) {
    const std::size_t vectors = items.size() / vector_bytes;
    const ZeroCounts front = count_zero_vectors(items.data(), vectors, itemsize);
    const ZeroCounts rest = count_zero_items(items.subspan(vectors * vector_bytes), itemsize);
    return {front.zero + rest.zero, front.negative_zero + rest.negative_zero};
}

constexpr CountingKernels kernels{popcount, count_zeros, nonzero_bits};
#else
constexpr CountingKernels kernels{popcount_words, count_zero_items, item_bits_of_words};
#endif

}  // namespace

constinit const CountingKernels counting_kernels = kernels;

}  // namespace slimtensors::core::SLIM_TARGET
