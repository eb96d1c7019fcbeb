#include "residual/grouping.h"

#include <stdexcept>
#include <utility>
#include <vector>

namespace slimtensors {
namespace {

template <class Word>
std::size_t exponent(const std::uint8_t* at, unsigned mantissa) {
    constexpr Word no_sign = Word(Word(~Word(0)) >> 1);
    return std::size_t((load<Word>(at) & no_sign) >> mantissa);
}

// The items are walked through in a few places at once: each waits for its own counters only.
constexpr std::size_t lanes = 4;

// Call `visit` with a lane and the place of an item, in bytes, for every item.
template <class Word, class Visit>
void walk(std::size_t size, Visit visit) {
    const std::size_t each = size / sizeof(Word) / lanes * sizeof(Word);
    for (std::size_t i = 0; i < each; i += sizeof(Word))
        for (std::size_t lane = 0; lane < lanes; ++lane) visit(lane, lane * each + i);
    for (std::size_t i = lanes * each; i < size; i += sizeof(Word)) visit(lanes - 1, i);
}

// Call `move` with the place of each item, and with the one it has once all are sorted.
template <class Word, class Move>
void sort(Bytes by, unsigned mantissa, Move move) {
    const std::size_t kinds = std::size_t(1) << (8 * sizeof(Word) - 1 - mantissa);
    std::vector<std::size_t> next(lanes * kinds);
    const auto slot = [&](std::size_t lane, std::size_t at) -> std::size_t& {
        return next[lane * kinds + exponent<Word>(by.data() + at, mantissa)];
    };
    walk<Word>(by.size(), [&](std::size_t lane, std::size_t at) { slot(lane, at) += sizeof(Word); });
    std::size_t start = 0;
    for (std::size_t kind = 0; kind < kinds; ++kind)
        for (std::size_t lane = 0; lane < lanes; ++lane)
            start += std::exchange(next[lane * kinds + kind], start);
    walk<Word>(by.size(), [&](std::size_t lane, std::size_t at) {
        std::size_t& there = slot(lane, at);
        move(at, there);
        there += sizeof(Word);
    });
}

// Call `work` with the type of an item, after checking everything.
template <class Work>
void by_type(std::size_t from, std::size_t by, std::size_t to, std::size_t itemsize, unsigned mantissa,
             Work work) {
    if (from != by || from != to) throw std::invalid_argument("arrays differ in size");
    if (itemsize == 0 || from % itemsize != 0) throw std::invalid_argument("not a whole number of items");
    const std::size_t top = 8 * itemsize - 1;
    if (itemsize > 8 || mantissa > top || top - mantissa > 11)
        throw std::invalid_argument("no float has such an exponent");
    switch (itemsize) {
        case 1:
            return work(std::uint8_t{});
        case 2:
            return work(std::uint16_t{});
        case 4:
            return work(std::uint32_t{});
        case 8:
            return work(std::uint64_t{});
        default:
            throw std::invalid_argument("itemsize must be 1, 2, 4 or 8");
    }
}

}  // namespace

void group(Bytes items, Bytes by, std::size_t itemsize, unsigned mantissa, MutableBytes out) {
    by_type(items.size(), by.size(), out.size(), itemsize, mantissa, [&](auto word) {
        using Word = decltype(word);
        sort<Word>(by, mantissa, [&](std::size_t here, std::size_t there) {
            store(out.data() + there, load<Word>(items.data() + here));
        });
    });
}

void ungroup(Bytes grouped, Bytes by, std::size_t itemsize, unsigned mantissa, MutableBytes items) {
    by_type(grouped.size(), by.size(), items.size(), itemsize, mantissa, [&](auto word) {
        using Word = decltype(word);
        sort<Word>(by, mantissa, [&](std::size_t here, std::size_t there) {
            store(items.data() + here, load<Word>(grouped.data() + there));
        });
    });
}

}  // namespace slimtensors
