#pragma once
#include <array>
#include <vector>

#include "core/bytes.h"

namespace slimtensors::trellis {

// Dependent quantization: an integer k stands for 2k steps, or for 2k - sign(k) steps if the state of its
// column is odd. The parity of k selects the next state.
inline constexpr std::size_t states = 8;
inline constexpr std::array<std::array<std::uint8_t, 2>, states> next_state{
    {{0, 1}, {3, 2}, {5, 4}, {6, 7}, {1, 0}, {2, 3}, {4, 5}, {7, 6}}};

constexpr std::int64_t steps_of(std::int64_t k, unsigned state) {
    return 2 * k - static_cast<std::int64_t>(state & 1) * ((k > 0) - (k < 0));
}

// An integer is coded as a symbol, its high bits, and 0 to 5 low bits that are stored as they are. Symbol 0
// is the escape: the integer is stored elsewhere.
inline constexpr unsigned frequency_bits = 11, frequency_unit = 1u << frequency_bits;
inline constexpr int symbols = 64, symbol_zero = 32, escape = 0, max_low_bits = 5;

// The class of a weight is the sum of those of its row and column, limited to this range: the magnitude of
// its integer, in quarters of an octave. Each class has two tables, for even and odd states.
inline constexpr int classes = 64;
constexpr int limit_class(int sum) { return sum < 0 ? 0 : sum < classes ? sum : classes - 1; }

// Steps of columns are eighths of an octave; those of rows may be divided by up to 2^3.
inline constexpr int max_fineness = 3;

// Parameters of the distribution of all integers of a tensor; see docs/format-trellis.md.
struct Parameters {
    std::int8_t scale, shape;  // in 1/16 octave, and in 1/16
    std::array<std::int8_t, 2> zero,
        one;                       // correction for k = 0 and |k| = 1 in even and odd states, 1/16 bit
    std::int8_t row_fineness = 0;  // how often the unit of the rows' steps is halved
    std::int8_t reserved = 0;      // must be zero
};
inline constexpr std::size_t parameter_bytes = 8;

Parameters read_parameters(Bytes bytes);

// The number of low bits of a class, and the frequency of each symbol in units of 2^-11. Computed with
// integers only, so that every machine gets the same table.
struct Table {
    int low_bits;
    std::array<std::uint16_t, symbols> frequencies;
};
Table make_table(const Parameters& parameters, int weight_class, unsigned odd);

// The smallest and the largest class in a matrix.
struct ClassRange {
    int first, last;
};
ClassRange find_classes(std::span<const std::int16_t> rows, std::span<const std::int16_t> columns);

// Tables of a range of classes, for even and odd states.
class Tables {
  public:
    Tables(const Parameters& parameters, ClassRange range);
    int first() const { return first_; }
    const Table& at(int weight_class, unsigned odd) const {
        return tables_[static_cast<std::size_t>(weight_class - first_) * 2 + odd];
    }
    const std::vector<Table>& all() const { return tables_; }

  private:
    int first_;
    std::vector<Table> tables_;
};

}  // namespace slimtensors::trellis
