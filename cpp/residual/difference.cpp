#include "residual/difference.h"

#include <type_traits>

#include "core/check.h"

namespace slimtensors::residual {
namespace {

template <class Word>
constexpr Word top_bit = Word(Word(1) << (8 * sizeof(Word) - 1));

// All ones if the top bit is set, else zero.
template <class Word>
Word sign_mask(Word bits) {
    using Signed = std::make_signed_t<Word>;
    return Word(Signed(bits) >> (8 * sizeof(Word) - 1));
}

// Negative floats are in reverse order, so all of their bits are inverted; of positive ones only the sign.
template <class Word>
Word to_ordered(Word bits) {
    return bits ^ (sign_mask(bits) | top_bit<Word>);
}

template <class Word>
Word from_ordered(Word number) {
    return number ^ (Word(~sign_mask(number)) | top_bit<Word>);
}

template <class Word>
Word zigzag(Word number) {
    return Word(number << 1) ^ sign_mask(number);
}

template <class Word>
Word unzigzag(Word number) {
    return Word(number >> 1) ^ Word(-Word(number & 1));
}

// Negate the number where the mask is all ones; an involution.
template <class Word>
Word negate_if(Word number, Word mask) {
    return Word((number ^ mask) - mask);
}

template <class Word, Order order>
void subtract(Bytes items, Bytes base, MutableBytes out) {
    for (std::size_t i = 0; i < items.size(); i += sizeof(Word)) {
        Word a = load<Word>(base.data() + i), b = load<Word>(items.data() + i);
        const Word mask = order == Order::outward ? sign_mask(a) : Word(0);
        if constexpr (order != Order::integers) a = to_ordered(a), b = to_ordered(b);
        store(out.data() + i, zigzag(negate_if(Word(b - a), mask)));
    }
}

template <class Word, Order order>
void add(Bytes difference, Bytes base, MutableBytes items) {
    for (std::size_t i = 0; i < items.size(); i += sizeof(Word)) {
        Word a = load<Word>(base.data() + i);
        const Word mask = order == Order::outward ? sign_mask(a) : Word(0);
        if constexpr (order != Order::integers) a = to_ordered(a);
        const Word b = Word(a + negate_if(unzigzag(load<Word>(difference.data() + i)), mask));
        store(items.data() + i, order == Order::integers ? b : from_ordered(b));
    }
}

void check_sizes(std::size_t first, std::size_t second, std::size_t third, std::size_t itemsize) {
    check(first == second && first == third, "arrays differ in size");
    check_items(first, itemsize);
}

template <Order order>
using Constant = std::integral_constant<Order, order>;

// Call `work` with the item type and the order as compile-time constants.
template <class Work>
void by_type(std::size_t itemsize, Order order, Work work) {
    const auto with = [&](auto word) {
        switch (order) {
            case Order::integers:
                return work(word, Constant<Order::integers>{});
            case Order::floats:
                return work(word, Constant<Order::floats>{});
            case Order::outward:
                return work(word, Constant<Order::outward>{});
        }
    };
    switch (itemsize) {
        case 1:
            return with(std::uint8_t{});
        case 2:
            return with(std::uint16_t{});
        case 4:
            return with(std::uint32_t{});
        default:
            return with(std::uint64_t{});
    }
}

}  // namespace

void difference(Bytes items, Bytes base, std::size_t itemsize, Order order, MutableBytes out) {
    check_sizes(items.size(), base.size(), out.size(), itemsize);
    by_type(itemsize, order, [&](auto word, auto constant) {
        subtract<decltype(word), decltype(constant)::value>(items, base, out);
    });
}

void add_difference(Bytes difference, Bytes base, std::size_t itemsize, Order order, MutableBytes items) {
    check_sizes(difference.size(), base.size(), items.size(), itemsize);
    by_type(itemsize, order, [&](auto word, auto constant) {
        add<decltype(word), decltype(constant)::value>(difference, base, items);
    });
}

}  // namespace slimtensors::residual
