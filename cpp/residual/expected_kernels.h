#pragma once
#include <stdexcept>

#include "core/dispatch.h"
#include "residual/expected_model.h"

namespace slimtensors::residual {

// The coder is rANS. States are in [2^16, 2^32) and are refilled with 16-bit words. Item i of a chunk uses
// state i mod 32. All states share one stream of words, in the order in which they need them: for every eight
// items first those of the symbols, then those of the remaining low bits.
inline constexpr std::size_t lanes = 32, vector_lanes = 8;
inline constexpr std::uint32_t min_state = 1u << 16;
inline constexpr unsigned first_low_bits = 5;  // coded together with the symbol

// A slot of a decoding table: the symbol in bits 0 to 5, the frequency minus one in bits 6 to 16, and the
// offset from the symbol's first slot in bits 17 to 27.

// How to find the contexts of items of a row.
struct ContextRule {
    const std::uint8_t* table_of;  // by context
    const std::uint8_t* low_of;
    unsigned fresh_context;  // the first context with a table for fresh items
    unsigned mantissa;
};

// Items in arrays that are parallel to each other.
struct ItemBlock {
    const std::uint32_t* slots;
    const std::uint8_t *tables, *lows, *origins;  // origins: magnitudes that numbers are counted from
    const std::uint8_t* base;
    std::uint8_t* out;
    std::size_t count;
    int fresh_table;  // the first one
    unsigned mantissa;
};

// Where decoding has arrived.
struct ItemCursor {
    std::array<std::uint32_t, lanes> states;
    const std::uint8_t *next, *end;            // words
    const std::uint8_t *escape, *escapes_end;  // items
};

struct ExpectedKernels {
    void (*find_contexts)(const ContextRule& rule, const std::uint8_t* base, std::size_t itemsize, int row,
                          const std::int16_t* columns, std::size_t count, std::uint8_t* tables,
                          std::uint8_t* lows, std::uint8_t* origins);
    // Decode from item `first`, a multiple of 32; return the number of items done, less than all if the words
    // may not suffice for another 32. The plain kernel decodes all or throws.
    std::size_t (*decode)(const ItemBlock& block, std::size_t itemsize, std::size_t first,
                          ItemCursor& cursor);
};

namespace plain {
extern const ExpectedKernels expected_kernels;
}
namespace avx2 {
extern const ExpectedKernels expected_kernels;
}

// Copy the next escaped item; throw if there is none.
inline void take_item(ItemCursor& cursor, std::size_t itemsize, std::uint8_t* out) {
    if (static_cast<std::size_t>(cursor.escapes_end - cursor.escape) < itemsize)
        throw std::invalid_argument("chunk of changes has too few escaped items");
    std::memcpy(out, cursor.escape, itemsize);
    cursor.escape += itemsize;
}

namespace SLIM_TARGET {

// The item that a number stands for: k from the symbol, low bits, and the magnitude to count from.
inline std::uint32_t place_item(std::int32_t k, unsigned low_bits, std::uint32_t low, std::uint32_t origin,
                                bool fresh, std::uint32_t base, std::uint32_t sign) {
    const std::int32_t high = fresh ? (k < 0 ? -k : k) - 1 : k;
    const std::uint32_t value = (static_cast<std::uint32_t>(high) << low_bits) + low + origin;
    const bool below = static_cast<std::int32_t>(value) < 0 && !fresh;
    const bool flips = fresh ? k < 0 : below;
    return ((below ? ~value : value) & (sign - 1)) | ((flips ? ~base : base) & sign);
}

template <class Word>
void find_contexts_of(const ContextRule& rule, const std::uint8_t* base, int row, const std::int16_t* columns,
                      std::size_t count, std::uint8_t* found, std::uint8_t* origins) {
    constexpr Word no_sign = Word(Word(~Word(0)) >> 1);
    for (std::size_t j = 0; j < count; ++j) {
        const Word magnitude = load<Word>(base + j * sizeof(Word)) & no_sign;
        const int exponent = static_cast<int>(magnitude >> rule.mantissa), sum = row + columns[j];
        const int context = (sum >> 1) - 2 * (exponent < 1 ? 1 : exponent) + context_zero;
        const int limited = context < 0 ? 0 : context >= contexts ? contexts - 1 : context;
        const int least = (sum >> 2) - fresh_octaves;
        const auto start =
            static_cast<Word>(static_cast<std::uint32_t>(least < 0 ? 0 : least) << rule.mantissa);
        found[j] = static_cast<std::uint8_t>(limited);
        store(origins + j * sizeof(Word),
              limited >= static_cast<int>(rule.fresh_context) ? Word(start & no_sign) : magnitude);
    }
}

}  // namespace SLIM_TARGET
}  // namespace slimtensors::residual
