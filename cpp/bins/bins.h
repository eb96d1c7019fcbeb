#pragma once
#include "core/bytes.h"

namespace slimtensors {

// Items as numbers that fall into bins: which bin is coded by how frequent it is among items of rows and
// columns of a like scale, where in the bin in plain bits. A model says all that, and chunks, which otherwise
// stand alone, share it. A chunk is either the bytes of its items or, if these are more,
//   the bytes of the words in 32 bits · states · words · raw bits
// Its row says in 32-bit numbers how many bytes it has, and their CRC-32C, continued from that of the model.
// All functions throw std::invalid_argument for sizes that do not fit together and for bytes that no encoder
// can have written.
inline constexpr std::size_t bins_chunk = std::size_t{1} << 17;  // items; the last chunk may have fewer
inline constexpr std::size_t bins_row = 2 * sizeof(std::uint32_t);

// What is known of an item of 1, 2, 4 or 8 bytes: a float has exponent bits, below its sign.
struct BinsKind {
    std::size_t size;
    unsigned exponent_bits;
    bool is_signed;
};

// Find a model for items in rows of one of these widths, or without rows, and return its size, 0 if none
// makes the items smaller. `labels` gets a byte for each row, as bins_encode() needs them, and has room for
// all of the narrowest rows; `model` has room for bins_model_bound() bytes.
std::size_t bins_fit(Bytes items, const BinsKind& kind, std::span<const std::size_t> widths,
                     MutableBytes labels, MutableBytes model);
std::size_t bins_model_bound(std::span<const std::size_t> widths);

// Code some chunks, of which the first begins with item `first` of the tensor. Returns how many bytes of
// `data` were used, which has as much room as the items.
std::size_t bins_encode(Bytes items, const BinsKind& kind, std::size_t first, Bytes labels, Bytes model,
                        MutableBytes rows, MutableBytes data);

// Undo that. Bad data may be noticed only after some items were written.
void bins_decode(Bytes rows, Bytes data, std::size_t itemsize, std::size_t first, Bytes model,
                 MutableBytes items);

}  // namespace slimtensors
