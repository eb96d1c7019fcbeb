#pragma once
#include <memory>

#include "core/prefetch.h"
#include "huffman/code.h"

namespace slimtensors {

// Coded bytes lie in five streams, one for each fifth of the bytes (the last takes what does not divide), so
// that a processor can work on five codes at once. A stream is a number whose lowest bits are the code of its
// first byte, turned so that reading down from the top meets each code at its first bit, the last byte's code
// first. A one above the last code marks the top. The number is stored lowest byte first.
inline constexpr std::size_t stream_count = 5;

using StreamSizes = std::array<std::size_t, stream_count>;  // in bytes

// Bytes of room in front of the streams that may be read, though never used.
inline constexpr std::size_t stream_margin = 8;

// Entry (1 << known) + w: what to do when the next bits are w, of which there are `known`. The low byte is
// how many bits to drop, the next one how many bytes they stand for, the others those bytes, the first one on
// top. The entries before are the same for fewer known bits, which is how the table is built.
struct DecodeTable {
    static constexpr std::size_t most_bytes = 6;
    alignas(64) std::array<std::uint64_t, std::size_t{2} << longest_code> entries;
    CodeLengths lengths;
    unsigned known;
};

// A code word on top of its 64 bits and its length at the bottom; `pairs` for two bytes, low one first.
struct EncodeTable {
    std::array<std::uint64_t, 256> singles;
    std::unique_ptr<std::uint64_t[]> pairs = std::make_unique<std::uint64_t[]>(std::size_t{1} << 16);
    bool has_pairs;  // not worth their making for codes of many bytes
};

struct StreamKernels {
    // From the lengths of a complete code.
    void (*build)(const CodeLengths& lengths, DecodeTable& table);

    // Code `count` bytes into five buffers of `stream_room(count)` bytes each.
    StreamSizes (*encode)(const EncodeTable& table, const std::uint8_t* bytes, std::size_t count,
                          std::uint8_t* buffers, const Soon& soon);

    // Fill `bytes`. Sizes are at least 1. False if the streams are not exactly `count` codes. Stays inside of
    // streams, margin and bytes whatever the streams contain.
    bool (*decode)(const DecodeTable& table, const std::uint8_t* streams, const StreamSizes& sizes,
                   std::uint8_t* bytes, std::size_t count, const Soon& soon);
};

const StreamKernels& stream_kernels();
const StreamKernels& stream_kernels_avx2();

void build_encode_table(const CodeLengths& lengths, EncodeTable& table);

constexpr std::size_t stream_room(std::size_t count) {
    return (count / stream_count + stream_count) * longest_code / 8 + 16;
}

}  // namespace slimtensors
