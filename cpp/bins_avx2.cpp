// The inner loops of the decoder of bins for AVX2: a vector of eight states decodes eight symbols.
#include <immintrin.h>

#include "bins_loops.h"

namespace slimtensors {
namespace {

struct Avx2 {};

// For each set of lanes that need a word: which of the next eight words a lane gets.
consteval std::array<std::array<std::uint8_t, 8>, 256> make_turns() {
    std::array<std::array<std::uint8_t, 8>, 256> turns{};
    for (unsigned lanes = 0; lanes < 256; ++lanes)
        for (unsigned lane = 0, turn = 0; lane < 8; ++lane)
            if (lanes >> lane & 1) turns[lanes][lane] = static_cast<std::uint8_t>(turn++);
    return turns;
}

constexpr std::array<std::array<std::uint8_t, 8>, 256> turns = make_turns();

void find_contexts(const std::uint8_t* table_of, const std::uint8_t* columns, std::size_t count,
                   std::uint8_t* contexts) {
    const __m256i tables =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table_of)));
    std::size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m256i labels = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns + i));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(contexts + i), _mm256_shuffle_epi8(tables, labels));
    }
    for (; i < count; ++i) contexts[i] = table_of[columns[i]];
}

// Eight symbols, in the low bytes of the result.
inline __m256i decode_eight(const std::uint32_t* slots, const std::uint8_t* contexts, __m256i& state,
                            const std::uint8_t*& next) {
    const __m256i table =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(contexts)));
    const __m256i rest = _mm256_and_si256(state, _mm256_set1_epi32(frequency_unit - 1));
    const __m256i index = _mm256_or_si256(_mm256_slli_epi32(table, frequency_bits), rest);
    const __m256i slot = _mm256_i32gather_epi32(reinterpret_cast<const int*>(slots), index, 4);
    const __m256i high = _mm256_srli_epi32(state, frequency_bits);
    const __m256i frequency =
        _mm256_and_si256(_mm256_srli_epi32(slot, 8), _mm256_set1_epi32(frequency_unit - 1));
    const __m256i left = _mm256_add_epi32(_mm256_mullo_epi32(frequency, high),
                                          _mm256_add_epi32(high, _mm256_srli_epi32(slot, 20)));

    const __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(left, 16), _mm256_setzero_si256());
    const auto lanes = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(low)));
    const __m256i turn =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(turns[lanes].data())));
    const __m256i coming = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(next)));
    const __m256i words = _mm256_permutevar8x32_epi32(coming, turn);
    state = _mm256_blendv_epi8(left, _mm256_or_si256(_mm256_slli_epi32(left, 16), words), low);
    next += 2 * _mm_popcnt_u32(lanes);
    return slot;
}

template <std::size_t vectors>
std::size_t decode_groups(const std::uint32_t* slots, const std::uint8_t* contexts, std::size_t count,
                          std::uint32_t* states, const std::uint8_t*& next, const std::uint8_t* end,
                          std::uint8_t* symbols) {
    constexpr std::ptrdiff_t margin = vectors * bins_vector_words;
    constexpr std::size_t lanes = vectors * bins_lanes;
    const std::uint8_t* words = next;
    __m256i state[vectors];
    for (std::size_t v = 0; v < vectors; ++v)
        state[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states + v * bins_lanes));
    const __m256i low_bytes = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4,
                                               8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    std::size_t i = 0;
    for (; i + lanes <= count && end - words >= margin; i += lanes)
#pragma GCC unroll 4
        for (std::size_t v = 0; v < vectors; ++v) {
            const __m256i slot = decode_eight(slots, contexts + i + v * bins_lanes, state[v], words);
            const __m256i packed = _mm256_shuffle_epi8(slot, low_bytes);
            const __m128i both =
                _mm_unpacklo_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
            _mm_storel_epi64(reinterpret_cast<__m128i*>(symbols + i + v * bins_lanes), both);
        }
    for (std::size_t v = 0; v < vectors; ++v)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(states + v * bins_lanes), state[v]);
    next = words;
    return i;
}

std::size_t decode_symbols(const std::uint32_t* slots, const std::uint8_t* contexts, std::size_t count,
                           std::size_t vectors, std::uint32_t* states, const std::uint8_t*& next,
                           const std::uint8_t* end, std::uint8_t* symbols) {
    const auto decode = vectors == 1 ? decode_groups<1> : vectors == 2 ? decode_groups<2> : decode_groups<4>;
    return decode(slots, contexts, count, states, next, end, symbols);
}

constexpr BinsKernels kernels{find_contexts, decode_symbols, BinsLoops<Avx2>::items};

}  // namespace

const BinsKernels& bins_kernels_avx2() { return kernels; }

}  // namespace slimtensors
