#pragma once
#include "core/bytes.h"

// A mask as the gaps between its ones. A token below `gap_escape` is that many zeros followed by a one; the
// escape is 255 zeros. Zeros after the last one are omitted, so the last token is never the escape.
namespace slimtensors::masks {

inline constexpr std::uint8_t gap_escape = 255;

// Return the output size that gaps_encode() requires: slightly more than the number of ones.
std::size_t gaps_bound(Bytes mask);

// Write the tokens of a mask, lowest bit first, and return their number. Throws std::invalid_argument if
// `tokens` is smaller than gaps_bound().
std::size_t gaps_encode(Bytes mask, MutableBytes tokens);

// Inverse of gaps_encode(). Throws std::invalid_argument for invalid tokens before anything is written.
void gaps_decode(Bytes tokens, MutableBytes mask);

}  // namespace slimtensors::masks
