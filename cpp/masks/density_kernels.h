#pragma once
#include "core/bytes.h"

namespace slimtensors {

// The coder of density.h is rANS on bits. A state lies in [2^16, 2^32) and takes in 16-bit words; chances are
// in units of 2^-14. The eight bits of a mask byte are coded by the eight states of a vector, byte j of a row
// by vector j mod `vectors`. All states read from one stream of words, in the order in which they need them.
inline constexpr unsigned chance_bits = 14;
inline constexpr std::uint32_t chance_unit = 1u << chance_bits;
inline constexpr std::uint32_t lowest_state = 1u << 16;
inline constexpr std::size_t vector_lanes = 8;
inline constexpr std::size_t most_vectors = 4;
inline constexpr std::size_t vector_words = vector_lanes * 2;  // bytes that a vector takes in at most

// A chance as a byte: the rarer bit is (8 + m) 2^e / 4 units likely, m and e being the low 3 and next 4 bits,
// and at most half; the top bit says that the rarer one is zero.
inline constexpr unsigned highest_chance = 12 * 8;

constexpr bool is_chance(unsigned code) { return (code & 127) <= highest_chance; }

constexpr std::uint32_t chance_of_one(unsigned code) {
    const std::uint32_t rare = (8 + (code & 7)) << (code >> 3 & 15) >> 2;
    return code & 128 ? chance_unit - rare : rare;
}

// More states are faster but cost three bytes each, so short masks use fewer.
constexpr std::size_t vectors_for(std::size_t mask_bytes) {
    return mask_bytes < std::size_t{1} << 15 ? 1 : mask_bytes < std::size_t{1} << 17 ? 2 : most_vectors;
}

// Throws std::invalid_argument unless the sizes fit together as density.h says.
void check_density_sizes(std::size_t mask_bytes, std::size_t rows, std::size_t columns, std::size_t chances);

// Decode one row from its byte `from`, a multiple of the number of vectors, and return how many of its bytes
// are done. A kernel stops as soon as fewer than vectors * vector_words bytes lie between `next` and `end`,
// so it stays between them whatever they contain. `ones` has the chance of a one for each bit of the row.
using DensityRow = std::size_t (*)(const std::uint16_t* ones, std::size_t from, std::size_t bytes,
                                   std::uint32_t* states, const std::uint8_t*& next, const std::uint8_t* end,
                                   std::uint8_t* mask);

DensityRow density_row_plain(std::size_t vectors);
DensityRow density_row_avx2(std::size_t vectors);

}  // namespace slimtensors
