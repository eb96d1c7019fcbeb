// The inner loop of density_decode() in portable C++.
#include "masks/density_kernels.h"

namespace slimtensors::masks::plain {
namespace {

inline std::uint8_t decode_byte(const std::uint16_t* ones, std::uint32_t* states, const std::uint8_t*& next) {
    unsigned byte = 0;
    for (std::size_t lane = 0; lane < vector_lanes; ++lane) {
        const std::uint32_t state = states[lane], rest = state % chance_unit, one = ones[lane];
        const std::uint32_t part = one * (state / chance_unit);
        const bool bit = rest < one;
        const std::uint32_t left = bit ? part + rest : state - part - one;
        const bool low = left < min_state;
        states[lane] = low ? left << 16 | load<std::uint16_t>(next) : left;
        next += low ? 2 : 0;
        byte |= unsigned{bit} << lane;
    }
    return static_cast<std::uint8_t>(byte);
}

template <std::size_t vectors>
std::size_t decode_row(const std::uint16_t* ones, std::size_t from, std::size_t bytes, std::uint32_t* states,
                       const std::uint8_t*& next, const std::uint8_t* end, std::uint8_t* mask) {
    constexpr std::ptrdiff_t margin = vectors * vector_words;
    const std::uint8_t* words = next;
    std::size_t j = from;
    for (; j < bytes && end - words >= margin; j += vectors)
        for (std::size_t v = 0; v < vectors && j + v < bytes; ++v)
            mask[j + v] = decode_byte(ones + (j + v) * vector_lanes, states + v * vector_lanes, words);
    next = words;
    return j < bytes ? j : bytes;
}

}  // namespace

constinit const DensityKernels density_kernels{
    {nullptr, decode_row<1>, decode_row<2>, nullptr, decode_row<4>}};

}  // namespace slimtensors::masks::plain
