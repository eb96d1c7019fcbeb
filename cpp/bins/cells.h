#pragma once
#include "bins/bins.h"
#include "bins/model.h"

namespace slimtensors::bins {

// Map an item to the number that is looked up among the bins.
template <class Word>
inline Word map_item(Word item, Mapping mapping) {
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

// Cells are the finest bins that a fit considers. The bits of floats are logarithmic, so their cells have one
// size; those of integers grow with the number, with eight bits of precision.
struct Cells {
    bool growing;
    unsigned shift;  // log2 of the size of equal cells
    std::size_t count;

    Cells(const ItemType& type, Mapping mapping, unsigned drop) : growing(type.exponent_bits == 0) {
        const auto width = static_cast<unsigned>(8 * type.itemsize);
        const bool sign_first = mapping == Mapping::plain, sign_last = mapping == Mapping::sign_last;
        const unsigned precise = type.exponent_bits + 6 < 14 ? type.exponent_bits + 6 : 14;
        const unsigned free = drop != 0 ? width - drop - sign_last : width;
        const unsigned depth = precise + sign_first < free ? precise + sign_first : free;
        shift = width - depth;
        count = growing ? index(~std::uint64_t{0} >> (64 - width)) + 1 : std::size_t{1} << depth;
    }

    std::size_t index(std::uint64_t number) const {
        if (!growing) return number >> shift;
        if (number < 256) return number;
        const unsigned shift_out = static_cast<unsigned>(std::bit_width(number)) - 8;
        return (std::size_t{shift_out} << 7) + (number >> shift_out);
    }
    // log2 of the size of the cell that starts with this number.
    unsigned bits(std::uint64_t lower) const {
        if (!growing) return shift;
        return lower < 256 ? 0 : static_cast<unsigned>(std::bit_width(lower)) - 8;
    }
};

}  // namespace slimtensors::bins
