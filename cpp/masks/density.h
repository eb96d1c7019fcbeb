#pragma once
#include "core/bytes.h"

namespace slimtensors {

// A mask as a bit matrix, rows of `width` bytes, the last one may be shorter. Every row and every column
// belongs to a class, and a pair of classes has its own chance of a one: that is the whole model. `rows` and
// `columns` are those classes, a byte each; `chances` are bytes as density_kernels.h reads them, [row class]
// [column class], in lines of `density_classes`.
inline constexpr std::size_t density_classes = 16;
inline constexpr std::size_t density_pairs = density_classes * density_classes;
inline constexpr std::size_t density_widest = std::size_t{1} << 15;  // bytes of a row

// All of these throw std::invalid_argument for sizes that do not fit together, and for bytes that no encoder
// can have written.

// Choose classes that make the mask small, counting what it costs to say them.
void density_fit(Bytes mask, MutableBytes rows, MutableBytes columns, MutableBytes chances);

// Write the model, and return how many bytes that took: at most density_model_bound().
std::size_t density_pack(Bytes rows, Bytes columns, Bytes chances, MutableBytes model);
std::size_t density_model_bound(std::size_t rows_and_columns);
void density_unpack(Bytes model, MutableBytes rows, MutableBytes columns, MutableBytes chances);

// Code a number of rows. Returns how many bytes of `coded` were used, at most as many as the mask has: if
// coding does not make it smaller, it is copied.
std::size_t density_encode(Bytes mask, Bytes rows, Bytes columns, Bytes chances, MutableBytes coded);
void density_decode(Bytes coded, Bytes rows, Bytes columns, Bytes chances, MutableBytes mask);

}  // namespace slimtensors
