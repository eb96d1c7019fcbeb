#pragma once
#include "core/bytes.h"
#include "core/floats.h"

namespace slimtensors::residual {

// Residual for arrays of floats of which few items changed, mostly by one step: see docs/format-residuals.md.
// Items are coded in chunks, independently of each other.
inline constexpr std::size_t sparse_chunk = std::size_t{1} << 17;  // items
inline constexpr std::size_t max_sparse_classes = 16;
inline constexpr std::size_t max_sparse_model = 2 + 3 * max_sparse_classes;

// Return how many of some evenly spaced items differ, in units of 2^-16.
std::size_t sample_changes(Bytes items, Bytes base, FloatType type);

// Write the model of two arrays, at most `max_sparse_model` bytes; return its size.
std::size_t sparse_fit(Bytes items, Bytes base, FloatType type, MutableBytes model);

// Maximum size of a chunk.
constexpr std::size_t sparse_bound(std::size_t items) { return items * 16 + 1024; }

// Encode a chunk; return its size, 0 if no item differs.
std::size_t sparse_encode(Bytes items, Bytes base, FloatType type, Bytes model, MutableBytes chunk);

// Decode a chunk into `items`. Throws std::invalid_argument for a malformed chunk or model.
void sparse_decode(Bytes chunk, Bytes base, FloatType type, Bytes model, MutableBytes items);

}  // namespace slimtensors::residual
