#pragma once
#include "core/bytes.h"

// A mask as a bit matrix with rows of `width` bytes, the last of which may be shorter. Every row and every
// column has a class, and every pair of classes has a probability of a one: this is the whole model. `rows`
// and `columns` are the classes, one byte each; `chances` are the probabilities as bytes (density_kernels.h),
// [row class][column class] with `density_classes` entries per line.
//
// All functions throw std::invalid_argument for inconsistent sizes and for bytes that no encoder writes.
namespace slimtensors::masks {

inline constexpr std::size_t density_classes = 16;
inline constexpr std::size_t density_pairs = density_classes * density_classes;
inline constexpr std::size_t density_max_width = std::size_t{1} << 15;  // bytes of a row

// Choose classes that minimize the coded size of the mask, including the model.
void density_fit(Bytes mask, MutableBytes rows, MutableBytes columns, MutableBytes chances);

// Write the model and return its size, at most density_model_bound().
std::size_t density_pack(Bytes rows, Bytes columns, Bytes chances, MutableBytes model);
std::size_t density_model_bound(std::size_t rows_and_columns);
void density_unpack(Bytes model, MutableBytes rows, MutableBytes columns, MutableBytes chances);

// Code some rows and return the number of bytes written to `coded`, at most the size of the mask: if coding
// does not make the mask smaller, it is copied.
std::size_t density_encode(Bytes mask, Bytes rows, Bytes columns, Bytes chances, MutableBytes coded);
void density_decode(Bytes coded, Bytes rows, Bytes columns, Bytes chances, MutableBytes mask);

}  // namespace slimtensors::masks
