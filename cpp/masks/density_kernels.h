#pragma once
#include "core/bytes.h"
#include "core/dispatch.h"

namespace slimtensors::masks {

// The density coder is binary rANS. States are in [2^16, 2^32) and are refilled with 16-bit words;
// probabilities are in units of 2^-14. The eight bits of a mask byte are coded by the eight states of a
// vector; byte j of a row uses vector j mod `vectors`. All states share one stream of words, in the order in
// which they need them.
inline constexpr unsigned chance_bits = 14;
inline constexpr std::uint32_t chance_unit = 1u << chance_bits;
inline constexpr std::uint32_t min_state = 1u << 16;
inline constexpr std::size_t vector_lanes = 8;
inline constexpr std::size_t max_vectors = 4;
inline constexpr std::size_t vector_words = vector_lanes * 2;  // maximum bytes consumed per vector

// A probability as a byte: the rarer bit has (8 + m) 2^e / 4 units, where m is the low 3 bits and e the next
// 4, and at most one half. The top bit is set if the rarer bit is zero.
inline constexpr unsigned max_chance = 12 * 8;

constexpr bool is_chance(unsigned code) { return (code & 127) <= max_chance; }

constexpr std::uint32_t chance_of_one(unsigned code) {
    const std::uint32_t rare = (8 + (code & 7)) << (code >> 3 & 15) >> 2;
    return code & 128 ? chance_unit - rare : rare;
}

// More states are faster but cost three bytes each, so short masks use fewer.
constexpr std::size_t vectors_for(std::size_t mask_bytes) {
    return mask_bytes < std::size_t{1} << 15 ? 1 : mask_bytes < std::size_t{1} << 17 ? 2 : max_vectors;
}

// Throw std::invalid_argument unless the sizes are consistent.
void check_density_sizes(std::size_t mask_bytes, std::size_t rows, std::size_t columns, std::size_t chances);

// Decode one row starting at byte `from`, a multiple of the number of vectors, and return the number of bytes
// done. Stops if fewer than vectors * vector_words bytes are left between `next` and `end`, so it stays
// between them whatever they contain. `ones` has the probability of a one for each bit of the row.
using DecodeRow = std::size_t (*)(const std::uint16_t* ones, std::size_t from, std::size_t bytes,
                                  std::uint32_t* states, const std::uint8_t*& next, const std::uint8_t* end,
                                  std::uint8_t* mask);

struct DensityKernels {
    DecodeRow decode_row[max_vectors + 1];  // by the number of vectors: 1, 2 or 4
};

namespace plain {
extern const DensityKernels density_kernels;
}
namespace avx2 {
extern const DensityKernels density_kernels;
}

}  // namespace slimtensors::masks
