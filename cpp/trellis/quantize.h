// The encoder's choices: integers for weights, and the distribution that describes them best.
#pragma once
#include "trellis/trellis.h"

namespace slimtensors::trellis {

// How the rounding error of a column is compensated by later ones, as in GPTQ.
struct Feedback {
    std::span<const float> factor;  // upper triangular, [columns][columns] in the order below; empty for none
    std::span<const std::uint32_t> order;  // columns in the order in which they are rounded
};

// Choose integers for a chunk of weights [rows][columns], at the least (error / step)^2 + price_of_bit *
// bits. Weights that are zero stay zero if `keep_zeros`.
void quantize_chunk(const Tables& tables, const Layout& layout, std::span<const float> weights,
                    const Feedback& feedback, float price_of_bit, bool keep_zeros,
                    std::span<std::int32_t> integers);

// Numbers of occurrences of small integers, by class and parity of the state.
inline constexpr int counted = 256;
class Counts {
  public:
    Counts() : counts_(std::size_t{classes} * 2 * (2 * counted + 1)) {}
    void add(const Layout& layout, std::span<const std::int32_t> integers);
    std::uint32_t& at(int weight_class, unsigned odd, int k) {
        return counts_[(static_cast<std::size_t>(weight_class) * 2 + odd) * (2 * counted + 1) +
                       static_cast<std::size_t>(k + counted)];
    }
    std::uint32_t at(int weight_class, unsigned odd, int k) const {
        return const_cast<Counts*>(this)->at(weight_class, odd, k);
    }

  private:
    std::vector<std::uint32_t> counts_;
};

// Bits of the counted integers with the tables of these parameters.
double measure_bits(const Counts& counts, const Parameters& parameters);
// The parameters with the fewest bits, found by a search from `start`.
Parameters fit(const Counts& counts, const Parameters& start);

}  // namespace slimtensors::trellis
