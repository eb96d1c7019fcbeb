// Floats as integers: adjacent floats differ by one, across exponents and across zero.
#pragma once
#include "core/bytes.h"

namespace slimtensors {
inline namespace SLIM_TARGET {

template <class Word>
inline constexpr Word sign_bit = Word(Word(1) << (8 * sizeof(Word) - 1));

// The steps from `base` to `item`, positive if they lead away from zero as seen from the base.
template <class Word>
inline std::int64_t steps_outward(Word base, Word item) {
    const auto from = static_cast<std::int64_t>(base & Word(~sign_bit<Word>));
    const auto to = static_cast<std::int64_t>(item & Word(~sign_bit<Word>));
    return ((base ^ item) & sign_bit<Word>) != 0 ? -to - 1 - from : to - from;
}

// Inverse of steps_outward() for numbers of steps that it returns; others wrap around.
template <class Word>
inline Word walk_outward(Word base, std::int64_t steps) {
    const std::int64_t to = static_cast<std::int64_t>(base & Word(~sign_bit<Word>)) + steps;
    const auto magnitude = static_cast<std::uint64_t>(to < 0 ? ~to : to);
    const Word flipped = to < 0 ? sign_bit<Word> : Word(0);
    return Word(Word(magnitude) & Word(~sign_bit<Word>)) | Word((base & sign_bit<Word>)^flipped);
}

}  // namespace SLIM_TARGET
}  // namespace slimtensors
