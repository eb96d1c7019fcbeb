// Vectors in portable C++, which compilers vectorize.
#pragma once
#include "core/floats.h"
#include "linear/kernels.h"

namespace slimtensors::linear::SLIM_TARGET {
namespace {

struct Set {
    static constexpr std::size_t width = 8;
    static constexpr unsigned inputs_per_call = 1;
    struct Vector {
        float items[width];
    };

    template <class Item>
    static Vector generate(Item item) {
        Vector result;
        for (std::size_t k = 0; k < width; ++k) result.items[k] = item(k);
        return result;
    }

    static Vector zero() { return {}; }
    static Vector load(const float* at) {
        return generate([=](std::size_t k) { return at[k]; });
    }
    static void store(float* at, const Vector& v) { std::memcpy(at, v.items, sizeof v.items); }

    struct Scaled {
        float scale;
        std::int32_t zero;

        Scaled(float s, std::int32_t z) : scale(s), zero(z) {}
        float number(int code) const { return static_cast<float>(code - zero) * scale; }
    };

    struct Ints : Scaled {
        static constexpr std::size_t vectors = 1;
        using Scaled::Scaled;
        void read(const std::uint8_t* codes, Vector* weights) const {
            weights[0] =
                generate([=, this](std::size_t k) { return number(static_cast<std::int8_t>(codes[k])); });
        }
    };

    struct Nibbles : Scaled {
        static constexpr std::size_t vectors = 2;
        using Scaled::Scaled;
        void read(const std::uint8_t* codes, Vector* weights) const {
            weights[0] = generate([=, this](std::size_t k) { return number(codes[k] & 15); });
            weights[1] = generate([=, this](std::size_t k) { return number(codes[k] >> 4); });
        }
    };

    struct Fp8 {
        static constexpr std::size_t vectors = 1;
        float scale;

        Fp8(float s, std::int32_t) : scale(s) {}
        void read(const std::uint8_t* codes, Vector* weights) const {
            weights[0] = generate([=, this](std::size_t k) { return E4M3::value(codes[k]) * scale; });
        }
    };

    static Vector multiply_add(const Vector& a, const Vector& b, const Vector& sum) {
        return generate([&](std::size_t k) { return sum.items[k] + a.items[k] * b.items[k]; });
    }
    static float sum(const Vector& v) {
        const float* const x = v.items;
        return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
    }
};

}  // namespace
}  // namespace slimtensors::linear::SLIM_TARGET
