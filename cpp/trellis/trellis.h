// Entropy-coded trellis quantization of matrices.
//
// A weight is an integer, read with the state of its column, times the step of its row and that of its
// column. Rows are coded in chunks, independently of each other.
#pragma once
#include "core/floats.h"
#include "trellis/model.h"

namespace slimtensors::trellis {

inline constexpr int step_unit = 8;  // steps per octave
inline constexpr int min_step = -126 * step_unit, max_step = 127 * step_unit;

// The steps and classes of rows and columns, and the distribution of the integers.
struct Layout {
    Parameters parameters;
    std::span<const std::int16_t> row_steps, column_steps;      // in 1/8 octave, rows finer if so described
    std::span<const std::int16_t> row_classes, column_classes;  // in 1/4 octave
};

// 2^(code / (8 * 2^fineness)) as float.
float step_size(int code, int fineness);
std::vector<float> step_sizes(std::span<const std::int16_t> codes, int fineness);

// Maximum size of an encoded chunk.
std::size_t chunk_bound(std::size_t rows, std::size_t columns);

// Encode the integers of some rows [rows][columns]; `layout` contains the rows of the chunk only. Return the
// size.
std::size_t encode_chunk(const Tables& tables, const Layout& layout, std::span<const std::int32_t> integers,
                         MutableBytes out);

// Decodes chunks of a matrix.
class Decoder {
  public:
    Decoder(const Layout& layout, const Tables& tables);
    // Decode rows [first, first + count), one chunk, to `out`. Throws std::invalid_argument if it is
    // malformed.
    void decode(Bytes chunk, std::size_t first, std::size_t count, FloatType type, MutableBytes out) const;

  private:
    Layout layout_;
    int first_class_;
    std::vector<std::uint32_t> slots_;
    std::vector<float> row_steps_, column_steps_;
};

}  // namespace slimtensors::trellis
