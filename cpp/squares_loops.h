// The loops of squares.h, written once: each unit compiles them for its own instruction set.
#pragma once
#include <array>

#include "floats.h"
#include "squares.h"

namespace slimtensors {

// `Unit` is a type of the unnamed namespace of its unit, so that the linker cannot mix their code.
template <class Unit>
struct SquaresLoops {
    // Sums that take turns: vector code adds in this order too.
    static constexpr std::size_t lanes = 16;

    template <class Float, class Item>
    static double sum(std::size_t count, Item item) {
        std::array<double, lanes> sums{};
        std::size_t i = 0;
        for (; i + lanes <= count; i += lanes)
            for (std::size_t k = 0; k < lanes; ++k) sums[k] += square(item(i + k));
        for (std::size_t k = 0; i + k < count; ++k) sums[k] += square(item(i + k));
        for (std::size_t half = lanes / 2; half > 0; half /= 2)
            for (std::size_t k = 0; k < half; ++k) sums[k] += sums[k + half];
        return sums[0];
    }

    template <class Float>
    static double of(Bytes items) {
        const std::uint8_t* const at = items.data();
        return sum<Float>(items.size() / size<Float>, [at](std::size_t i) { return value<Float>(at, i); });
    }

    template <class Float>
    static double between(Bytes items, Bytes others) {
        const std::uint8_t *const a = items.data(), *const b = others.data();
        return sum<Float>(items.size() / size<Float>,
                          [a, b](std::size_t i) { return value<Float>(a, i) - value<Float>(b, i); });
    }

  private:
    template <class Float>
    static constexpr std::size_t size = sizeof(typename Float::Bits);

    template <class Float>
    static double value(const std::uint8_t* items, std::size_t i) {
        return Float::value(load<typename Float::Bits>(items + i * size<Float>));
    }

    static double square(double x) { return x * x; }
};

template <class Unit>
double sum_of_squares_by(Bytes items, Number kind) {
    using Loops = SquaresLoops<Unit>;
    return kind == Number::f32   ? Loops::template of<F32>(items)
           : kind == Number::f16 ? Loops::template of<F16>(items)
                                 : Loops::template of<BF16>(items);
}

template <class Unit>
double squared_distance_by(Bytes items, Bytes others, Number kind) {
    using Loops = SquaresLoops<Unit>;
    return kind == Number::f32   ? Loops::template between<F32>(items, others)
           : kind == Number::f16 ? Loops::template between<F16>(items, others)
                                 : Loops::template between<BF16>(items, others);
}

}  // namespace slimtensors
