#pragma once
#include <array>
#include <vector>

#include "core/bytes.h"
#include "core/floats.h"

namespace slimtensors::residual {

// The context of an item is twice the logarithm of the change expected for it, in units of the base's last
// place. From `fresh_context` on the expected change is about as large as the base: the item is coded instead
// of its difference.
inline constexpr int contexts = 64, context_zero = 55, fresh_context = 53;
inline constexpr int fresh_octaves = 5;  // of fresh items below the expected change

// A number is coded as a symbol, its high bits, and low bits that are stored as they are. Symbol 0 is the
// escape: the item is stored elsewhere.
inline constexpr unsigned frequency_bits = 11, frequency_unit = 1u << frequency_bits;
inline constexpr int symbols = 64, symbol_zero = 32, escape = 0, max_symbol = 31;

struct FloatLayout {
    std::size_t itemsize;
    unsigned mantissa;
};
constexpr FloatLayout layout_of(FloatType type) {
    return type == FloatType::f32   ? FloatLayout{4, 23}
           : type == FloatType::f16 ? FloatLayout{2, 10}
                                    : FloatLayout{2, 7};
}

// Parameters of the distribution in a context.
struct ContextParameters {
    std::int8_t zero;   // log2 of the odds of an unchanged item, or of an unchanged sign, in 1/8
    std::int8_t scale;  // in 1/8 octave
};

// The number of low bits in a context, and the frequency of each symbol in units of 2^-11. Computed with
// integers only, so that every machine gets the same table.
struct ContextTable {
    unsigned low_bits;
    std::array<std::uint16_t, symbols> frequencies;
};
ContextTable make_context_table(int context, unsigned shape, ContextParameters parameters, unsigned mantissa);

// Serialized models.
struct ExpectedParameters {
    std::size_t width;
    std::uint64_t used;  // contexts with tables
    std::uint8_t shape;  // in 1/16
    std::array<ContextParameters, contexts> tables;
    std::vector<std::int16_t> rows, columns;  // expected changes, in 1/4 octave
};
std::vector<std::uint8_t> write_expected(const ExpectedParameters& parameters);
ExpectedParameters read_expected(Bytes model, std::size_t items);

}  // namespace slimtensors::residual
