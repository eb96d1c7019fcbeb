// Loops that are compiled once for each kind of processor. `Unit` is a type in an unnamed namespace, which
// keeps the code there: the linker cannot mix it with code for other processors.
#pragma once
#include "bins/kernels.h"

namespace slimtensors {

template <class Unit>
struct BinsLoops {
    template <class Word>
    static Word unmapped(Word number, Mapping mapping) {
        constexpr unsigned width = 8 * sizeof(Word);
        switch (mapping) {
            case Mapping::plain:
                return number;
            case Mapping::sign_last:
                return static_cast<Word>(number >> 1 | number << (width - 1));
            case Mapping::zigzag:
                return static_cast<Word>(number >> 1 ^ -(number & 1));
        }
        return number;
    }

    static std::uint64_t take(RawReader& raw, unsigned bits) {  // up to 32
        const std::uint64_t word = load<std::uint64_t>(raw.bytes + raw.bit / 8) >> raw.bit % 8;
        raw.bit += bits;
        return word & ((std::uint64_t{1} << bits) - 1);
    }

    template <class Word, Mapping mapping, bool drops>
    static std::size_t items_as(const RawBins& bins, const std::uint8_t* symbols, std::size_t count,
                                RawReader& reader, std::uint8_t* items) {
        RawReader raw = reader;
        std::size_t i = 0;
        while (i < count) {
            if (raw.bits - raw.bit < bins.most) break;
            const std::size_t sure = bins.most != 0 ? (raw.bits - raw.bit) / bins.most : count;
            const std::size_t until = sure < count - i ? i + sure : count;
            for (; i < until; ++i) {
                const unsigned symbol = symbols[i], bits = bins.bits[symbol];
                std::uint64_t value;
                if constexpr (sizeof(Word) == 8) {
                    value = take(raw, bits < 32 ? bits : 32);
                    if (bits > 32) value |= take(raw, bits - 32) << 32;
                } else {
                    value = take(raw, bits);
                }
                if constexpr (drops && mapping == Mapping::sign_last)
                    value = (value >> 1) << (bins.drop + 1) | (value & 1);
                else if constexpr (drops)
                    value <<= bins.drop;
                const auto number = static_cast<Word>(bins.lower[symbol] + value);
                store(items + i * sizeof(Word), unmapped<Word>(number, mapping));
            }
        }
        reader.bit = raw.bit;
        return i;
    }

    template <class Word>
    static std::size_t items_of(const RawBins& bins, Mapping mapping, const std::uint8_t* symbols,
                                std::size_t count, RawReader& raw, std::uint8_t* items) {
        using enum Mapping;
        switch (mapping) {
            case plain:
                return bins.drop != 0 ? items_as<Word, plain, true>(bins, symbols, count, raw, items)
                                      : items_as<Word, plain, false>(bins, symbols, count, raw, items);
            case sign_last:
                return bins.drop != 0 ? items_as<Word, sign_last, true>(bins, symbols, count, raw, items)
                                      : items_as<Word, sign_last, false>(bins, symbols, count, raw, items);
            case zigzag:
                break;
        }
        return items_as<Word, zigzag, false>(bins, symbols, count, raw, items);
    }

    static std::size_t items(const RawBins& bins, Mapping mapping, std::size_t itemsize,
                             const std::uint8_t* symbols, std::size_t count, RawReader& raw,
                             std::uint8_t* items) {
        switch (itemsize) {
            case 1:
                return items_of<std::uint8_t>(bins, mapping, symbols, count, raw, items);
            case 2:
                return items_of<std::uint16_t>(bins, mapping, symbols, count, raw, items);
            case 4:
                return items_of<std::uint32_t>(bins, mapping, symbols, count, raw, items);
            default:
                return items_of<std::uint64_t>(bins, mapping, symbols, count, raw, items);
        }
    }
};

}  // namespace slimtensors
