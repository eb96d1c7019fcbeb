// CRC-32C instructions on three interleaved blocks: their latency is three cycles.
#include "core/crc32c.h"
#include "core/crc32c_polynomial.h"

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

#if defined(__SSE4_2__) || defined(__ARM_FEATURE_CRC32)
namespace slimtensors::core::crc {
namespace {

#if defined(__SSE4_2__)
using State = std::uint64_t;  // the instruction's operand; only 32 bits are used
State add8(State state, const std::uint8_t* from) { return _mm_crc32_u64(state, load<std::uint64_t>(from)); }
State add1(State state, std::uint8_t byte) { return _mm_crc32_u8(static_cast<std::uint32_t>(state), byte); }
#else
using State = std::uint32_t;
State add8(State state, const std::uint8_t* from) { return __crc32cd(state, load<std::uint64_t>(from)); }
State add1(State state, std::uint8_t byte) { return __crc32cb(state, byte); }
#endif

// Appends a fixed number of zero bytes to a remainder, one lookup per byte of the remainder.
template <std::size_t length>
struct Shift {
    static constexpr auto tables = [] {
        std::uint32_t bits[32] = {};
        for (int k = 0; k < 32; ++k) bits[k] = crc32c_multiply(crc32c_shift(length), 1u << k);
        std::array<std::array<std::uint32_t, 256>, 4> result{};
        for (unsigned k = 0; k < 4; ++k)
            for (unsigned byte = 1; byte < 256; ++byte) {
                const unsigned rest = byte & (byte - 1);  // linear: f(byte) = f(rest) ^ f(lowest bit)
                unsigned lowest = 0;
                while (!(byte >> lowest & 1u)) ++lowest;
                result[k][byte] = result[k][rest] ^ bits[8 * k + lowest];
            }
        return result;
    }();

    static State apply(State state) {
        return tables[0][state & 255u] ^ tables[1][state >> 8 & 255u] ^ tables[2][state >> 16 & 255u] ^
               tables[3][state >> 24 & 255u];
    }
};

// Consumes triples of blocks from the front of [at, end).
template <std::size_t block>
State add_triples(State state, const std::uint8_t*& at, const std::uint8_t* end) {
    for (; end - at >= static_cast<std::ptrdiff_t>(3 * block); at += 3 * block) {
        State second = 0, third = 0;
        for (std::size_t i = 0; i < block; i += 8) {
            state = add8(state, at + i);
            second = add8(second, at + block + i);
            third = add8(third, at + 2 * block + i);
        }
        state = Shift<block>::apply(state) ^ second;
        state = Shift<block>::apply(state) ^ third;
    }
    return state;
}

std::uint32_t update(Bytes data, std::uint32_t start) {
    State state = start;
    const std::uint8_t* at = data.data();
    const std::uint8_t* end = at + data.size();
    state = add_triples<8192>(state, at, end);
    state = add_triples<256>(state, at, end);
    for (; end - at >= 8; at += 8) state = add8(state, at);
    for (; at != end; ++at) state = add1(state, *at);
    return static_cast<std::uint32_t>(state);
}

}  // namespace

constinit const Crc32cKernels crc32c_kernels{update};

}  // namespace slimtensors::core::crc
#endif
