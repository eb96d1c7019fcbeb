#include "masks/gaps.h"

#include "core/check.h"
#include "core/counting.h"

namespace slimtensors::masks {
namespace {

constexpr std::size_t step = 4;

// Write the tokens of the ones in `word`, whose lowest bit is bit `at` of the mask; `next` is the first bit
// not yet covered by a token. Writing `step` tokens at a time reduces branch mispredictions; surplus tokens
// are overwritten by the next call.
inline std::uint8_t* put_ones(std::uint64_t word, std::size_t at, std::size_t& next, std::uint8_t* to) {
    std::size_t here = at + static_cast<std::size_t>(std::countr_zero(word));
    std::size_t zeros = here - next;
    next = at + static_cast<std::size_t>(std::bit_width(word));
    for (; zeros >= gap_escape; zeros -= gap_escape) *to++ = gap_escape;
    *to++ = static_cast<std::uint8_t>(zeros);
    std::uint8_t* const end = to + std::popcount(word) - 1;
    while (to < end) {
        for (std::size_t k = 0; k < step; ++k) {
            word &= word - 1;
            const std::size_t one = at + static_cast<std::size_t>(std::countr_zero(word));
            to[k] = static_cast<std::uint8_t>(one - here - 1);
            here = one;
        }
        to += step;
    }
    return end;
}

// Positions increase, so checking the last one suffices. Checking after every block avoids overflow.
void check_extent(Bytes tokens, std::size_t bits) {
    if (tokens.empty()) return;
    check(tokens.back() != gap_escape, "gap tokens end with an escape");
    constexpr std::size_t block = 4096;
    for (std::size_t i = 0; i < tokens.size();) {
        std::uint32_t sum = 0;
        const std::size_t stop = tokens.size() - i < block ? tokens.size() : i + block;
        for (; i < stop; ++i) sum += tokens[i] + std::uint32_t{tokens[i] != gap_escape};
        check(sum <= bits, "gap tokens run past the end of the mask");
        bits -= sum;
    }
}

}  // namespace

std::size_t gaps_bound(Bytes mask) { return popcount(mask) + mask.size() / (gap_escape / 8) + step; }

std::size_t gaps_encode(Bytes mask, MutableBytes tokens) {
    check(tokens.size() >= gaps_bound(mask), "tokens must have at least gaps_bound() bytes");
    std::uint8_t* to = tokens.data();
    std::size_t next = 0, i = 0;
    for (; i + 8 <= mask.size(); i += 8) {
        const std::uint64_t word = load<std::uint64_t>(mask.data() + i);
        if (word != 0) to = put_ones(word, 8 * i, next, to);
    }
    for (; i < mask.size(); ++i)
        if (mask[i] != 0) to = put_ones(mask[i], 8 * i, next, to);
    return static_cast<std::size_t>(to - tokens.data());
}

void gaps_decode(Bytes tokens, MutableBytes mask) {
    check_extent(tokens, 8 * mask.size());
    if (!mask.empty()) std::memset(mask.data(), 0, mask.size());
    std::uint8_t* const to = mask.data();
    std::size_t position = 0;
    for (const std::uint8_t token : tokens) {
        position += token;
        const unsigned one = token != gap_escape;
        to[position / 8] |= static_cast<std::uint8_t>(one << position % 8);
        position += one;
    }
}

}  // namespace slimtensors::masks
