// The inner loop of density_decode() for AVX2: a vector of eight states decodes a byte of the mask.
#include <immintrin.h>

#include <array>

#include "masks/density_kernels.h"

namespace slimtensors::masks::avx2 {
namespace {

// For each set of lanes that need a word: the index of the word that each lane gets.
consteval std::array<std::array<std::uint8_t, 8>, 256> make_turns() {
    std::array<std::array<std::uint8_t, 8>, 256> turns{};
    for (unsigned lanes = 0; lanes < 256; ++lanes)
        for (unsigned lane = 0, turn = 0; lane < 8; ++lane)
            if (lanes >> lane & 1) turns[lanes][lane] = static_cast<std::uint8_t>(turn++);
    return turns;
}

constexpr std::array<std::array<std::uint8_t, 8>, 256> turns = make_turns();

inline unsigned lanes_of(__m256i flags) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(flags)));
}

inline __m256i load_words(const std::uint8_t* from) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline std::uint8_t decode_byte(const std::uint16_t* ones, __m256i& state, const std::uint8_t*& next) {
    const __m256i one = load_words(reinterpret_cast<const std::uint8_t*>(ones));
    const __m256i rest = _mm256_and_si256(state, _mm256_set1_epi32(chance_unit - 1));
    const __m256i part = _mm256_mullo_epi32(one, _mm256_srli_epi32(state, chance_bits));
    const __m256i bits = _mm256_cmpgt_epi32(one, rest);
    const __m256i if_zero = _mm256_sub_epi32(_mm256_sub_epi32(state, one), part);
    const __m256i if_one = _mm256_add_epi32(part, rest);
    const __m256i left = _mm256_blendv_epi8(if_zero, if_one, bits);

    const __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(left, 16), _mm256_setzero_si256());
    const unsigned lanes = lanes_of(low);
    const __m256i turn =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(turns[lanes].data())));
    const __m256i words = _mm256_permutevar8x32_epi32(load_words(next), turn);
    state = _mm256_blendv_epi8(left, _mm256_or_si256(_mm256_slli_epi32(left, 16), words), low);
    next += 2 * _mm_popcnt_u32(lanes);
    return static_cast<std::uint8_t>(lanes_of(bits));
}

template <std::size_t vectors>
std::size_t decode_row(const std::uint16_t* ones, std::size_t from, std::size_t bytes, std::uint32_t* states,
                       const std::uint8_t*& next, const std::uint8_t* end, std::uint8_t* mask) {
    constexpr std::ptrdiff_t margin = vectors * vector_words;
    const std::uint8_t* words = next;
    __m256i state[vectors];
    for (std::size_t v = 0; v < vectors; ++v)
        state[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states + v * vector_lanes));
    std::size_t j = from;
    for (; j + vectors <= bytes && end - words >= margin; j += vectors)
#pragma GCC unroll 4
        for (std::size_t v = 0; v < vectors; ++v)
            mask[j + v] = decode_byte(ones + (j + v) * vector_lanes, state[v], words);
    if (j + vectors > bytes && end - words >= margin)
#pragma GCC unroll 4
        for (std::size_t v = 0; v + 1 < vectors; ++v)
            if (j < bytes) {
                mask[j] = decode_byte(ones + j * vector_lanes, state[v], words);
                ++j;
            }
    for (std::size_t v = 0; v < vectors; ++v)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(states + v * vector_lanes), state[v]);
    next = words;
    return j;
}

}  // namespace

constinit const DensityKernels density_kernels{
    {nullptr, decode_row<1>, decode_row<2>, nullptr, decode_row<4>}};

}  // namespace slimtensors::masks::avx2
