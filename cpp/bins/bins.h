#pragma once
#include "core/bytes.h"

// Numbers as bins. The bin of an item is entropy-coded with the frequencies among items of rows and columns
// of a similar magnitude; the position within the bin is stored in plain bits. All chunks of a tensor share
// one model and are otherwise independent. A chunk is either the bytes of its items or, if that is smaller,
//   size of the words as a 32-bit number · states · words · raw bits
// Its row consists of two 32-bit numbers: its size in bytes, and their CRC-32C seeded with that of the model.
// All functions throw std::invalid_argument for inconsistent sizes and for bytes that no encoder writes.
namespace slimtensors::bins {

inline constexpr std::size_t chunk_items = std::size_t{1} << 17;  // the last chunk may be shorter
inline constexpr std::size_t row_bytes = 2 * sizeof(std::uint32_t);

// An item of 1, 2, 4 or 8 bytes. A float has exponent bits, below its sign; an integer has none.
struct ItemType {
    std::size_t itemsize;
    unsigned exponent_bits;
    bool is_signed;
};

// Find a model for items in rows of one of these widths, or without rows, and return its size; 0 if no model
// makes the items smaller. `labels` receives one byte per row for encode() and must have room for the rows of
// the smallest width; `model` must have model_bound() bytes.
std::size_t fit(Bytes items, const ItemType& type, std::span<const std::size_t> widths, MutableBytes labels,
                MutableBytes model);
std::size_t model_bound(std::span<const std::size_t> widths);

// Encode some chunks, the first of which starts with item `first` of the tensor, and return the number of
// bytes written to `data`, which must be at least as large as the items.
std::size_t encode(Bytes items, const ItemType& type, std::size_t first, Bytes labels, Bytes model,
                   MutableBytes rows, MutableBytes data);

// Inverse of encode(). Invalid data may be detected only after some items were written.
void decode(Bytes rows, Bytes data, std::size_t itemsize, std::size_t first, Bytes model, MutableBytes items);

}  // namespace slimtensors::bins
