#pragma once
#include "bins/model.h"
#include "core/dispatch.h"

namespace slimtensors::bins {

// The coder is rANS. States are in [2^16, 2^32) and are refilled with 16-bit words; frequencies are in units
// of 2^-12. Symbol i of a run uses state i mod (8 vectors). All states share one stream of words, in the
// order in which they need them.
inline constexpr std::uint32_t min_state = 1u << 16;
inline constexpr std::size_t vector_lanes = 8, max_vectors = 8;
inline constexpr std::size_t vector_words = vector_lanes * 2;  // maximum bytes consumed per vector

// More states are faster but cost two bytes each, so short chunks use fewer.
constexpr std::size_t vectors_for(std::size_t items) {
    return items < std::size_t{1} << 13 ? 1 : items < std::size_t{1} << 16 ? 4 : max_vectors;
}

// A slot of a decoding table: the symbol in bits 0 to 7, its frequency minus one in bits 8 to 19, and the
// offset from the symbol's first slot in bits 20 to 31.
using Slots = std::vector<std::uint32_t>;
void append_slots(std::span<const std::uint16_t> frequencies, Slots& slots);

struct RawReader {
    const std::uint8_t* bytes;
    std::size_t bit, bits;  // position and total
};

// Lower bound and number of raw bits of each bin.
struct RawBins {
    std::array<std::uint64_t, max_bins> lower;
    std::array<std::uint8_t, max_bins + 3> bits;  // padded for 32-bit reads
    std::array<std::uint32_t, max_bins> low;  // low half of `lower`; for items of two bytes, `bits` above it
    unsigned max_bits;                        // of the symbols that occur
    unsigned drop;
};

// A kernel stops early if it could need more input than is left, and returns the number of items done.
struct Kernels {
    // contexts[i] = table_of[columns[i]]; all columns are below 16.
    void (*find_contexts)(const std::uint8_t* table_of, const std::uint8_t* columns, std::size_t count,
                          std::uint8_t* contexts);
    // Full groups of 8 * vectors symbols; the plain kernel accepts any number.
    std::size_t (*decode_symbols)(const std::uint32_t* slots, const std::uint8_t* contexts, std::size_t count,
                                  std::size_t vectors, std::uint32_t* states, const std::uint8_t*& next,
                                  const std::uint8_t* end, std::uint8_t* symbols);
    // Assemble items from symbols and raw bits.
    std::size_t (*unpack_items)(const RawBins& bins, Mapping mapping, std::size_t itemsize,
                                const std::uint8_t* symbols, std::size_t count, RawReader& raw,
                                std::uint8_t* items);
};

inline constexpr std::size_t raw_margin = 16;  // bytes after the last raw bit that `unpack_items` may read

namespace plain {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}

const Kernels& active_kernels();

}  // namespace slimtensors::bins
