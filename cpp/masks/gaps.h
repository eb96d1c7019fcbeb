#pragma once
#include "core/bytes.h"

namespace slimtensors {

// A token below `gap_escape` says: that many zeros, then a one. The escape says: 255 zeros, and no one yet.
// Zeros after the last one are not said, so the last token is never the escape.
inline constexpr std::uint8_t gap_escape = 255;

// The room that gaps_encode() needs: a little more than the mask has ones.
std::size_t gaps_bound(Bytes mask);

// Write the tokens of a mask, lowest bit first, and return how many there are. Throws std::invalid_argument
// if `tokens` has no room for as many as gaps_bound() says.
std::size_t gaps_encode(Bytes mask, MutableBytes tokens);

// Undo gaps_encode(). Tokens that it cannot have written are refused before a byte is written.
void gaps_decode(Bytes tokens, MutableBytes mask);

}  // namespace slimtensors
