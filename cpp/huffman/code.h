#pragma once
#include "core/histogram.h"

namespace slimtensors::huffman {

// Canonical prefix codes for bytes, determined by their lengths: codes are numbered in the order of (length,
// byte). Lengths are at most 11 bits, or 12 where that saves enough: the larger table decodes more slowly.
inline constexpr unsigned usual_max_length = 11, max_length = 12;
inline constexpr std::size_t max_packed_code = 128;

using CodeLengths = std::array<std::uint8_t, 256>;  // 0: the byte has no code

// Return the optimal lengths of at most `limit` bits. At least two bytes must occur.
CodeLengths best_code(const ByteCounts& counts, unsigned limit);

// Return the total bits of the optimal code without a length limit. Much faster than best_code().
std::uint64_t min_coded_bits(const ByteCounts& counts);

// Return whether the code is complete: every bit sequence is a prefix of exactly one sequence of codes.
bool is_complete(const CodeLengths& lengths);

// Return the total bits of bytes with these counts.
std::uint64_t coded_bits(const ByteCounts& counts, const CodeLengths& lengths);

// Write the lengths as nibbles, low one first, and return the size in bytes, at most `max_packed_code`. A
// nibble of 0 to 12 is a length; 13 n means n + 2 zeros; 14 n m means n + 16 m + 18 zeros.
std::size_t pack_code(const CodeLengths& lengths, std::uint8_t* to);

// Inverse of pack_code(); returns the number of bytes read. Throws std::invalid_argument unless the code is
// complete.
std::size_t unpack_code(Bytes from, CodeLengths& lengths);

// Return the code of each byte, its first bit the highest.
std::array<std::uint16_t, 256> code_words(const CodeLengths& lengths);

}  // namespace slimtensors::huffman
