#pragma once
#include <array>
#include <vector>

#include "core/bytes.h"
#include "core/floats.h"

namespace slimtensors::residual {

// Residual for arrays of floats of which most items changed a little: the distribution of a change depends on
// the change expected in its row and column, relative to the base value. See docs/format-residuals.md. Items
// are coded in chunks, independently of each other.
inline constexpr std::size_t expected_chunk = std::size_t{1} << 18;  // items

// Return the model for two arrays of rows of `width` items. Throws std::invalid_argument for arrays that
// differ in size.
std::vector<std::uint8_t> expected_fit(Bytes items, Bytes base, FloatType type, std::size_t width);

struct ExpectedTables;

// A model, ready to code items of an array.
class ExpectedModel {
  public:
    // Throws std::invalid_argument if `model` is malformed, or not for an array of `items` items.
    ExpectedModel(Bytes model, FloatType type, std::size_t items);

    std::size_t chunk_bound(std::size_t items) const;
    // Encode the items from `first` on; return the size of the chunk.
    std::size_t encode(std::size_t first, Bytes items, Bytes base, MutableBytes chunk) const;
    // Throws std::invalid_argument if the chunk is malformed.
    void decode(std::size_t first, Bytes chunk, Bytes base, MutableBytes items) const;

  private:
    FloatType type_;
    std::size_t items_, width_;
    int fresh_table_;
    std::array<std::uint8_t, 64> table_of_, low_of_;  // by context
    unsigned fresh_context_;
    std::vector<std::array<std::uint16_t, 64>> frequencies_;
    std::vector<std::uint32_t> slots_;
    std::vector<std::int16_t> rows_, columns_;

    template <class Visit>
    void by_blocks(std::size_t first, Bytes base, Visit visit) const;
};

}  // namespace slimtensors::residual
