#pragma once
#include "bins/model.h"

namespace slimtensors {

// The coder of bins.h is rANS. A state lies in [2^16, 2^32) and takes in 16-bit words; frequencies are in
// units of 2^-12. Symbol i of a run belongs to state i mod (8 vectors), and all states read from one stream
// of words, in the order in which they need them.
inline constexpr std::uint32_t lowest_bins_state = 1u << 16;
inline constexpr std::size_t bins_lanes = 8, most_bins_vectors = 8;
inline constexpr std::size_t bins_vector_words = bins_lanes * 2;  // bytes that a vector takes in at most

// More states are faster but cost two bytes each, so short chunks use fewer.
constexpr std::size_t bins_vectors(std::size_t items) {
    return items < std::size_t{1} << 13 ? 1 : items < std::size_t{1} << 16 ? 4 : most_bins_vectors;
}

// A slot of a decoding table: symbol in bits 0 to 7, its frequency less one in bits 8 to 19, and how far the
// slot lies from the symbol's first one in bits 20 to 31.
using Slots = std::vector<std::uint32_t>;
void append_slots(std::span<const std::uint16_t> frequencies, Slots& slots);

struct RawReader {
    const std::uint8_t* bytes;
    std::size_t bit, bits;  // where it is, and how many there are
};

// What to add to the raw bits of a bin, and how many these are.
struct RawBins {
    std::array<std::uint64_t, most_bins> lower;
    std::array<std::uint8_t, most_bins + 3> bits;  // with room to read 32 bits at the last one
    std::array<std::uint32_t, most_bins> low;      // half of `lower`; for items of two bytes, above it `bits`
    unsigned most;                                 // bits that a symbol of any table has
    unsigned drop;
};

// Each kernel stops early, and returns how many items it did, where it could need more than is left.
struct BinsKernels {
    // contexts[i] = table_of[columns[i]], which are all below 16.
    void (*find_contexts)(const std::uint8_t* table_of, const std::uint8_t* columns, std::size_t count,
                          std::uint8_t* contexts);
    // Whole groups of 8 * vectors symbols, or any number of them in the plain kernel.
    std::size_t (*symbols)(const std::uint32_t* slots, const std::uint8_t* contexts, std::size_t count,
                           std::size_t vectors, std::uint32_t* states, const std::uint8_t*& next,
                           const std::uint8_t* end, std::uint8_t* symbols);
    // Items from symbols and raw bits.
    std::size_t (*items)(const RawBins& bins, Mapping mapping, std::size_t itemsize,
                         const std::uint8_t* symbols, std::size_t count, RawReader& raw, std::uint8_t* items);
};

extern const BinsKernels bins_kernels_plain;
const BinsKernels& bins_kernels_avx2();
inline constexpr std::size_t raw_margin = 16;  // bytes behind the last raw bit that `items` may read

}  // namespace slimtensors
