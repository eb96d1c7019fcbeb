#pragma once
#include <array>

#include "core/dispatch.h"
#include "core/floats.h"

namespace slimtensors::quantize {

// Rows are processed in pieces that fit into the L1 cache as floats; a piece passes through several loops.
inline constexpr std::size_t piece_items = 512;

using SquareLanes = std::array<double, 16>;

struct Kernels {
    // Convert items to floats; return whether all are finite.
    using Load = bool (*)(const std::uint8_t* items, std::size_t count, float* to);
    using Store = void (*)(const float* from, std::size_t count, std::uint8_t* items);
    std::array<Load, 3> load;  // by FloatType: f32, f16, bf16
    std::array<Store, 3> store;

    // In place: divide and add, rounding after each step to the type of the loop; subtract and multiply. A
    // zero point of 0.0 changes nothing, not even the sign of a zero.
    using Divide = void (*)(float* x, std::size_t count, float scale, float zero);
    std::array<Divide, 3> divide;
    void (*multiply)(float* x, std::size_t count, float scale, float zero);

    // Convert floats to codes, one per byte, and back.
    void (*to_ints)(const float* x, std::size_t count, float min, float max, std::uint8_t* codes);
    void (*to_fp4)(const float* x, std::size_t count, std::uint8_t* codes);
    void (*to_fp8)(const float* x, std::size_t count, std::uint8_t* codes);
    void (*from_ints)(const std::uint8_t* codes, std::size_t count, float* x);
    void (*from_fp4)(const std::uint8_t* codes, std::size_t count, float* x);
    void (*from_fp8)(const std::uint8_t* codes, std::size_t count, float* x);

    // Convert between one code per byte and packed codes. The last byte is padded with zeros. Packed codes
    // are larger by `offset`: half the range for integers, 0 for floats.
    using Pack = void (*)(const std::uint8_t* codes, std::size_t count, std::uint8_t offset,
                          std::uint8_t* to);
    using Unpack = void (*)(const std::uint8_t* from, std::size_t count, std::uint8_t offset,
                            std::uint8_t* codes);
    std::array<Pack, 9> pack;  // by bits
    std::array<Unpack, 9> unpack;

    // Compute the items of two bytes (f16, bf16) for 16 codes: multiply and round.
    using Tabulate = void (*)(const float* numbers, float scale, float zero, std::uint16_t* table);
    std::array<Tabulate, 3> tabulate;

    // Look up items of two bytes by codes of four bits. Non-temporal stores are faster for results larger
    // than the caches; other threads see them only after `fence`.
    void (*look_up)(const std::uint8_t* from, std::size_t count, const std::uint16_t* table,
                    std::uint8_t* items, bool non_temporal);
    void (*fence)();

    using Range = void (*)(const std::uint8_t* items, std::size_t count, std::uint8_t* low,
                           std::uint8_t* high);
    std::array<Range, 3> range;

    // Add squares of items, or of differences, to interleaved sums.
    void (*add_squares)(Bytes items, FloatType type, SquareLanes& lanes);
    void (*add_squared_differences)(Bytes items, Bytes others, FloatType type, SquareLanes& lanes);
};

namespace plain {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}

const Kernels& active_kernels();

}  // namespace slimtensors::quantize
