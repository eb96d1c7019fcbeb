#pragma once
#include "core/planes.h"

// Items in independent chunks. A chunk contains its byte planes one after the other, lowest first. Its row
// consists of 32-bit numbers: the CRC-32C of (the rest of the row, the bytes of the chunk), then the size of
// each plane in bytes. The size also determines how the plane is stored:
//   the number of items of the chunk   raw bytes
//   one                                the byte that all items share
//   any other size                     a code table (code.h), the sizes of five streams as 16-bit numbers,
//   the
//                                      streams (streams.h), and up to four zero bytes
// All functions throw std::invalid_argument if sizes are inconsistent or data is invalid.
namespace slimtensors::huffman {

inline constexpr std::size_t chunk_items = std::size_t{1} << 17;  // the last chunk may be shorter

// Decide how to store each plane of each chunk: write sizes to `rows` and 256 code lengths per plane to
// `codes`.
void survey(Bytes items, ItemFormat format, MutableBytes codes, MutableBytes rows);

// Encode as surveyed: write checksums to `rows` and the planes to `data`, which has the size given by the
// rows.
void encode(Bytes items, ItemFormat format, Bytes codes, MutableBytes rows, MutableBytes data);

// Decode and verify. Invalid data may be detected only after some items were written.
void decode(Bytes rows, Bytes data, ItemFormat format, MutableBytes items);

// Decode without comparing checksums, which takes a fifth of the time of decode(). Memory-safe for any input.
void decode_unverified(Bytes rows, Bytes data, ItemFormat format, MutableBytes items, unsigned threads);

}  // namespace slimtensors::huffman
