#pragma once
#include "bins/bins.h"
#include "bins/model.h"

namespace slimtensors {

// The number that an item is looked up as.
template <class Word>
inline Word mapped(Word item, Mapping mapping) {
    constexpr unsigned width = 8 * sizeof(Word);
    switch (mapping) {
        case Mapping::plain:
            return item;
        case Mapping::sign_last:
            return static_cast<Word>(item << 1 | item >> (width - 1));
        case Mapping::zigzag:
            return static_cast<Word>(item << 1 ^ (0 - (item >> (width - 1))));
    }
    return item;
}

// The finest bins that a fit considers, its cells. Floats are logarithms already, so their cells are all of
// one size; those of integers grow with them, with eight bits of precision.
struct Cells {
    bool growing;
    unsigned shift;  // of cells of one size
    std::size_t count;

    Cells(const BinsKind& kind, Mapping mapping, unsigned drop) : growing(kind.exponent_bits == 0) {
        const auto width = static_cast<unsigned>(8 * kind.size);
        const bool sign_first = mapping == Mapping::plain, sign_last = mapping == Mapping::sign_last;
        const unsigned precise = kind.exponent_bits + 6 < 14 ? kind.exponent_bits + 6 : 14;
        const unsigned free = drop != 0 ? width - drop - sign_last : width;
        const unsigned depth = precise + sign_first < free ? precise + sign_first : free;
        shift = width - depth;
        count = growing ? of(~std::uint64_t{0} >> (64 - width)) + 1 : std::size_t{1} << depth;
    }

    std::size_t of(std::uint64_t number) const {
        if (!growing) return number >> shift;
        if (number < 256) return number;
        const unsigned more = static_cast<unsigned>(std::bit_width(number)) - 8;
        return (std::size_t{more} << 7) + (number >> more);
    }
    // Bits of the cell that begins with this number.
    unsigned bits(std::uint64_t lower) const {
        if (!growing) return shift;
        return lower < 256 ? 0 : static_cast<unsigned>(std::bit_width(lower)) - 8;
    }
};

}  // namespace slimtensors
