#pragma once
#include <array>

#include "core/bytes.h"

namespace slimtensors {

// Prefix codes for bytes, fixed by their lengths alone: codes are numbered upwards in the order of (length,
// byte).
// Words have at most 11 bits, or 12 where that pays: the larger table is slower to decode with.
inline constexpr unsigned usual_longest_code = 11, longest_code = 12;
inline constexpr std::size_t longest_packed_code = 128;

using ByteCounts = std::array<std::uint32_t, 256>;
using CodeLengths = std::array<std::uint8_t, 256>;  // 0: the byte has no code

// The lengths, none above `longest`, that make bytes with these counts shortest. At least two bytes must
// occur.
CodeLengths best_code(const ByteCounts& counts, unsigned longest);

// Bits that bytes with these counts take in the best code with words of any length. Much faster to find.
std::uint64_t fewest_bits(const ByteCounts& counts);

// Whether every sequence of bits is the beginning of some sequence of codes, and of one only.
bool is_complete(const CodeLengths& lengths);

// Bits that bytes with these counts take.
std::uint64_t coded_bits(const ByteCounts& counts, const CodeLengths& lengths);

// Write the lengths in nibbles, low one first, and return how many bytes that took, at most
// `longest_packed_code`. 0 to 12: a length; 13 n: n + 2 zeros; 14 n m: n + 16 m + 18 zeros.
std::size_t pack_code(const CodeLengths& lengths, std::uint8_t* to);

// Undo `pack_code`, return how many bytes that took, and refuse what is not a complete code.
std::size_t unpack_code(Bytes from, CodeLengths& lengths);

// The code of each byte, its first bit the highest.
std::array<std::uint16_t, 256> code_words(const CodeLengths& lengths);

}  // namespace slimtensors
