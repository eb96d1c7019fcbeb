// The inner loops of the decoder for AVX2: a vector of eight states decodes eight symbols.
#include <immintrin.h>

#include "bins/unpack_items.h"

namespace slimtensors::bins::avx2 {
namespace {

// For each set of lanes that need a word: the index of the word that each lane gets. Stored as 32 bits,
// because widening would compete with the permutation for the same execution unit.
using Turns = std::array<std::uint32_t, 8>;

consteval std::array<Turns, 256> make_turns() {
    std::array<Turns, 256> turns{};
    for (unsigned lanes = 0; lanes < 256; ++lanes)
        for (unsigned lane = 0, turn = 0; lane < 8; ++lane)
            if (lanes >> lane & 1) turns[lanes][lane] = turn++;
    return turns;
}

constexpr std::array<Turns, 256> turns = make_turns();

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

// Decode eight symbols, in the low bytes of the result.
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
    const __m256i turn = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(turns[lanes].data()));
    const __m256i coming = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(next)));
    const __m256i words = _mm256_permutevar8x32_epi32(coming, turn);
    state = _mm256_or_si256(_mm256_sllv_epi32(left, _mm256_and_si256(low, _mm256_set1_epi32(16))),
                            _mm256_and_si256(words, low));
    next += 2 * _mm_popcnt_u32(lanes);
    return slot;
}

// Store the symbols of eight slots.
inline void store_eight(__m256i slot, std::uint8_t* symbols) {
    const __m256i numbers = _mm256_and_si256(slot, _mm256_set1_epi32(255));
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(symbols), _mm_packus_epi16(words, words));
}

inline void store_four(const __m256i* slot, std::uint8_t* symbols) {
    const __m256i low = _mm256_set1_epi32(255);
    const __m256i first = _mm256_packus_epi32(_mm256_and_si256(slot[0], low), _mm256_and_si256(slot[1], low));
    const __m256i second =
        _mm256_packus_epi32(_mm256_and_si256(slot[2], low), _mm256_and_si256(slot[3], low));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works within halves
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(symbols),
                        _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order));
}

template <std::size_t vectors>
std::size_t decode_groups(const std::uint32_t* slots, const std::uint8_t* contexts, std::size_t count,
                          std::uint32_t* states, const std::uint8_t*& next, const std::uint8_t* end,
                          std::uint8_t* symbols) {
    constexpr std::ptrdiff_t margin = vectors * vector_words;
    constexpr std::size_t lanes = vectors * vector_lanes;
    const std::uint8_t* words = next;
    __m256i state[vectors];
    for (std::size_t v = 0; v < vectors; ++v)
        state[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states + v * vector_lanes));
    std::size_t i = 0;
    for (; i + lanes <= count && end - words >= margin; i += lanes) {
        if constexpr (vectors == 1)
            store_eight(decode_eight(slots, contexts + i, state[0], words), symbols + i);
        else
#pragma GCC unroll 2
            for (std::size_t v = 0; v < vectors; v += 4) {  // more would not fit into registers
                __m256i slot[4];
#pragma GCC unroll 4
                for (std::size_t k = 0; k < 4; ++k)
                    slot[k] = decode_eight(slots, contexts + i + (v + k) * vector_lanes, state[v + k], words);
                store_four(slot, symbols + i + v * vector_lanes);
            }
    }
    for (std::size_t v = 0; v < vectors; ++v)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(states + v * vector_lanes), state[v]);
    next = words;
    return i;
}

std::size_t decode_symbols(const std::uint32_t* slots, const std::uint8_t* contexts, std::size_t count,
                           std::size_t vectors, std::uint32_t* states, const std::uint8_t*& next,
                           const std::uint8_t* end, std::uint8_t* symbols) {
    const auto decode = vectors == 1 ? decode_groups<1> : vectors == 4 ? decode_groups<4> : decode_groups<8>;
    return decode(slots, contexts, count, states, next, end, symbols);
}

// Shuffle indices of the four bytes, within the 128-bit half, that contain each lane's first bit.
inline __m256i four_bytes_at(__m256i bit) {
    const __m256i four_times = _mm256_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12, 0, 0, 0,
                                                0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    return _mm256_add_epi8(_mm256_shuffle_epi8(_mm256_srli_epi32(bit, 3), four_times),
                           _mm256_set1_epi32(0x03020100));
}

template <bool before_sign, bool drops>
inline __m256i restore_dropped(__m256i value, unsigned drop) {
    const __m128i by = _mm_cvtsi32_si128(static_cast<int>(drop + before_sign));
    if constexpr (before_sign)
        return _mm256_or_si256(_mm256_sll_epi32(_mm256_srli_epi32(value, 1), by),
                               _mm256_and_si256(value, _mm256_set1_epi32(1)));
    return drops ? _mm256_sll_epi32(value, by) : value;
}

// Gather `low` of eight symbols.
inline __m256i low_of(const RawBins& bins, const std::uint8_t* symbols) {
    const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(symbols)));
    return _mm256_i32gather_epi32(reinterpret_cast<const int*>(bins.low.data()), index, 4);
}

// The raw bits of eight items of two bytes. If none has more than 13 bits, one load of 16 bytes covers all.
struct RawWindow {
    const std::uint8_t* bytes;
    __m256i bit;  // of the first byte, in all lanes

    explicit RawWindow(const RawReader& raw)
        : bytes(raw.bytes + raw.bit / 8), bit(_mm256_set1_epi32(static_cast<int>(raw.bit % 8))) {}
    std::size_t bit_from(const std::uint8_t* start) const {
        return static_cast<std::size_t>(bytes - start) * 8 + static_cast<unsigned>(_mm256_cvtsi256_si32(bit));
    }
};
constexpr int max_window_bits = 13;

// Extract the positions of eight items within their bins.
template <bool drops_before_sign, bool drops>
inline __m256i eight_positions(__m256i low, unsigned drop, RawWindow& raw) {
    const __m256i bits = _mm256_srli_epi32(low, 16);
    // Prefix sum of the bits.
    __m256i sums = _mm256_add_epi32(bits, _mm256_slli_si256(bits, 4));
    sums = _mm256_add_epi32(sums, _mm256_slli_si256(sums, 8));
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(_mm256_permute2x128_si256(sums, sums, 0x08), 0xff));

    const __m256i at = _mm256_add_epi32(_mm256_sub_epi32(sums, bits), raw.bit);
    const __m256i bytes =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(raw.bytes)));
    const __m256i words = _mm256_shuffle_epi8(bytes, four_bytes_at(at));
    const __m256i seven = _mm256_set1_epi32(7), one = _mm256_set1_epi32(1);
    __m256i value = _mm256_srlv_epi32(words, _mm256_and_si256(at, seven));
    value = _mm256_and_si256(value, _mm256_sub_epi32(_mm256_sllv_epi32(one, bits), one));

    const __m256i end = _mm256_add_epi32(_mm256_permutevar8x32_epi32(sums, seven), raw.bit);
    raw.bit = _mm256_and_si256(end, seven);
    raw.bytes += static_cast<unsigned>(_mm256_cvtsi256_si32(end)) / 8;
    return restore_dropped<drops_before_sign, drops>(value, drop);
}

// Pack two vectors of numbers below 2^16 into one, in order.
inline __m256i pack16(__m256i first, __m256i second) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0b11011000);
}

template <Mapping mapping, bool drops>
std::size_t unpack_16bit(const RawBins& bins, const std::uint8_t* symbols, std::size_t count,
                         RawReader& reader, std::uint8_t* items) {
    constexpr bool before_sign = drops && mapping == Mapping::sign_last;
    const __m256i widest = _mm256_set1_epi32(((max_window_bits + 1) << 16) - 1);
    const __m256i low_half = _mm256_set1_epi32(0xffff);
    const std::uint8_t* const end = reader.bytes + reader.bits / 8;
    RawWindow raw(reader);
    std::size_t i = 0;
    for (; i + 16 <= count && end - raw.bytes >= 40; i += 16) {
        const __m256i low[2] = {low_of(bins, symbols + i), low_of(bins, symbols + i + 8)};
        const __m256i wide = _mm256_cmpgt_epi32(_mm256_max_epi32(low[0], low[1]), widest);
        if (!_mm256_testz_si256(wide, wide)) [[unlikely]] {
            reader.bit = raw.bit_from(reader.bytes);
            unpack_items_as<std::uint16_t, mapping, drops>(bins, symbols + i, 16, reader, items + 2 * i);
            raw = RawWindow(reader);
            continue;
        }
        const __m256i first = eight_positions<before_sign, drops>(low[0], bins.drop, raw);
        const __m256i second = eight_positions<before_sign, drops>(low[1], bins.drop, raw);
        __m256i item = pack16(_mm256_add_epi32(first, _mm256_and_si256(low[0], low_half)),
                              _mm256_add_epi32(second, _mm256_and_si256(low[1], low_half)));
        if constexpr (mapping == Mapping::sign_last)
            item = _mm256_or_si256(_mm256_srli_epi16(item, 1), _mm256_slli_epi16(item, 15));
        if constexpr (mapping == Mapping::zigzag)
            item = _mm256_xor_si256(_mm256_srli_epi16(item, 1),
                                    _mm256_srai_epi16(_mm256_slli_epi16(item, 15), 15));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(items + 2 * i), item);
    }
    reader.bit = raw.bit_from(reader.bytes);
    return i;
}

constexpr int max_half_bits = 25;  // every item fits into the 32 bits from its first byte

template <Mapping mapping, bool drops>
std::size_t unpack_32bit(const RawBins& bins, const std::uint8_t* symbols, std::size_t count,
                         RawReader& reader, std::uint8_t* items) {
    constexpr bool before_sign = drops && mapping == Mapping::sign_last;
    const __m256i one = _mm256_set1_epi32(1), seven = _mm256_set1_epi32(7);
    RawReader raw = reader;
    std::size_t i = 0;
    for (; i + 8 <= count && raw.bits >= raw.bit + 8 * 32; i += 8) {
        const __m256i index =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(symbols + i)));
        const __m256i low = _mm256_i32gather_epi32(reinterpret_cast<const int*>(bins.low.data()), index, 4);
        const __m256i bits =
            _mm256_and_si256(_mm256_i32gather_epi32(reinterpret_cast<const int*>(bins.bits.data()), index, 1),
                             _mm256_set1_epi32(255));
        const __m256i wide = _mm256_cmpgt_epi32(bits, _mm256_set1_epi32(max_half_bits));
        if (!_mm256_testz_si256(wide, wide)) [[unlikely]] {
            unpack_items_as<std::uint32_t, mapping, drops>(bins, symbols + i, 8, raw, items + 4 * i);
            continue;
        }
        __m256i sums = _mm256_add_epi32(bits, _mm256_slli_si256(bits, 4));  // within its half
        sums = _mm256_add_epi32(sums, _mm256_slli_si256(sums, 8));
        const std::size_t middle = raw.bit + static_cast<unsigned>(_mm256_extract_epi32(sums, 3));
        const __m256i bytes = _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(raw.bytes + middle / 8),
                                                  reinterpret_cast<const __m128i*>(raw.bytes + raw.bit / 8));
        const __m256i before = _mm256_set_m128i(_mm_set1_epi32(static_cast<int>(middle % 8)),
                                                _mm_set1_epi32(static_cast<int>(raw.bit % 8)));
        const __m256i at = _mm256_add_epi32(_mm256_sub_epi32(sums, bits), before);
        __m256i value =
            _mm256_srlv_epi32(_mm256_shuffle_epi8(bytes, four_bytes_at(at)), _mm256_and_si256(at, seven));
        value = _mm256_and_si256(value, _mm256_sub_epi32(_mm256_sllv_epi32(one, bits), one));
        raw.bit = middle + static_cast<unsigned>(_mm256_extract_epi32(sums, 7));
        __m256i item = _mm256_add_epi32(low, restore_dropped<before_sign, drops>(value, bins.drop));
        if constexpr (mapping == Mapping::sign_last)
            item = _mm256_or_si256(_mm256_srli_epi32(item, 1), _mm256_slli_epi32(item, 31));
        if constexpr (mapping == Mapping::zigzag)
            item = _mm256_xor_si256(_mm256_srli_epi32(item, 1),
                                    _mm256_srai_epi32(_mm256_slli_epi32(item, 31), 31));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(items + 4 * i), item);
    }
    reader.bit = raw.bit;
    return i;
}

// Return the loop for a mapping.
template <class Loop>
constexpr auto choose(Mapping mapping, bool drops) {
    if (mapping == Mapping::zigzag) return Loop::template run<Mapping::zigzag, false>;
    if (mapping == Mapping::sign_last)
        return drops ? Loop::template run<Mapping::sign_last, true>
                     : Loop::template run<Mapping::sign_last, false>;
    return drops ? Loop::template run<Mapping::plain, true> : Loop::template run<Mapping::plain, false>;
}

struct Items16 {
    template <Mapping mapping, bool drops>
    static constexpr auto run = unpack_16bit<mapping, drops>;
};
struct Items32 {
    template <Mapping mapping, bool drops>
    static constexpr auto run = unpack_32bit<mapping, drops>;
};

std::size_t unpack_all(const RawBins& bins, Mapping mapping, std::size_t itemsize,
                       const std::uint8_t* symbols, std::size_t count, RawReader& raw, std::uint8_t* items) {
    std::size_t done = 0;
    if (itemsize == 2)
        done = choose<Items16>(mapping, bins.drop != 0)(bins, symbols, count, raw, items);
    else if (itemsize == 4)
        done = choose<Items32>(mapping, bins.drop != 0)(bins, symbols, count, raw, items);
    return done +
           unpack_items(bins, mapping, itemsize, symbols + done, count - done, raw, items + done * itemsize);
}

}  // namespace

constinit const Kernels kernels{find_contexts, decode_symbols, unpack_all};

}  // namespace slimtensors::bins::avx2
