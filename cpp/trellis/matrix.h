#pragma once
#include "trellis/quantize.h"

namespace slimtensors::trellis {

// A matrix without its integers: steps, classes and distribution, with the tables that follow from them.
// Weights and integers are passed as bytes, row by row; `first` is the first row.
class Matrix {
  public:
    // `parameters` are 8 bytes, the others 16-bit integers.
    Matrix(Bytes parameters, Bytes row_steps, Bytes column_steps, Bytes row_classes, Bytes column_classes);

    // Choose integers (32 bits) for weights (32-bit floats). `factor` and `order` are empty for no feedback.
    void quantize(std::size_t first, Bytes weights, Bytes factor, Bytes order, float price_of_bit,
                  bool keep_zeros, MutableBytes integers) const;
    // Add the integers of some rows to `counts`.
    void count(std::size_t first, Bytes integers, Counts& counts) const;
    std::size_t chunk_bound(std::size_t rows) const { return trellis::chunk_bound(rows, columns()); }
    std::size_t encode(std::size_t first, Bytes integers, MutableBytes chunk) const;
    void decode(std::size_t first, Bytes chunk, FloatType type, MutableBytes items) const;

  private:
    std::size_t columns() const { return column_steps_.size(); }
    Layout rows_from(std::size_t first, std::size_t items) const;

    Parameters parameters_;
    std::vector<std::int16_t> row_steps_, column_steps_, row_classes_, column_classes_;
    Tables tables_;
    Decoder decoder_;
};

}  // namespace slimtensors::trellis
