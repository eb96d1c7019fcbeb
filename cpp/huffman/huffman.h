#pragma once
#include "core/planes.h"

namespace slimtensors {

// Items in chunks that stand alone. A chunk holds its planes one after the other, lowest first, and its row
// says in 32-bit numbers the CRC-32C of (the rest of the row, the chunk's bytes), then how many bytes each
// plane takes:
//   as many as the chunk has items   the bytes of the plane as they are
//   one                              the byte that all items have there
//   any other number                 a code table (huffman_code.h), the sizes of five streams in 16 bits
//   each, the
//                                    streams (huffman_stream.h), and up to four zero bytes
// Bytes of items, rows and data must belong together: all functions throw std::invalid_argument if not.
inline constexpr std::size_t huffman_chunk = std::size_t{1} << 17;  // items; the last chunk may have fewer

// Decide how each plane of each chunk is best stored: sizes to `rows`, and 256 code lengths per plane to
// `codes`.
void huffman_survey(Bytes items, ItemKind kind, MutableBytes codes, MutableBytes rows);

// Store as surveyed: checksums to `rows`, everything else to `data`, which has as many bytes as the rows say.
void huffman_encode(Bytes items, ItemKind kind, Bytes codes, MutableBytes rows, MutableBytes data);

// Undo both. Bad data may be noticed only after some items were written.
void huffman_decode(Bytes rows, Bytes data, ItemKind kind, MutableBytes items);

// The same for chunks whose checksums were compared before, which takes a fifth of the time. Whatever the
// bytes are, nothing else is read or written.
void huffman_decode_again(Bytes rows, Bytes data, ItemKind kind, MutableBytes items, unsigned threads);

}  // namespace slimtensors
