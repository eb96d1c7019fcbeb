#pragma once
#include "bins/kernels.h"

namespace slimtensors::bins {

// Encodes symbols backwards: rANS decodes in the opposite order.
class RansEncoder {
  public:
    RansEncoder(std::size_t symbols, std::size_t vectors);

    // Encode a run of symbols with the tables selected by `contexts`, or with the first one if that is null.
    void run(std::span<const Frequencies> tables, const std::uint8_t* contexts, Bytes symbols);

    Bytes words() const { return {words_.data() + at_, words_.size() - at_}; }
    Bytes states() const {
        return {reinterpret_cast<const std::uint8_t*>(states_.data()), lanes_ * sizeof(std::uint32_t)};
    }

  private:
    std::vector<std::uint8_t> words_;
    std::size_t at_, lanes_;
    std::array<std::uint32_t, vector_lanes * max_vectors> states_;
};

// Decodes runs from states and words, with bounds checks.
class RansDecoder {
  public:
    RansDecoder(Bytes states, Bytes words, std::size_t vectors);

    // Decode a run, possibly in several calls; all but the last must have a multiple of 8 * vectors symbols.
    void run(const std::uint32_t* slots, const std::uint8_t* contexts, std::size_t count,
             std::uint8_t* symbols);
    // Throw std::invalid_argument unless all words were consumed.
    void finish() const;

  private:
    std::size_t vectors_, margin_;
    const std::uint8_t *next_, *end_;
    bool in_tail_ = false;
    std::array<std::uint32_t, vector_lanes * max_vectors> states_;
    std::array<std::uint8_t, 2 * max_vectors * vector_words> tail_{};
};

}  // namespace slimtensors::bins
