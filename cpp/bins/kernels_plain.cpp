// The inner loops of the decoder in portable C++.
#include "bins/unpack_items.h"

namespace slimtensors::bins::plain {
namespace {

void find_contexts(const std::uint8_t* table_of, const std::uint8_t* columns, std::size_t count,
                   std::uint8_t* contexts) {
    for (std::size_t i = 0; i < count; ++i) contexts[i] = table_of[columns[i]];
}

std::size_t decode_symbols(const std::uint32_t* slots, const std::uint8_t* contexts, std::size_t count,
                           std::size_t vectors, std::uint32_t* states, const std::uint8_t*& next,
                           const std::uint8_t* end, std::uint8_t* symbols) {
    const std::size_t lanes = vectors * vector_lanes;
    const auto margin = static_cast<std::ptrdiff_t>(vectors * vector_words);
    const std::uint8_t* words = next;
    std::size_t i = 0;
    while (i < count && end - words >= margin)
        for (std::size_t lane = 0; lane < lanes && i < count; ++lane, ++i) {
            const std::uint32_t state = states[lane], high = state / frequency_unit;
            const std::uint32_t slot = slots[contexts[i] * frequency_unit + state % frequency_unit];
            const std::uint32_t left = (slot >> 8 & (frequency_unit - 1)) * high + high + (slot >> 20);
            const bool low = left < min_state;
            states[lane] = low ? left << 16 | load<std::uint16_t>(words) : left;
            words += low ? 2 : 0;
            symbols[i] = static_cast<std::uint8_t>(slot);
        }
    next = words;
    return i;
}

}  // namespace

constinit const Kernels kernels{find_contexts, decode_symbols, unpack_items};

}  // namespace slimtensors::bins::plain
