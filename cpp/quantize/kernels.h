#pragma once
#include <array>

#include "quantize/quantize.h"

namespace slimtensors {

// The inner loops of quantize.h for one instruction set. Rows are worked on in pieces, which fit into the
// first cache as floats; a piece goes through several loops.
inline constexpr std::size_t piece_items = 512;

struct QuantizeKernels {
    // Items to floats; returns whether all are finite.
    using Load = bool (*)(const std::uint8_t* items, std::size_t count, float* to);
    using Store = void (*)(const float* from, std::size_t count, std::uint8_t* items);
    std::array<Load, 3> load;  // by Number: f32, f16, bf16
    std::array<Store, 3> store;

    // In place: divide and add, rounding after each to the Number that selects the loop; subtract and
    // multiply. With 0.0 as zero point nothing changes there, not even the sign of a zero.
    using Divide = void (*)(float* x, std::size_t count, float scale, float zero);
    std::array<Divide, 3> divide;
    void (*multiply)(float* x, std::size_t count, float scale, float zero);

    // Floats to codes of one per byte, and back.
    void (*to_ints)(const float* x, std::size_t count, float least, float greatest, std::uint8_t* codes);
    void (*to_fp4)(const float* x, std::size_t count, std::uint8_t* codes);
    void (*to_fp8)(const float* x, std::size_t count, std::uint8_t* codes);
    void (*of_ints)(const std::uint8_t* codes, std::size_t count, float* x);
    void (*of_fp4)(const std::uint8_t* codes, std::size_t count, float* x);
    void (*of_fp8)(const std::uint8_t* codes, std::size_t count, float* x);

    // Between one code per byte and `bits` bits each. A last byte that is not full ends with zeros. Packed
    // codes are more by `flip`: the top bit for integers, nothing for floats.
    using Pack = void (*)(const std::uint8_t* codes, std::size_t count, std::uint8_t flip, std::uint8_t* to);
    using Unpack = void (*)(const std::uint8_t* from, std::size_t count, std::uint8_t flip,
                            std::uint8_t* codes);
    std::array<Pack, 9> pack;  // by bits
    std::array<Unpack, 9> unpack;

    // What 16 numbers become: multiply, and round to items of two bytes (f16, bf16).
    using Tabulate = void (*)(const float* numbers, float scale, float zero, std::uint16_t* table);
    std::array<Tabulate, 3> tabulate;

    // Items of two bytes by codes of four bits. Writing past the caches is faster if they cannot hold it;
    // other threads see that for sure only after `settle`.
    void (*look_up)(const std::uint8_t* from, std::size_t count, const std::uint16_t* table,
                    std::uint8_t* items, bool past_caches);
    void (*settle)();

    using Range = void (*)(const std::uint8_t* items, std::size_t count, std::uint8_t* low,
                           std::uint8_t* high);
    std::array<Range, 3> range;
};

const QuantizeKernels& quantize_kernels_plain();
const QuantizeKernels& quantize_kernels_avx2();

}  // namespace slimtensors
