#include "residual/grouping.h"

#include <utility>
#include <vector>

#include "core/check.h"

namespace slimtensors::residual {
namespace {

template <class Word>
std::size_t exponent(const std::uint8_t* at, unsigned mantissa) {
    constexpr Word no_sign = Word(Word(~Word(0)) >> 1);
    return std::size_t((load<Word>(at) & no_sign) >> mantissa);
}

// Items are processed in interleaved lanes, each with its own counters, to shorten dependency chains.
constexpr std::size_t lanes = 4;

// Call `visit(lane, offset in bytes)` for every item.
template <class Word, class Visit>
void walk(std::size_t size, Visit visit) {
    const std::size_t lane_bytes = size / sizeof(Word) / lanes * sizeof(Word);
    for (std::size_t i = 0; i < lane_bytes; i += sizeof(Word))
        for (std::size_t lane = 0; lane < lanes; ++lane) visit(lane, lane * lane_bytes + i);
    for (std::size_t i = lanes * lane_bytes; i < size; i += sizeof(Word)) visit(lanes - 1, i);
}

// Call `move(offset, offset after sorting)` for each item.
template <class Word, class Move>
void sort(Bytes by, unsigned mantissa, Move move) {
    const std::size_t exponents = std::size_t(1) << (8 * sizeof(Word) - 1 - mantissa);
    std::vector<std::size_t> next(lanes * exponents);
    const auto slot = [&](std::size_t lane, std::size_t at) -> std::size_t& {
        return next[lane * exponents + exponent<Word>(by.data() + at, mantissa)];
    };
    walk<Word>(by.size(), [&](std::size_t lane, std::size_t at) { slot(lane, at) += sizeof(Word); });
    std::size_t start = 0;
    for (std::size_t e = 0; e < exponents; ++e)
        for (std::size_t lane = 0; lane < lanes; ++lane)
            start += std::exchange(next[lane * exponents + e], start);
    walk<Word>(by.size(), [&](std::size_t lane, std::size_t at) {
        std::size_t& target = slot(lane, at);
        move(at, target);
        target += sizeof(Word);
    });
}

// Check all arguments, then call `work` with the item type.
template <class Work>
void by_type(std::size_t from, std::size_t by, std::size_t to, std::size_t itemsize, unsigned mantissa,
             Work work) {
    check(from == by && from == to, "arrays differ in size");
    check_items(from, itemsize);
    const std::size_t top = 8 * itemsize - 1;
    check(mantissa <= top && top - mantissa <= 11, "mantissa is invalid for a float of this size");
    switch (itemsize) {
        case 1:
            return work(std::uint8_t{});
        case 2:
            return work(std::uint16_t{});
        case 4:
            return work(std::uint32_t{});
        default:
            return work(std::uint64_t{});
    }
}

}  // namespace

void group(Bytes items, Bytes by, std::size_t itemsize, unsigned mantissa, MutableBytes out) {
    by_type(items.size(), by.size(), out.size(), itemsize, mantissa, [&](auto word) {
        using Word = decltype(word);
        sort<Word>(by, mantissa, [&](std::size_t from, std::size_t to) {
            store(out.data() + to, load<Word>(items.data() + from));
        });
    });
}

void ungroup(Bytes grouped, Bytes by, std::size_t itemsize, unsigned mantissa, MutableBytes items) {
    by_type(grouped.size(), by.size(), items.size(), itemsize, mantissa, [&](auto word) {
        using Word = decltype(word);
        sort<Word>(by, mantissa, [&](std::size_t from, std::size_t to) {
            store(items.data() + from, load<Word>(grouped.data() + to));
        });
    });
}

}  // namespace slimtensors::residual
