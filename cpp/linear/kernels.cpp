// The inner loops of products. The instruction set defines vectors and how they read codes.
#include "linear/kernels.h"

#if defined(__AVX512F__)
#include "linear/vector_avx512.h"
#elif defined(__AVX2__)
#include "linear/vector_avx2.h"
#else
#include "linear/vector_plain.h"
#endif

namespace slimtensors::linear::SLIM_TARGET {
namespace {

using Vector = Set::Vector;
constexpr std::size_t width = Set::width;

// Convert one code to a number before scaling. The first argument selects the kind of code.
float number(const Set::Ints&, const std::uint8_t* codes, std::size_t i, std::int32_t zero) {
    return static_cast<float>(static_cast<std::int8_t>(codes[i]) - zero);
}
float number(const Set::Nibbles&, const std::uint8_t* codes, std::size_t i, std::int32_t zero) {
    return static_cast<float>((codes[i / 2] >> 4 * (i % 2) & 15) - zero);
}
float number(const Set::Fp8&, const std::uint8_t* codes, std::size_t i, std::int32_t) {
    return E4M3::value(codes[i]);
}

template <class Run>
void for_each_block(const RowScales& row, std::size_t begin, std::size_t end, Run run) {
    for (std::size_t i = begin, stop = 0; i < end; i = stop) {
        const std::size_t block = i / row.block;
        stop = (block + 1) * row.block < end ? (block + 1) * row.block : end;
        run(i, stop, block);
    }
}

template <class Kind>
void decode(const std::uint8_t* codes, const RowScales& row, std::size_t begin, std::size_t end,
            float* floats) {
    constexpr std::size_t step = Kind::vectors * width;
    for_each_block(row, begin, end, [=](std::size_t i, std::size_t stop, std::size_t block) {
        const float scale = row.scales[block];
        const std::int32_t zero = row.zeros[block];
        const Kind kind(scale, zero);
        const auto decode_one = [&](std::size_t at) {
            const std::size_t place = Kind::vectors == 2 ? deinterleave(at - begin, width) : at - begin;
            floats[place] = number(kind, codes, at, zero) * scale;
        };
        for (; Kind::vectors == 2 && i < stop && i % step != 0; ++i) decode_one(i);
        for (; i + step <= stop; i += step) {
            Vector weights[Kind::vectors];
            kind.read(codes + i / Kind::vectors, weights);
            for (std::size_t v = 0; v < Kind::vectors; ++v)
                Set::store(floats + (i - begin) + v * width, weights[v]);
        }
        for (; i < stop; ++i) decode_one(i);
    });
}

// Sums of products of each row and each input, kept in registers.
template <unsigned inputs>
struct Sums {
    Vector of[panel_rows][inputs];

    Sums() {
        for (auto& row : of)
            for (Vector& sum : row) sum = Set::zero();
    }
    void add(unsigned row, Vector weights, const Vector* x) {
        for (unsigned n = 0; n < inputs; ++n) of[row][n] = Set::multiply_add(weights, x[n], of[row][n]);
    }
    void add_to(float* sums) const {
        for (unsigned r = 0; r < panel_rows; ++r)
            for (unsigned n = 0; n < inputs; ++n) sums[n * panel_rows + r] += Set::sum(of[r][n]);
    }
};

template <unsigned inputs>
void load(const float* input_data, std::size_t stride, Vector* x) {
    for (unsigned n = 0; n < inputs; ++n) x[n] = Set::load(input_data + n * stride);
}

template <unsigned inputs>
void multiply(const float* rows, const float* input_data, std::size_t stride, std::size_t length,
              float* sums) {
    Sums<inputs> total;
    for (std::size_t i = 0; i < length; i += width) {
        Vector x[inputs];
        load<inputs>(input_data + i, stride, x);
        for (unsigned r = 0; r < panel_rows; ++r) total.add(r, Set::load(rows + r * row_stride + i), x);
    }
    total.add_to(sums);
}

// Prefetch as many codes of the next rows as one step reads: rows are too short for the hardware prefetcher.
void prefetch(const std::uint8_t* codes) {
    for (std::size_t i = 0; i < panel_rows * width; i += 64) __builtin_prefetch(codes + i);
}

template <class Kind, unsigned inputs>
void multiply_codes(const std::uint8_t* codes, std::size_t row_bytes, const RowScales& rows,
                    std::size_t across, std::size_t begin, std::size_t end, const float* input_data,
                    std::size_t stride, float* sums) {
    constexpr std::size_t step = Kind::vectors * width;
    Sums<inputs> total;
    for_each_block(rows, begin, end, [&](std::size_t i, std::size_t stop, std::size_t block) {
        const auto kind = [&](std::size_t r) {
            return Kind(rows.scales[r * across + block], rows.zeros[r * across + block]);
        };
        const Kind kinds[] = {kind(0), kind(1), kind(2), kind(3), kind(4), kind(5)};
        static_assert(std::size(kinds) == panel_rows);
        for (; i < stop; i += step) {
            prefetch(codes + panel_rows * (row_bytes + i / Kind::vectors));
            Vector x[Kind::vectors][inputs];
            for (std::size_t v = 0; v < Kind::vectors; ++v)
                load<inputs>(input_data + (i - begin) + v * width, stride, x[v]);
            for (unsigned r = 0; r < panel_rows; ++r) {
                Vector weights[Kind::vectors];
                kinds[r].read(codes + r * row_bytes + i / Kind::vectors, weights);
                for (std::size_t v = 0; v < Kind::vectors; ++v) total.add(r, weights[v], x[v]);
            }
        }
    });
    total.add_to(sums);
}

template <class Kind>
constexpr CodeKernels code_kernels() {
    return {decode<Kind>,
            {nullptr, multiply_codes<Kind, 1>, multiply_codes<Kind, 2>, multiply_codes<Kind, 3>,
             multiply_codes<Kind, 4>}};
}

static_assert(piece_columns % column_multiple == 0 && column_multiple % (2 * width) == 0);

}  // namespace

constinit const Kernels kernels{
    code_kernels<Set::Ints>(), code_kernels<Set::Nibbles>(),
    code_kernels<Set::Fp8>(),  width,
    Set::inputs_per_call,      {nullptr, multiply<1>, multiply<2>, multiply<3>, multiply<4>}};

}  // namespace slimtensors::linear::SLIM_TARGET
