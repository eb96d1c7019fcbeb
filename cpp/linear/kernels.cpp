// The inner loops of products, compiled once for each instruction set, which says what a vector is and how it
// reads codes.
#pragma once
#include "core/floats.h"
#include "linear/kernels.h"

namespace slimtensors {

template <class Set>
struct ProductLoops {
    using Vector = typename Set::Vector;
    static constexpr std::size_t width = Set::width;

    // One code as a number, before it is scaled. The first argument tells the kind of code.
    static float number(const typename Set::Ints&, const std::uint8_t* codes, std::size_t i,
                        std::int32_t zero) {
        return static_cast<float>(static_cast<std::int8_t>(codes[i]) - zero);
    }
    static float number(const typename Set::Nibbles&, const std::uint8_t* codes, std::size_t i,
                        std::int32_t zero) {
        return static_cast<float>((codes[i / 2] >> 4 * (i % 2) & 15) - zero);
    }
    static float number(const typename Set::Fp8&, const std::uint8_t* codes, std::size_t i, std::int32_t) {
        return E4M3::value(codes[i]);
    }

    template <class Kind>
    static void decode(const std::uint8_t* codes, const RowScales& row, std::size_t begin, std::size_t end,
                       float* floats) {
        constexpr std::size_t step = Kind::vectors * width;
        each_block(row, begin, end, [=](std::size_t i, std::size_t stop, std::size_t block) {
            const float scale = row.scales[block];
            const std::int32_t zero = row.zeros[block];
            const Kind kind(scale, zero);
            const auto one = [&](std::size_t at) {
                const std::size_t place = Kind::vectors == 2 ? sorted(at - begin, width) : at - begin;
                floats[place] = number(kind, codes, at, zero) * scale;
            };
            for (; Kind::vectors == 2 && i < stop && i % step != 0; ++i) one(i);
            for (; i + step <= stop; i += step) {
                Vector weights[Kind::vectors];
                kind.read(codes + i / Kind::vectors, weights);
                for (std::size_t v = 0; v < Kind::vectors; ++v)
                    Set::store(floats + (i - begin) + v * width, weights[v]);
            }
            for (; i < stop; ++i) one(i);
        });
    }

    template <class Run>
    static void each_block(const RowScales& row, std::size_t begin, std::size_t end, Run run) {
        for (std::size_t i = begin, stop = 0; i < end; i = stop) {
            const std::size_t block = i / row.block;
            stop = (block + 1) * row.block < end ? (block + 1) * row.block : end;
            run(i, stop, block);
        }
    }

    // The sums of products of each row and each input, which the compiler keeps in registers.
    template <unsigned inputs>
    struct Sums {
        Vector of[rows_at_once][inputs];

        Sums() {
            for (auto& row : of)
                for (Vector& sum : row) sum = Set::zero();
        }
        void add(unsigned row, Vector weights, const Vector* x) {
            for (unsigned n = 0; n < inputs; ++n) of[row][n] = Set::multiply_add(weights, x[n], of[row][n]);
        }
        void add_to(float* sums) const {
            for (unsigned r = 0; r < rows_at_once; ++r)
                for (unsigned n = 0; n < inputs; ++n) sums[n * rows_at_once + r] += Set::sum(of[r][n]);
        }
    };

    template <unsigned inputs>
    static void load(const float* given, std::size_t stride, Vector* x) {
        for (unsigned n = 0; n < inputs; ++n) x[n] = Set::load(given + n * stride);
    }

    template <unsigned inputs>
    static void multiply(const float* rows, const float* given, std::size_t stride, std::size_t length,
                         float* sums) {
        Sums<inputs> total;
        for (std::size_t i = 0; i < length; i += width) {
            Vector x[inputs];
            load<inputs>(given + i, stride, x);
            for (unsigned r = 0; r < rows_at_once; ++r) total.add(r, Set::load(rows + r * apart + i), x);
        }
        total.add_to(sums);
    }

    // Ask for as many codes of the next rows as one step reads of these: rows are too short for the processor
    // to see by itself what comes next.
    static void fetch(const std::uint8_t* codes) {
        for (std::size_t i = 0; i < rows_at_once * width; i += 64) __builtin_prefetch(codes + i);
    }

    template <class Kind, unsigned inputs>
    static void multiply_codes(const std::uint8_t* codes, std::size_t row_bytes, const RowScales& rows,
                               std::size_t across, std::size_t begin, std::size_t end, const float* given,
                               std::size_t stride, float* sums) {
        constexpr std::size_t step = Kind::vectors * width;
        Sums<inputs> total;
        each_block(rows, begin, end, [&](std::size_t i, std::size_t stop, std::size_t block) {
            const auto kind = [&](std::size_t r) {
                return Kind(rows.scales[r * across + block], rows.zeros[r * across + block]);
            };
            const Kind kinds[] = {kind(0), kind(1), kind(2), kind(3), kind(4), kind(5)};
            static_assert(std::size(kinds) == rows_at_once);
            for (; i < stop; i += step) {
                fetch(codes + rows_at_once * (row_bytes + i / Kind::vectors));
                Vector x[Kind::vectors][inputs];
                for (std::size_t v = 0; v < Kind::vectors; ++v)
                    load<inputs>(given + (i - begin) + v * width, stride, x[v]);
                for (unsigned r = 0; r < rows_at_once; ++r) {
                    Vector weights[Kind::vectors];
                    kinds[r].read(codes + r * row_bytes + i / Kind::vectors, weights);
                    for (std::size_t v = 0; v < Kind::vectors; ++v) total.add(r, weights[v], x[v]);
                }
            }
        });
        total.add_to(sums);
    }

    template <class Kind>
    static constexpr CodeKernels of_codes() {
        return {decode<Kind>,
                {nullptr, multiply_codes<Kind, 1>, multiply_codes<Kind, 2>, multiply_codes<Kind, 3>,
                 multiply_codes<Kind, 4>}};
    }

    static constexpr ProductKernels kernels() {
        static_assert(one_piece % whole == 0 && whole % (2 * width) == 0);
        return {of_codes<typename Set::Ints>(),
                of_codes<typename Set::Nibbles>(),
                of_codes<typename Set::Fp8>(),
                width,
                Set::inputs_at_once,
                {nullptr, multiply<1>, multiply<2>, multiply<3>, multiply<4>}};
    }
};

}  // namespace slimtensors
