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
    const __m256i table = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(contexts)));
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
    const __m256i low_bytes = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0,
                                               4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    std::size_t i = 0;
    for (; i + lanes <= count && end - words >= margin; i += lanes)
#pragma GCC unroll 8
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
    const auto decode = vectors == 1 ? decode_groups<1> : vectors == 4 ? decode_groups<4> : decode_groups<8>;
    return decode(slots, contexts, count, states, next, end, symbols);
}

// Numbers of eight items of two bytes, which have up to 16 raw bits each.
template <bool drops_before_sign, bool drops>
inline __m256i eight_numbers(const RawBins& bins, const std::uint8_t* symbols, RawReader& raw) {
    const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(symbols)));
    const __m256i both = _mm256_i32gather_epi32(reinterpret_cast<const int*>(bins.both.data()), index, 4);
    const __m256i bits = _mm256_srli_epi32(both, 16);
    // How many bits the items of its half up to each one have.
    __m256i upto = _mm256_add_epi32(bits, _mm256_slli_si256(bits, 4));
    upto = _mm256_add_epi32(upto, _mm256_slli_si256(upto, 8));
    const std::size_t middle = raw.bit + static_cast<unsigned>(_mm256_extract_epi32(upto, 3));
    const std::size_t end = middle + static_cast<unsigned>(_mm256_extract_epi32(upto, 7));

    // Four items have 71 bits at the most, with those before the first of them in its byte.
    const __m256i bytes = _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(raw.bytes + middle / 8),
                                              reinterpret_cast<const __m128i*>(raw.bytes + raw.bit / 8));
    const __m256i before = _mm256_set_m128i(_mm_set1_epi32(static_cast<int>(middle % 8)),
                                            _mm_set1_epi32(static_cast<int>(raw.bit % 8)));
    const __m256i at = _mm256_add_epi32(_mm256_sub_epi32(upto, bits), before);
    const __m256i first = _mm256_shuffle_epi8(
        _mm256_srli_epi32(at, 3), _mm256_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12, 0, 0,
                                                   0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
    const __m256i words = _mm256_shuffle_epi8(bytes, _mm256_add_epi8(first, _mm256_set1_epi32(0x03020100)));
    __m256i value = _mm256_srlv_epi32(words, _mm256_and_si256(at, _mm256_set1_epi32(7)));
    const __m256i one = _mm256_set1_epi32(1);
    value = _mm256_and_si256(value, _mm256_sub_epi32(_mm256_sllv_epi32(one, bits), one));
    raw.bit = end;
    if constexpr (drops_before_sign)
        value = _mm256_or_si256(
            _mm256_sll_epi32(_mm256_srli_epi32(value, 1), _mm_cvtsi32_si128(static_cast<int>(bins.drop + 1))),
            _mm256_and_si256(value, one));
    else if constexpr (drops)
        value = _mm256_sll_epi32(value, _mm_cvtsi32_si128(static_cast<int>(bins.drop)));
    return _mm256_add_epi32(_mm256_and_si256(both, _mm256_set1_epi32(0xffff)), value);
}

template <Mapping mapping, bool drops>
std::size_t pairs_as(const RawBins& bins, const std::uint8_t* symbols, std::size_t count, RawReader& reader,
                     std::uint8_t* items) {
    RawReader raw = reader;
    std::size_t i = 0;
    for (; i + 8 <= count && raw.bits >= raw.bit + 8 * 16; i += 8) {
        const __m256i number = eight_numbers < drops && mapping == Mapping::sign_last,
                      drops > (bins, symbols + i, raw);
        const __m256i packed = _mm256_packus_epi32(number, number);
        __m128i item =
            _mm_unpacklo_epi64(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
        if constexpr (mapping == Mapping::sign_last)
            item = _mm_or_si128(_mm_srli_epi16(item, 1), _mm_slli_epi16(item, 15));
        if constexpr (mapping == Mapping::zigzag)
            item = _mm_xor_si128(_mm_srli_epi16(item, 1), _mm_srai_epi16(_mm_slli_epi16(item, 15), 15));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(items + 2 * i), item);
    }
    reader.bit = raw.bit;
    return i;
}

std::size_t make_items(const RawBins& bins, Mapping mapping, std::size_t itemsize,
                       const std::uint8_t* symbols, std::size_t count, RawReader& raw, std::uint8_t* items) {
    using enum Mapping;
    std::size_t done = 0;
    if (itemsize == 2) {
        const auto run = mapping == zigzag ? pairs_as<zigzag, false>
                         : mapping == sign_last
                             ? bins.drop != 0 ? pairs_as<sign_last, true> : pairs_as<sign_last, false>
                         : bins.drop != 0 ? pairs_as<plain, true>
                                          : pairs_as<plain, false>;
        done = run(bins, symbols, count, raw, items);
    }
    return done + BinsLoops<Avx2>::items(bins, mapping, itemsize, symbols + done, count - done, raw,
                                         items + done * itemsize);
}

constexpr BinsKernels kernels{find_contexts, decode_symbols, make_items};

}  // namespace

const BinsKernels& bins_kernels_avx2() { return kernels; }

}  // namespace slimtensors
