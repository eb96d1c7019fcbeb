// The loops of squares.h, written once: each unit compiles them for its own instruction set.
#pragma once
#include "core/floats.h"
#include "quantize/squares.h"

namespace slimtensors {

// `Unit` is a type of the unnamed namespace of its unit, so that the linker cannot mix their code.
template <class Unit>
struct SquaresLoops {
    using Lanes = SquareSums::Lanes;

    static void add(Bytes items, Number kind, Lanes& sums) {
        const std::uint8_t* const at = items.data();
        by_kind(kind, [&](auto number) {
            using Float = decltype(number);
            sum(items.size() / size<Float>, sums, [at](std::size_t i) { return value<Float>(at, i); });
        });
    }

    static void add_differences(Bytes items, Bytes others, Number kind, Lanes& sums) {
        const std::uint8_t *const a = items.data(), *const b = others.data();
        by_kind(kind, [&](auto number) {
            using Float = decltype(number);
            sum(items.size() / size<Float>, sums,
                [a, b](std::size_t i) { return value<Float>(a, i) - value<Float>(b, i); });
        });
    }

    static constexpr SquaresKernels kernels() { return {add, add_differences}; }

  private:
    template <class Item>
    static void sum(std::size_t count, Lanes& sums, Item item) {
        constexpr std::size_t lanes = std::tuple_size_v<Lanes>;
        Lanes own = sums;  // which nothing else can change: they stay in registers
        std::size_t i = 0;
        for (; i + lanes <= count; i += lanes)
            for (std::size_t k = 0; k < lanes; ++k) own[k] += square(item(i + k));
        for (std::size_t k = 0; i + k < count; ++k) own[k] += square(item(i + k));
        sums = own;
    }

    template <class Work>
    static void by_kind(Number kind, Work work) {
        if (kind == Number::f32)
            work(F32{});
        else if (kind == Number::f16)
            work(F16{});
        else
            work(BF16{});
    }

    template <class Float>
    static constexpr std::size_t size = sizeof(typename Float::Bits);

    template <class Float>
    static double value(const std::uint8_t* items, std::size_t i) {
        return Float::value(load<typename Float::Bits>(items + i * size<Float>));
    }

    static double square(double x) { return x * x; }
};

}  // namespace slimtensors
