#include "bins/rans.h"

#include <algorithm>
#include <stdexcept>

#include "core/dispatch.h"

namespace slimtensors {
namespace {

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }

// What a state has to do for a symbol, with a multiplication where rANS has a division.
struct Step {
    std::uint64_t inverse = 0;  // 2^64 / frequency, rounded up: exact for states of 32 bits
    std::uint32_t highest = 0, others = 0, start = 0;

    Step() = default;
    Step(std::uint32_t frequency, std::uint32_t first)
        : inverse(~std::uint64_t{0} / frequency + 1),
          highest(static_cast<std::uint32_t>((std::uint64_t{frequency} << (32 - frequency_bits)) - 1)),
          others(frequency_unit - frequency),
          start(first) {
        if (frequency == 1) {  // 2^64 does not fit: divide by a little more, and add the one that is missing
            inverse = ~std::uint64_t{0};
            start += others;
        }
    }

    std::uint32_t apply(std::uint32_t state) const {
        __extension__ using Wide = unsigned __int128;
        const auto quotient = static_cast<std::uint32_t>(Wide{inverse} * state >> 64);
        return state + quotient * others + start;
    }
};

std::vector<Step> make_steps(std::span<const Frequencies> tables) {
    std::vector<Step> steps(tables.size() * most_bins);
    for (std::size_t t = 0; t < tables.size(); ++t) {
        std::uint32_t first = 0;
        for (std::size_t s = 0; s < tables[t].size(); ++s) {
            if (tables[t][s] != 0) steps[t * most_bins + s] = Step(tables[t][s], first);
            first += tables[t][s];
        }
    }
    return steps;
}

}  // namespace

const BinsKernels& bins_kernels() {
#if defined(SLIMTENSORS_X86)
    if (cpu().avx2) return bins_kernels_avx2();
#endif
    return bins_kernels_plain;
}

void append_slots(std::span<const std::uint16_t> frequencies, Slots& slots) {
    slots.resize(slots.size() + frequency_unit);
    std::uint32_t* at = slots.data() + slots.size() - frequency_unit;
    for (std::uint32_t symbol = 0; symbol < frequencies.size(); ++symbol)
        for (std::uint32_t k = 0; k < frequencies[symbol]; ++k)
            *at++ = symbol | (frequencies[symbol] - 1u) << 8 | k << 20;
}

BinsEncoder::BinsEncoder(std::size_t symbols, std::size_t vectors)
    : words_((symbols + 1) * sizeof(std::uint16_t)), at_(words_.size()), lanes_(vectors * bins_lanes) {
    states_.fill(lowest_bins_state);
}

void BinsEncoder::run(std::span<const Frequencies> tables, const std::uint8_t* contexts, Bytes symbols) {
    const std::vector<Step> steps = make_steps(tables);
    const std::size_t lane = lanes_ - 1;  // a mask: there are 8, 16 or 32
    auto states = states_;                // a copy, which storing words cannot change
    std::uint8_t* at = words_.data() + at_;
    for (std::size_t i = symbols.size(); i-- > 0;) {
        const Step& step = steps[(contexts ? contexts[i] : 0u) * most_bins + symbols[i]];
        if (step.inverse == 0) refuse("a symbol has no frequency: items were changed since the fit");
        std::uint32_t state = states[i & lane];
        const bool full = state > step.highest;
        store(at - 2, static_cast<std::uint16_t>(state));
        at -= full ? 2 : 0;
        state = full ? state >> 16 : state;
        states[i & lane] = step.apply(state);
    }
    states_ = states;
    at_ = static_cast<std::size_t>(at - words_.data());
}

BinsDecoder::BinsDecoder(Bytes states, Bytes words, std::size_t vectors)
    : vectors_(vectors),
      margin_(vectors * bins_vector_words),
      next_(words.data()),
      end_(words.data() + words.size()) {
    std::memcpy(states_.data(), states.data(), vectors * bins_lanes * sizeof(std::uint32_t));
}

void BinsDecoder::run(const std::uint32_t* slots, const std::uint8_t* contexts, std::size_t count,
                      std::uint8_t* symbols) {
    const std::size_t lanes = vectors_ * bins_lanes;
    const auto decode = [&](const BinsKernels& kernels, std::size_t from, std::size_t until) {
        return from + kernels.symbols(slots, contexts + from, until - from, vectors_, states_.data(), next_,
                                      end_, symbols + from);
    };
    const auto decode_all = [&](std::size_t from) {
        const std::size_t whole = count / lanes * lanes;
        if (from < whole) from = decode(bins_kernels(), from, whole);
        return from < whole ? from : decode(bins_kernels_plain, from, count);
    };
    std::size_t done = decode_all(0);
    if (done == count) return;
    if (!in_tail_) {
        // The last few words come from a copy with room behind it; reading into that room stops the kernel.
        const auto left = static_cast<std::size_t>(end_ - next_);
        std::memcpy(tail_.data(), next_, left);
        next_ = tail_.data();
        end_ = next_ + left + margin_;
        in_tail_ = true;
        done = decode_all(done);
    }
    if (done != count) refuse("a chunk has too few words");
}

void BinsDecoder::finish() const {
    const std::size_t left = static_cast<std::size_t>(end_ - next_) - (in_tail_ ? margin_ : 0);
    const bool spent = std::all_of(states_.begin(), states_.begin() + vectors_ * bins_lanes,
                                   [](std::uint32_t state) { return state == lowest_bins_state; });
    if (left != 0 || !spent) refuse("a chunk does not end where it should");
}

}  // namespace slimtensors
