#include "bins/rans.h"

#include <algorithm>

#include "core/check.h"

namespace slimtensors::bins {
namespace {

// The state update for one symbol, with the division of rANS replaced by a multiplication.
struct Step {
    std::uint64_t inverse = 0;  // ceil(2^64 / frequency): exact for 32-bit states
    std::uint32_t max_state = 0, others = 0, start = 0;

    Step() = default;
    Step(std::uint32_t frequency, std::uint32_t first)
        : inverse(~std::uint64_t{0} / frequency + 1),
          max_state(static_cast<std::uint32_t>((std::uint64_t{frequency} << (32 - frequency_bits)) - 1)),
          others(frequency_unit - frequency),
          start(first) {
        if (frequency == 1) {  // 2^64 does not fit; use 2^64 - 1 and add the missing one
            inverse = ~std::uint64_t{0};
            start += others;
        }
    }

    std::uint32_t apply(std::uint32_t state) const {
        const auto quotient = static_cast<std::uint32_t>(Uint128{inverse} * state >> 64);
        return state + quotient * others + start;
    }
};

std::vector<Step> make_steps(std::span<const Frequencies> tables) {
    std::vector<Step> steps(tables.size() * max_bins);
    for (std::size_t t = 0; t < tables.size(); ++t) {
        std::uint32_t first = 0;
        for (std::size_t s = 0; s < tables[t].size(); ++s) {
            if (tables[t][s] != 0) steps[t * max_bins + s] = Step(tables[t][s], first);
            first += tables[t][s];
        }
    }
    return steps;
}

}  // namespace

const Kernels& active_kernels() {
    static constexpr KernelTable<Kernels> table{.plain = &plain::kernels, .avx2 = SLIM_X86(&avx2::kernels)};
    return table.active();
}

void append_slots(std::span<const std::uint16_t> frequencies, Slots& slots) {
    slots.resize(slots.size() + frequency_unit);
    std::uint32_t* at = slots.data() + slots.size() - frequency_unit;
    for (std::uint32_t symbol = 0; symbol < frequencies.size(); ++symbol)
        for (std::uint32_t k = 0; k < frequencies[symbol]; ++k)
            *at++ = symbol | (frequencies[symbol] - 1u) << 8 | k << 20;
}

RansEncoder::RansEncoder(std::size_t symbols, std::size_t vectors)
    : words_((symbols + 1) * sizeof(std::uint16_t)), at_(words_.size()), lanes_(vectors * vector_lanes) {
    states_.fill(min_state);
}

void RansEncoder::run(std::span<const Frequencies> tables, const std::uint8_t* contexts, Bytes symbols) {
    const std::vector<Step> steps = make_steps(tables);
    const std::size_t lane = lanes_ - 1;  // a bit mask: there are 8, 32 or 64 lanes
    auto states = states_;                // a local copy: stores of words cannot alias it
    std::uint8_t* at = words_.data() + at_;
    for (std::size_t i = symbols.size(); i-- > 0;) {
        const Step& step = steps[(contexts ? contexts[i] : 0u) * max_bins + symbols[i]];
        check(step.inverse != 0, "symbol has no frequency: items were modified since the fit");
        std::uint32_t state = states[i & lane];
        const bool full = state > step.max_state;
        store(at - 2, static_cast<std::uint16_t>(state));
        at -= full ? 2 : 0;
        state = full ? state >> 16 : state;
        states[i & lane] = step.apply(state);
    }
    states_ = states;
    at_ = static_cast<std::size_t>(at - words_.data());
}

RansDecoder::RansDecoder(Bytes states, Bytes words, std::size_t vectors)
    : vectors_(vectors),
      margin_(vectors * vector_words),
      next_(words.data()),
      end_(words.data() + words.size()) {
    std::memcpy(states_.data(), states.data(), vectors * vector_lanes * sizeof(std::uint32_t));
}

void RansDecoder::run(const std::uint32_t* slots, const std::uint8_t* contexts, std::size_t count,
                      std::uint8_t* symbols) {
    const std::size_t lanes = vectors_ * vector_lanes;
    const auto decode = [&](const Kernels& kernels, std::size_t from, std::size_t until) {
        return from + kernels.decode_symbols(slots, contexts + from, until - from, vectors_, states_.data(),
                                             next_, end_, symbols + from);
    };
    const auto decode_all = [&](std::size_t from) {
        const std::size_t full = count / lanes * lanes;
        if (from < full) from = decode(active_kernels(), from, full);
        return from < full ? from : decode(plain::kernels, from, count);
    };
    std::size_t done = decode_all(0);
    if (done == count) return;
    if (!in_tail_) {
        // Read the last few words from a padded copy; the kernel stops inside the padding.
        const auto left = static_cast<std::size_t>(end_ - next_);
        std::memcpy(tail_.data(), next_, left);
        next_ = tail_.data();
        end_ = next_ + left + margin_;
        in_tail_ = true;
        done = decode_all(done);
    }
    check(done == count, "chunk has too few words");
}

void RansDecoder::finish() const {
    const std::size_t left = static_cast<std::size_t>(end_ - next_) - (in_tail_ ? margin_ : 0);
    const bool states_reset = std::all_of(states_.begin(), states_.begin() + vectors_ * vector_lanes,
                                          [](std::uint32_t state) { return state == min_state; });
    check(left == 0 && states_reset, "chunk has trailing or missing words");
}

}  // namespace slimtensors::bins
