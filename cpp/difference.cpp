#include "difference.h"

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

template <class Word, bool floats>
void subtract(Bytes items, Bytes base, MutableBytes out) {
    for (std::size_t i = 0; i < items.size(); i += sizeof(Word)) {
        Word a = load<Word>(base.data() + i), b = load<Word>(items.data() + i);
        if constexpr (floats) a = to_ordered(a), b = to_ordered(b);
        store(out.data() + i, zigzag(Word(b - a)));
    }
}

template <class Word, bool floats>
void add(Bytes difference, Bytes base, MutableBytes items) {
    for (std::size_t i = 0; i < items.size(); i += sizeof(Word)) {
        Word a = load<Word>(base.data() + i);
        if constexpr (floats) a = to_ordered(a);
        const Word b = Word(a + unzigzag(load<Word>(difference.data() + i)));
        store(items.data() + i, floats ? from_ordered(b) : b);
    }
}

void check(std::size_t first, std::size_t second, std::size_t third, std::size_t itemsize) {
    if (first != second || first != third) throw std::invalid_argument("arrays differ in size");
    if (itemsize == 0 || first % itemsize != 0) throw std::invalid_argument("not a whole number of items");
}

// Call `work` with the type of an item and whether it is a float, both known to the compiler.
template <class Work>
void by_type(std::size_t itemsize, bool floats, Work work) {
    const auto with = [&](auto word) {
        floats ? work(word, std::true_type{}) : work(word, std::false_type{});
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

void difference(Bytes items, Bytes base, std::size_t itemsize, bool floats, MutableBytes out) {
    check(items.size(), base.size(), out.size(), itemsize);
    by_type(itemsize, floats, [&](auto word, auto is_float) {
        subtract<decltype(word), decltype(is_float)::value>(items, base, out);
    });
}

void add_difference(Bytes difference, Bytes base, std::size_t itemsize, bool floats, MutableBytes items) {
    check(difference.size(), base.size(), items.size(), itemsize);
    by_type(itemsize, floats, [&](auto word, auto is_float) {
        add<decltype(word), decltype(is_float)::value>(difference, base, items);
    });
}

}  // namespace slimtensors
