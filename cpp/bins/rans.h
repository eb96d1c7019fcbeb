#pragma once
#include "bins/kernels.h"

namespace slimtensors {

// Codes symbols backwards, the last one first, because the decoder takes the states apart in the opposite
// order.
class BinsEncoder {
  public:
    BinsEncoder(std::size_t symbols, std::size_t vectors);

    // Symbols of a run, each with the table that `contexts` names; of one table if that is null.
    void run(std::span<const Frequencies> tables, const std::uint8_t* contexts, Bytes symbols);

    Bytes words() const { return {words_.data() + at_, words_.size() - at_}; }
    Bytes states() const {
        return {reinterpret_cast<const std::uint8_t*>(states_.data()), lanes_ * sizeof(std::uint32_t)};
    }

  private:
    std::vector<std::uint8_t> words_;
    std::size_t at_, lanes_;
    std::array<std::uint32_t, bins_lanes * most_bins_vectors> states_;
};

// Decodes runs from states and words, which it checks never to leave.
class BinsDecoder {
  public:
    BinsDecoder(Bytes states, Bytes words, std::size_t vectors);

    // A run; all but the last of consecutive calls for one run have a multiple of 8 * vectors symbols.
    void run(const std::uint32_t* slots, const std::uint8_t* contexts, std::size_t count,
             std::uint8_t* symbols);
    // Refuse unless everything was used up.
    void finish() const;

  private:
    std::size_t vectors_, margin_;
    const std::uint8_t *next_, *end_;
    bool in_tail_ = false;
    std::array<std::uint32_t, bins_lanes * most_bins_vectors> states_;
    std::array<std::uint8_t, 2 * most_bins_vectors * bins_vector_words> tail_{};
};

const BinsKernels& bins_kernels();

}  // namespace slimtensors
