// Decoding of changes with AVX2: four vectors of eight items.
#include <immintrin.h>

#include "residual/expected_kernels.h"

namespace slimtensors::residual::avx2 {
namespace {

constexpr std::size_t vectors = lanes / vector_lanes;

// For each set of lanes that need a word: the index of the word that each lane gets.
using Turns = std::array<std::uint32_t, 8>;

consteval std::array<Turns, 256> make_turns() {
    std::array<Turns, 256> turns{};
    for (unsigned set = 0; set < 256; ++set)
        for (unsigned lane = 0, turn = 0; lane < 8; ++lane)
            if (set >> lane & 1) turns[set][lane] = turn++;
    return turns;
}

constexpr std::array<Turns, 256> turns = make_turns();

__m256i load_vector(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// Look up bytes below 64.
class Lookup {
  public:
    explicit Lookup(const std::uint8_t* table) {
        for (int q = 0; q < 4; ++q)
            parts_[q] = _mm256_broadcastsi128_si256(
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 16 * q)));
    }
    __m256i operator()(__m256i index) const {
        __m256i found = _mm256_setzero_si256();
        for (int q = 0; q < 4; ++q) {
            // Shuffles produce zero for indices of other parts, whose top bit is set here.
            const __m256i local = _mm256_adds_epu8(
                _mm256_sub_epi8(index, _mm256_set1_epi8(static_cast<char>(16 * q))), _mm256_set1_epi8(0x70));
            found = _mm256_or_si256(found, _mm256_shuffle_epi8(parts_[q], local));
        }
        return found;
    }

  private:
    __m256i parts_[4];
};

void find_contexts(const ContextRule& rule, const std::uint8_t* base, std::size_t itemsize, int row,
                   const std::int16_t* columns, std::size_t count, std::uint8_t* tables, std::uint8_t* lows,
                   std::uint8_t* origins) {
    const auto find = itemsize == 2 ? find_contexts_of<std::uint16_t> : find_contexts_of<std::uint32_t>;
    find(rule, base, row, columns, count, tables, origins);
    const Lookup table_of(rule.table_of), low_of(rule.low_of);
    std::size_t j = 0;
    for (; j + 32 <= count; j += 32) {
        const __m256i found = load_vector(tables + j);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lows + j), low_of(found));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(tables + j), table_of(found));
    }
    for (; j < count; ++j) {
        lows[j] = rule.low_of[tables[j]];
        tables[j] = rule.table_of[tables[j]];
    }
}

inline __m256i load_bytes(const std::uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

template <class Word>
inline __m256i load_items(const std::uint8_t* from) {
    if constexpr (sizeof(Word) == 4) return load_vector(from);
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// Give the states below 2^16 the next words.
inline __m256i refill(__m256i state, const std::uint8_t*& next) {
    const __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(state, 16), _mm256_setzero_si256());
    const auto set = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(low)));
    const __m256i coming = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(next)));
    const __m256i words = _mm256_permutevar8x32_epi32(coming, load_vector(turns[set].data()));
    next += 2 * _mm_popcnt_u32(set);
    return _mm256_blendv_epi8(state, _mm256_or_si256(_mm256_slli_epi32(state, 16), words), low);
}

inline __m256i low_part(__m256i state, __m256i bits) {
    const __m256i one = _mm256_set1_epi32(1);
    return _mm256_and_si256(state, _mm256_sub_epi32(_mm256_sllv_epi32(one, bits), one));
}

template <class Word, bool wide>
std::size_t decode_items(const ItemBlock& block, std::size_t first, ItemCursor& cursor) {
    constexpr std::ptrdiff_t margin = 2 * lanes * (wide ? 2 : 1);
    const __m256i unit_mask = _mm256_set1_epi32(frequency_unit - 1), zero = _mm256_setzero_si256();
    const __m256i sign = _mm256_set1_epi32(static_cast<int>(1u << (8 * sizeof(Word) - 1)));
    const __m256i last_difference = _mm256_set1_epi32(block.fresh_table - 1);
    __m256i state[vectors];
    for (std::size_t v = 0; v < vectors; ++v) state[v] = load_vector(cursor.states.data() + vector_lanes * v);
    const std::uint8_t* next = cursor.next;
    std::size_t i = first;
    for (; i + lanes <= block.count && cursor.end - next >= margin; i += lanes) {
        __m256i item[vectors];
#pragma GCC unroll 4
        for (std::size_t v = 0; v < vectors; ++v) {
            const std::size_t at = i + vector_lanes * v;
            const __m256i table = load_bytes(block.tables + at);
            const __m256i index = _mm256_or_si256(_mm256_slli_epi32(table, frequency_bits),
                                                  _mm256_and_si256(state[v], unit_mask));
            const __m256i slot = _mm256_i32gather_epi32(reinterpret_cast<const int*>(block.slots), index, 4);
            const __m256i high = _mm256_srli_epi32(state[v], frequency_bits);
            const __m256i frequency = _mm256_and_si256(_mm256_srli_epi32(slot, 6), unit_mask);
            __m256i left = _mm256_add_epi32(_mm256_mullo_epi32(frequency, high),
                                            _mm256_add_epi32(high, _mm256_srli_epi32(slot, 17)));
            const __m256i symbol = _mm256_and_si256(slot, _mm256_set1_epi32(63));
            const __m256i escaped = _mm256_cmpeq_epi32(symbol, zero);
            const __m256i low_bits = _mm256_andnot_si256(escaped, load_bytes(block.lows + at));
            const __m256i bits =
                wide ? _mm256_min_epi32(low_bits, _mm256_set1_epi32(first_low_bits)) : low_bits;
            __m256i low = low_part(left, bits);
            left = refill(_mm256_srlv_epi32(left, bits), next);
            if constexpr (wide) {
                const __m256i more = _mm256_sub_epi32(low_bits, bits);
                low = _mm256_or_si256(low, _mm256_slli_epi32(low_part(left, more), first_low_bits));
                left = refill(_mm256_srlv_epi32(left, more), next);
            }
            state[v] = left;

            const __m256i fresh = _mm256_cmpgt_epi32(table, last_difference);
            const __m256i k = _mm256_sub_epi32(symbol, _mm256_set1_epi32(symbol_zero));
            const __m256i size = _mm256_sub_epi32(_mm256_abs_epi32(k), _mm256_set1_epi32(1));
            const __m256i number =
                _mm256_add_epi32(_mm256_sllv_epi32(_mm256_blendv_epi8(k, size, fresh), low_bits), low);
            const __m256i value =
                _mm256_add_epi32(number, load_items<Word>(block.origins + at * sizeof(Word)));
            const __m256i below = _mm256_andnot_si256(fresh, _mm256_srai_epi32(value, 31));
            const __m256i flips = _mm256_or_si256(below, _mm256_and_si256(fresh, _mm256_srai_epi32(k, 31)));
            const __m256i base = load_items<Word>(block.base + at * sizeof(Word));
            item[v] = _mm256_or_si256(_mm256_andnot_si256(sign, _mm256_xor_si256(value, below)),
                                      _mm256_and_si256(sign, _mm256_xor_si256(base, flips)));
            if constexpr (sizeof(Word) == 2) item[v] = _mm256_and_si256(item[v], _mm256_set1_epi32(0xffff));
            const auto escapes = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(escaped)));
            if (escapes != 0) [[unlikely]] {
                alignas(32) std::uint32_t words[vector_lanes];
                _mm256_store_si256(reinterpret_cast<__m256i*>(words), item[v]);
                for (unsigned lane = 0; lane < vector_lanes; ++lane)
                    if (escapes >> lane & 1) {
                        words[lane] = 0;
                        take_item(cursor, sizeof(Word), reinterpret_cast<std::uint8_t*>(words + lane));
                    }
                item[v] = _mm256_load_si256(reinterpret_cast<const __m256i*>(words));
            }
        }
        std::uint8_t* out = block.out + i * sizeof(Word);
        if constexpr (sizeof(Word) == 4) {
            for (std::size_t v = 0; v < vectors; ++v)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32 * v), item[v]);
        } else {
            for (std::size_t v = 0; v < vectors; v += 2) {
                const __m256i packed =
                    _mm256_permute4x64_epi64(_mm256_packus_epi32(item[v], item[v + 1]), 0xd8);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * v), packed);
            }
        }
    }
    for (std::size_t v = 0; v < vectors; ++v)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(cursor.states.data() + vector_lanes * v), state[v]);
    cursor.next = next;
    return i;
}

std::size_t decode(const ItemBlock& block, std::size_t itemsize, std::size_t first, ItemCursor& cursor) {
    if (itemsize == 4) return decode_items<std::uint32_t, true>(block, first, cursor);
    return block.mantissa - 2 > first_low_bits ? decode_items<std::uint16_t, true>(block, first, cursor)
                                               : decode_items<std::uint16_t, false>(block, first, cursor);
}

}  // namespace

constinit const ExpectedKernels expected_kernels{find_contexts, decode};

}  // namespace slimtensors::residual::avx2
