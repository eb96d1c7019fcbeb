// Decoding of changes in portable C++.
#include "core/check.h"
#include "residual/expected_kernels.h"

namespace slimtensors::residual::plain {
namespace {

void find_contexts(const ContextRule& rule, const std::uint8_t* base, std::size_t itemsize, int row,
                   const std::int16_t* columns, std::size_t count, std::uint8_t* tables, std::uint8_t* lows,
                   std::uint8_t* origins) {
    const auto find = itemsize == 2 ? find_contexts_of<std::uint16_t> : find_contexts_of<std::uint32_t>;
    find(rule, base, row, columns, count, tables, origins);
    for (std::size_t j = 0; j < count; ++j) {
        lows[j] = rule.low_of[tables[j]];
        tables[j] = rule.table_of[tables[j]];
    }
}

void refill(std::uint32_t& state, ItemCursor& cursor) {
    if (state >= min_state) return;
    check(cursor.end - cursor.next >= 2, "chunk of changes has too few words");
    state = state << 16 | load<std::uint16_t>(cursor.next);
    cursor.next += 2;
}

template <class Word>
std::size_t decode_items(const ItemBlock& block, std::size_t first, ItemCursor& cursor) {
    constexpr std::uint32_t sign = 1u << (8 * sizeof(Word) - 1);
    for (std::size_t from = first; from < block.count; from += vector_lanes) {
        const std::size_t until = from + vector_lanes < block.count ? from + vector_lanes : block.count;
        std::uint32_t symbols_of[vector_lanes], lows[vector_lanes];
        for (std::size_t i = from; i < until; ++i) {
            std::uint32_t& state = cursor.states[i % lanes];
            const std::uint32_t slot = block.slots[block.tables[i] * frequency_unit + state % frequency_unit];
            const std::uint32_t symbol = slot & 63, low_bits = symbol == escape ? 0 : block.lows[i];
            state = ((slot >> 6 & (frequency_unit - 1)) + 1) * (state >> frequency_bits) + (slot >> 17);
            const unsigned bits = low_bits < first_low_bits ? low_bits : first_low_bits;
            lows[i - from] = state & ((1u << bits) - 1);
            state >>= bits;
            refill(state, cursor);
            symbols_of[i - from] = symbol;
        }
        for (std::size_t i = from; i < until; ++i) {
            const std::uint32_t symbol = symbols_of[i - from];
            const unsigned low_bits = symbol == escape ? 0 : block.lows[i];
            if (low_bits > first_low_bits) {
                std::uint32_t& state = cursor.states[i % lanes];
                const unsigned bits = low_bits - first_low_bits;
                lows[i - from] |= (state & ((1u << bits) - 1)) << first_low_bits;
                state >>= bits;
                refill(state, cursor);
            }
            if (symbol == escape) {
                take_item(cursor, sizeof(Word), block.out + i * sizeof(Word));
                continue;
            }
            const Word base = load<Word>(block.base + i * sizeof(Word));
            const Word origin = load<Word>(block.origins + i * sizeof(Word));
            store(
                block.out + i * sizeof(Word),
                static_cast<Word>(place_item(static_cast<int>(symbol) - symbol_zero, low_bits, lows[i - from],
                                             origin, block.tables[i] >= block.fresh_table, base, sign)));
        }
    }
    return block.count;
}

std::size_t decode(const ItemBlock& block, std::size_t itemsize, std::size_t first, ItemCursor& cursor) {
    return itemsize == 2 ? decode_items<std::uint16_t>(block, first, cursor)
                         : decode_items<std::uint32_t>(block, first, cursor);
}

}  // namespace

constinit const ExpectedKernels expected_kernels{find_contexts, decode};

}  // namespace slimtensors::residual::plain
