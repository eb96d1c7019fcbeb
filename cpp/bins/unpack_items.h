// Assembling items one by one, compiled for each instruction set.
#pragma once
#include "bins/kernels.h"

namespace slimtensors::bins::SLIM_TARGET {
namespace {

template <class Word>
Word unmap_item(Word number, Mapping mapping) {
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

inline std::uint64_t take(RawReader& raw, unsigned bits) {  // at most 32
    const std::uint64_t word = load<std::uint64_t>(raw.bytes + raw.bit / 8) >> raw.bit % 8;
    raw.bit += bits;
    return word & ((std::uint64_t{1} << bits) - 1);
}

template <class Word, Mapping mapping, bool drops>
std::size_t unpack_items_as(const RawBins& bins, const std::uint8_t* symbols, std::size_t count,
                            RawReader& reader, std::uint8_t* items) {
    RawReader raw = reader;
    std::size_t i = 0;
    while (i < count) {
        if (raw.bits - raw.bit < bins.max_bits) break;
        const std::size_t safe = bins.max_bits != 0 ? (raw.bits - raw.bit) / bins.max_bits : count;
        const std::size_t until = safe < count - i ? i + safe : count;
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
            store(items + i * sizeof(Word), unmap_item<Word>(number, mapping));
        }
    }
    reader.bit = raw.bit;
    return i;
}

template <class Word>
std::size_t unpack_items_of(const RawBins& bins, Mapping mapping, const std::uint8_t* symbols,
                            std::size_t count, RawReader& raw, std::uint8_t* items) {
    switch (mapping) {
        case Mapping::plain:
            return bins.drop != 0
                       ? unpack_items_as<Word, Mapping::plain, true>(bins, symbols, count, raw, items)
                       : unpack_items_as<Word, Mapping::plain, false>(bins, symbols, count, raw, items);
        case Mapping::sign_last:
            return bins.drop != 0
                       ? unpack_items_as<Word, Mapping::sign_last, true>(bins, symbols, count, raw, items)
                       : unpack_items_as<Word, Mapping::sign_last, false>(bins, symbols, count, raw, items);
        case Mapping::zigzag:
            break;
    }
    return unpack_items_as<Word, Mapping::zigzag, false>(bins, symbols, count, raw, items);
}

inline std::size_t unpack_items(const RawBins& bins, Mapping mapping, std::size_t itemsize,
                                const std::uint8_t* symbols, std::size_t count, RawReader& raw,
                                std::uint8_t* items) {
    switch (itemsize) {
        case 1:
            return unpack_items_of<std::uint8_t>(bins, mapping, symbols, count, raw, items);
        case 2:
            return unpack_items_of<std::uint16_t>(bins, mapping, symbols, count, raw, items);
        case 4:
            return unpack_items_of<std::uint32_t>(bins, mapping, symbols, count, raw, items);
        default:
            return unpack_items_of<std::uint64_t>(bins, mapping, symbols, count, raw, items);
    }
}

}  // namespace
}  // namespace slimtensors::bins::SLIM_TARGET
