#include "residual/difference.h"

#include <stdexcept>
#include <type_traits>

namespace slimtensors {
namespace {

template <class Word>
constexpr Word top_bit = Word(Word(1) << (8 * sizeof(Word) - 1));

// All ones if the top bit is set, else zero.
template <class Word>
Word sign_mask(Word bits) {
    using Signed = std::make_signed_t<Word>;
    return Word(Signed(bits) >> (8 * sizeof(Word) - 1));
}

// Negative floats have their order reversed, so all of their bits turn; of positive ones only the sign does.
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

// Turn the sign of a number where a mask says so; doing it twice changes nothing.
template <class Word>
Word turned(Word number, Word mask) {
    return Word((number ^ mask) - mask);
}

template <class Word, Order order>
void subtract(Bytes items, Bytes base, MutableBytes out) {
    for (std::size_t i = 0; i < items.size(); i += sizeof(Word)) {
        Word a = load<Word>(base.data() + i), b = load<Word>(items.data() + i);
        const Word turn = order == Order::outward ? sign_mask(a) : Word(0);
        if constexpr (order != Order::integers) a = to_ordered(a), b = to_ordered(b);
        store(out.data() + i, zigzag(turned(Word(b - a), turn)));
    }
}

template <class Word, Order order>
void add(Bytes difference, Bytes base, MutableBytes items) {
    for (std::size_t i = 0; i < items.size(); i += sizeof(Word)) {
        Word a = load<Word>(base.data() + i);
        const Word turn = order == Order::outward ? sign_mask(a) : Word(0);
        if constexpr (order != Order::integers) a = to_ordered(a);
        const Word b = Word(a + turned(unzigzag(load<Word>(difference.data() + i)), turn));
        store(items.data() + i, order == Order::integers ? b : from_ordered(b));
    }
}

void check(std::size_t first, std::size_t second, std::size_t third, std::size_t itemsize) {
    if (first != second || first != third) throw std::invalid_argument("arrays differ in size");
    if (itemsize == 0 || first % itemsize != 0) throw std::invalid_argument("not a whole number of items");
}

template <Order order>
using Constant = std::integral_constant<Order, order>;

// Call `work` with the type of an item and the order, both known to the compiler.
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
        case 8:
            return with(std::uint64_t{});
        default:
            throw std::invalid_argument("itemsize must be 1, 2, 4 or 8");
    }
}

}  // namespace

void difference(Bytes items, Bytes base, std::size_t itemsize, Order order, MutableBytes out) {
    check(items.size(), base.size(), out.size(), itemsize);
    by_type(itemsize, order, [&](auto word, auto known) {
        subtract<decltype(word), decltype(known)::value>(items, base, out);
    });
}

void add_difference(Bytes difference, Bytes base, std::size_t itemsize, Order order, MutableBytes items) {
    check(difference.size(), base.size(), items.size(), itemsize);
    by_type(itemsize, order, [&](auto word, auto known) {
        add<decltype(word), decltype(known)::value>(difference, base, items);
    });
}

}  // namespace slimtensors
