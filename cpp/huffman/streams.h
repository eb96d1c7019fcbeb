#pragma once
#include <memory>

#include "core/dispatch.h"
#include "core/prefetch.h"
#include "huffman/code.h"

namespace slimtensors::huffman {

// Coded bytes are stored in five streams, one for each fifth of the bytes (the last one includes the
// remainder), so that five codes can be decoded in parallel. A stream is a number whose lowest bits are the
// code of its first byte; codes are oriented so that reading from the top yields each code's first bit first,
// starting with the last byte. A one above the last code marks the top. The number is stored lowest byte
// first.
inline constexpr std::size_t stream_count = 5;

using StreamSizes = std::array<std::size_t, stream_count>;  // in bytes

// Bytes before the streams that may be read but are never used.
inline constexpr std::size_t stream_margin = 8;

// Entry (1 << known) + w describes the next bits w, of which `known` are available. The low byte is the
// number of bits to drop, the next one the number of decoded bytes, the others those bytes, first one on top.
// The entries before are the same for fewer known bits, which is how the table is built.
struct DecodeTable {
    static constexpr std::size_t max_bytes = 6;
    alignas(64) std::array<std::uint64_t, std::size_t{2} << max_length> entries;
    CodeLengths lengths;
    unsigned known;
};

// Each entry has the code word in its top bits and the length in its low bits; `pairs` is indexed by two
// bytes, low one first.
struct EncodeTable {
    std::array<std::uint64_t, 256> singles;
    std::unique_ptr<std::uint64_t[]> pairs = std::make_unique<std::uint64_t[]>(std::size_t{1} << 16);
    bool has_pairs;  // building them does not pay off for codes of many bytes
};

struct Kernels {
    // Build the table of a complete code.
    void (*build)(const CodeLengths& lengths, DecodeTable& table);

    // Encode `count` bytes into five buffers of `stream_room(count)` bytes each.
    StreamSizes (*encode)(const EncodeTable& table, const std::uint8_t* bytes, std::size_t count,
                          std::uint8_t* buffers, const PrefetchRanges& prefetch);

    // Fill `bytes` and return whether the streams contain exactly `count` codes. Sizes are at least 1. Stays
    // within streams, margin and bytes for any content of the streams.
    bool (*decode)(const DecodeTable& table, const std::uint8_t* streams, const StreamSizes& sizes,
                   std::uint8_t* bytes, std::size_t count, const PrefetchRanges& prefetch);
};

namespace plain {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}

const Kernels& active_kernels();

void build_encode_table(const CodeLengths& lengths, EncodeTable& table);

constexpr std::size_t stream_room(std::size_t count) {
    return (count / stream_count + stream_count) * max_length / 8 + 16;
}

}  // namespace slimtensors::huffman
