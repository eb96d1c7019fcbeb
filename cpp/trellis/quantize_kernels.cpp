#include "trellis/quantize_kernels.h"

#include <cmath>
#include <vector>

#include "core/check.h"

namespace slimtensors::trellis::SLIM_TARGET {
namespace {

using Costs = float __attribute__((vector_size(4 * states)));
using Marks = std::int32_t __attribute__((vector_size(4 * states)));

constexpr float escape_bits = frequency_bits + 32;
constexpr float max_quotient = 1 << 28;  // integers are coded with 32 bits at most

float bits_of(const Prices& prices, std::int32_t k) {
    const std::int32_t high = (k >> prices.low_bits) + symbol_zero;
    return high > 0 && high < symbols ? prices.bits[static_cast<std::size_t>(high)] : escape_bits;
}

// The best integers for the two parities in even states, then in odd states, and their costs.
struct Candidates {
    std::array<std::int32_t, 4> integers;
    std::array<float, 4> costs;
};

Candidates find_candidates(float x, const Prices* prices, float price_of_bit) {
    Candidates found;
    const float size = std::fabs(x);
    const std::int32_t sign = x < 0 ? -1 : 1;
    for (std::int32_t odd = 0; odd < 2; ++odd)
        for (std::int32_t parity = 0; parity < 2; ++parity) {
            const float nearest =
                ((size + static_cast<float>(odd)) * 0.5f - static_cast<float>(parity)) * 0.5f;
            std::int32_t k = 2 * static_cast<std::int32_t>(std::lrint(nearest)) + parity;
            if (k < parity) k = parity;
            const std::int32_t smaller = k >= 2 ? k - 2 : -parity;  // towards zero, or across it
            const auto cost = [&](std::int32_t magnitude) {
                const float error =
                    size - static_cast<float>(2 * magnitude - odd * ((magnitude > 0) - (magnitude < 0)));
                return error * error + price_of_bit * bits_of(prices[odd], sign * magnitude);
            };
            const float first = cost(k), second = cost(smaller);
            const auto at = static_cast<std::size_t>(2 * odd + parity);
            found.costs[at] = second < first ? second : first;
            found.integers[at] = sign * (second < first ? smaller : k);
        }
    return found;
}

// State t is reached from states t / 2 and t / 2 + 4, by integers of this parity and of the other one.
constexpr std::array<std::uint8_t, states> parity_from_lower{0, 1, 1, 0, 1, 0, 0, 1};

consteval bool transitions_match() {
    for (unsigned t = 0; t < states; ++t)
        if (next_state[t / 2][parity_from_lower[t]] != t ||
            next_state[t / 2 + 4][parity_from_lower[t] ^ 1] != t)
            return false;
    return true;
}
static_assert(transitions_match());

void quantize_column(const Column& column, float* weights, std::int32_t* integers) {
    static thread_local std::vector<Candidates> candidates;
    static thread_local std::vector<std::array<std::int32_t, states>> marks;
    candidates.resize(column.rows);
    marks.resize(column.rows);
    constexpr float unreachable = 1e30f;
    Costs cost = {0,           unreachable, unreachable, unreachable,
                  unreachable, unreachable, unreachable, unreachable};
    for (std::size_t i = 0; i < column.rows; ++i) {
        const int weight_class = limit_class(column.row_classes[i] + column.column_class);
        const Prices* prices = column.even + 2 * (weight_class - column.first_class);
        Candidates& found = candidates[i];
        if (column.zero && column.zero[i]) {
            found.integers = {0, 0, 0, 0};
            found.costs = {0, unreachable, 0, unreachable};
        } else {
            const float x = weights[i] / (column.row_steps[i] * column.column_step);
            check(std::fabs(x) < max_quotient, "weight is too large for its step");
            found = find_candidates(x, prices, column.price_of_bit);
        }
        const auto& c = found.costs;
        const Costs lower = Costs{c[0], c[1], c[3], c[2], c[1], c[0], c[2], c[3]} +
                            __builtin_shufflevector(cost, cost, 0, 0, 1, 1, 2, 2, 3, 3);
        const Costs upper = Costs{c[1], c[0], c[2], c[3], c[0], c[1], c[3], c[2]} +
                            __builtin_shufflevector(cost, cost, 4, 4, 5, 5, 6, 6, 7, 7);
        const Marks mark = upper < lower;
        cost = mark ? upper : lower;
        std::memcpy(marks[i].data(), &mark, sizeof mark);
        if (i % 16 == 15) {  // keep the costs small
            float least = cost[0];
            for (std::size_t s = 1; s < states; ++s) least = cost[s] < least ? cost[s] : least;
            cost -= least;
        }
    }
    std::size_t t = 0;
    for (std::size_t s = 1; s < states; ++s)
        if (cost[s] < cost[t]) t = s;
    for (std::size_t i = column.rows; i-- > 0;) {
        const unsigned from_upper = marks[i][t] != 0;
        const unsigned parity = parity_from_lower[t] ^ from_upper;
        t = t / 2 + 4 * from_upper;
        const std::int32_t k = candidates[i].integers[(t & 1) * 2 + parity];
        integers[i] = k;
        const auto steps = static_cast<float>(steps_of(k, static_cast<unsigned>(t)));
        weights[i] -= steps * column.row_steps[i] * column.column_step;
    }
}

void subtract(const float* errors, std::size_t stride, const float* factors, std::size_t count,
              std::size_t rows, float* __restrict later) {
    std::size_t j = 0;
    for (; j + 4 <= count; j += 4) {
        const float *e0 = errors + j * stride, *e1 = e0 + stride, *e2 = e1 + stride, *e3 = e2 + stride;
        const float f0 = factors[j], f1 = factors[j + 1], f2 = factors[j + 2], f3 = factors[j + 3];
        for (std::size_t i = 0; i < rows; ++i)
            later[i] -= (f0 * e0[i] + f1 * e1[i]) + (f2 * e2[i] + f3 * e3[i]);
    }
    for (; j < count; ++j) {
        const float* e = errors + j * stride;
        for (std::size_t i = 0; i < rows; ++i) later[i] -= factors[j] * e[i];
    }
}

}  // namespace

constinit const QuantizeKernels quantize_kernels{quantize_column, subtract};

}  // namespace slimtensors::trellis::SLIM_TARGET
