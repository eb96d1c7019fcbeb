// Decoding with AVX2: four vectors of eight columns.
#include <immintrin.h>

#include "trellis/kernels.h"

namespace slimtensors::trellis::avx2 {
namespace {

constexpr std::size_t vectors = 4;

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

__m256i load_words(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// The states that follow each state: for even integers in bits 0 to 3, for odd ones in bits 4 to 7.
__m256i make_transitions() {
    std::array<std::uint32_t, states> packed{};
    for (std::size_t s = 0; s < states; ++s) packed[s] = next_state[s][0] | next_state[s][1] << 4;
    return load_words(packed.data());
}

// Nearest bfloat16 numbers of finite values, in the high halves.
__m256i round_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

template <class Float>
void store_row(const __m256* values, std::uint8_t* out) {
    if constexpr (sizeof(typename Float::Bits) == 4) {
        for (std::size_t v = 0; v < vectors; ++v)
            _mm256_storeu_ps(reinterpret_cast<float*>(out) + 8 * v, values[v]);
    } else {
        alignas(32) float row[lanes];
        for (std::size_t v = 0; v < vectors; ++v) _mm256_store_ps(row + 8 * v, values[v]);
        for (std::size_t j = 0; j < lanes; ++j) store(out + 2 * j, Float::nearest(row[j]));
    }
}

template <>
void store_row<BF16>(const __m256* values, std::uint8_t* out) {
    for (std::size_t v = 0; v < vectors; v += 2) {
        const __m256i first = _mm256_srli_epi32(round_bf16(values[v]), 16);
        const __m256i second = _mm256_srli_epi32(round_bf16(values[v + 1]), 16);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * v), packed);
    }
}

// Replace the integers of escaped lanes.
__attribute__((noinline)) __m256i read_escapes(__m256i k, unsigned set, Cursor& cursor) {
    alignas(32) std::int32_t values[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(values), k);
    for (unsigned lane = 0; lane < 8; ++lane)
        if (set >> lane & 1) values[lane] = take_escape(cursor);
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(values));
}

template <class Float>
std::size_t decode_rows(const Group& group, std::size_t first, Cursor& cursor) {
    const __m256i transitions = make_transitions();
    __m256i state[vectors], quantizer[vectors], column_class[vectors];
    __m256 column_step[vectors];
    for (std::size_t v = 0; v < vectors; ++v) {
        state[v] = load_words(cursor.states.data() + 8 * v);
        quantizer[v] = load_words(cursor.quantizers.data() + 8 * v);
        column_class[v] = _mm256_cvtepi16_epi32(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(group.column_classes + 8 * v)));
        column_step[v] = _mm256_loadu_ps(group.column_steps + 8 * v);
    }
    const __m256i first_class = _mm256_set1_epi32(group.first_class);
    const __m256i unit_mask = _mm256_set1_epi32(frequency_unit - 1), one = _mm256_set1_epi32(1);
    const std::uint8_t* next = cursor.next;
    std::size_t i = first;
    for (; i < group.rows && cursor.end - next >= static_cast<std::ptrdiff_t>(max_row_words); ++i) {
        const __m256i row_class = _mm256_set1_epi32(group.row_classes[i]);
        const __m256 row_step = _mm256_set1_ps(group.row_steps[i]);
        __m256 values[vectors];
#pragma GCC unroll 4
        for (std::size_t v = 0; v < vectors; ++v) {
            const __m256i sum = _mm256_add_epi32(row_class, column_class[v]);
            const __m256i weight_class = _mm256_min_epi32(_mm256_max_epi32(sum, _mm256_setzero_si256()),
                                                          _mm256_set1_epi32(classes - 1));
            const __m256i odd = _mm256_and_si256(quantizer[v], one);
            const __m256i position = _mm256_sub_epi32(weight_class, first_class);
            const __m256i table = _mm256_add_epi32(_mm256_add_epi32(position, position), odd);
            const __m256i index = _mm256_or_si256(_mm256_slli_epi32(table, frequency_bits),
                                                  _mm256_and_si256(state[v], unit_mask));
            const __m256i slot = _mm256_i32gather_epi32(reinterpret_cast<const int*>(group.slots), index, 4);

            const __m256i high = _mm256_srli_epi32(state[v], frequency_bits);
            const __m256i frequency = _mm256_and_si256(_mm256_srli_epi32(slot, 9), unit_mask);
            const __m256i left = _mm256_add_epi32(_mm256_mullo_epi32(frequency, high),
                                                  _mm256_add_epi32(high, _mm256_srli_epi32(slot, 20)));
            const __m256i low_bits = _mm256_and_si256(_mm256_srli_epi32(slot, 6), _mm256_set1_epi32(7));
            const __m256i rest = _mm256_srlv_epi32(left, low_bits);

            const __m256i symbol = _mm256_and_si256(slot, _mm256_set1_epi32(63));
            // k = (symbol - 32) * 2^low_bits + low, where low = left - rest * 2^low_bits
            __m256i k = _mm256_add_epi32(
                left, _mm256_sllv_epi32(
                          _mm256_sub_epi32(_mm256_sub_epi32(symbol, _mm256_set1_epi32(symbol_zero)), rest),
                          low_bits));
            const __m256i escaped = _mm256_cmpeq_epi32(symbol, _mm256_setzero_si256());
            const auto escapes = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(escaped)));
            if (escapes) [[unlikely]]
                k = read_escapes(k, escapes, cursor);

            const __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(rest, 16), _mm256_setzero_si256());
            const auto set = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(low)));
            const __m256i coming =
                _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(next)));
            const __m256i words = _mm256_permutevar8x32_epi32(coming, load_words(turns[set].data()));
            state[v] = _mm256_blendv_epi8(rest, _mm256_or_si256(_mm256_slli_epi32(rest, 16), words), low);
            next += 2 * _mm_popcnt_u32(set);

            const __m256i steps = _mm256_sub_epi32(_mm256_add_epi32(k, k), _mm256_sign_epi32(odd, k));
            values[v] = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(steps), row_step), column_step[v]);
            const __m256i following = _mm256_permutevar8x32_epi32(transitions, quantizer[v]);
            const __m256i by_parity = _mm256_slli_epi32(_mm256_and_si256(k, one), 2);
            quantizer[v] = _mm256_and_si256(_mm256_srlv_epi32(following, by_parity), _mm256_set1_epi32(7));
        }
        store_row<Float>(values, group.out + i * group.stride);
    }
    for (std::size_t v = 0; v < vectors; ++v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(cursor.states.data() + 8 * v), state[v]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(cursor.quantizers.data() + 8 * v), quantizer[v]);
    }
    cursor.next = next;
    return i;
}

std::size_t decode(const Group& group, std::size_t first, Cursor& cursor) {
    if (group.columns < lanes) return first;
    switch (group.type) {
        case FloatType::bf16:
            return decode_rows<BF16>(group, first, cursor);
        case FloatType::f16:
            return decode_rows<F16>(group, first, cursor);
        default:
            return decode_rows<F32>(group, first, cursor);
    }
}

}  // namespace

constinit const Kernels kernels{decode};

}  // namespace slimtensors::trellis::avx2
