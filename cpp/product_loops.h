// The inner loops of products, compiled once for each instruction set, which says what a vector is.
#pragma once
#include "floats.h"
#include "product_kernels.h"

namespace slimtensors {

template <class Set>
struct ProductLoops {
    using Vector = typename Set::Vector;
    static constexpr std::size_t width = Set::width;

    static void ints(const std::uint8_t* codes, const RowScales& row, std::size_t begin, std::size_t end,
                     float* floats) {
        each_block(row, begin, end, [=](std::size_t i, std::size_t stop, float scale, std::int32_t zero) {
            for (; i + width <= stop; i += width)
                Set::store(floats + (i - begin), Set::ints(codes + i, scale, zero));
            for (; i < stop; ++i)
                floats[i - begin] = static_cast<float>(static_cast<std::int8_t>(codes[i]) - zero) * scale;
        });
    }

    static void fp8(const std::uint8_t* codes, const RowScales& row, std::size_t begin, std::size_t end,
                    float* floats) {
        each_block(row, begin, end, [=](std::size_t i, std::size_t stop, float scale, std::int32_t) {
            for (; i + width <= stop; i += width)
                Set::store(floats + (i - begin), Set::e4m3(codes + i, scale));
            for (; i < stop; ++i) floats[i - begin] = E4M3::value(codes[i]) * scale;
        });
    }

    static void nibbles(const std::uint8_t* codes, const RowScales& row, std::size_t begin, std::size_t end,
                        float* floats) {
        each_block(row, begin, end, [=](std::size_t i, std::size_t stop, float scale, std::int32_t zero) {
            const auto one = [=](std::size_t at) {
                const int code = codes[at / 2] >> 4 * (at % 2) & 15;
                floats[sorted(at - begin, width)] = static_cast<float>(code - zero) * scale;
            };
            for (; i < stop && i % (2 * width) != 0; ++i) one(i);
            for (; i + 2 * width <= stop; i += 2 * width)
                Set::nibbles(codes + i / 2, scale, zero, floats + (i - begin));
            for (; i < stop; ++i) one(i);
        });
    }

    template <class Run>
    static void each_block(const RowScales& row, std::size_t begin, std::size_t end, Run run) {
        for (std::size_t i = begin, stop = 0; i < end; i = stop) {
            const std::size_t b = i / row.block;
            stop = (b + 1) * row.block < end ? (b + 1) * row.block : end;
            run(i, stop, row.scales[b], row.zeros[b]);
        }
    }

    template <unsigned inputs>
    static void multiply(const float* rows, const float* given, std::size_t stride, std::size_t length,
                         float* sums) {
        Vector total[rows_at_once][inputs];
        for (auto& row : total)
            for (auto& sum : row) sum = Set::zero();
        for (std::size_t i = 0; i < length; i += Set::width) {
            Vector x[inputs];
            for (unsigned n = 0; n < inputs; ++n) x[n] = Set::load(given + n * stride + i);
            for (unsigned r = 0; r < rows_at_once; ++r) {
                const Vector weights = Set::load(rows + r * apart + i);
                for (unsigned n = 0; n < inputs; ++n)
                    total[r][n] = Set::multiply_add(weights, x[n], total[r][n]);
            }
        }
        for (unsigned r = 0; r < rows_at_once; ++r)
            for (unsigned n = 0; n < inputs; ++n) sums[n * rows_at_once + r] += Set::sum(total[r][n]);
    }

    static constexpr ProductKernels kernels() {
        static_assert(one_piece % whole == 0 && whole % (2 * width) == 0);
        return {ints,
                nibbles,
                fp8,
                width,
                Set::inputs_at_once,
                {nullptr, multiply<1>, multiply<2>, multiply<3>, multiply<4>}};
    }
};

}  // namespace slimtensors
