#include "residual/expected_model.h"

#include <algorithm>
#include <bit>

#include "core/check.h"
#include "core/logarithms.h"
#include "trellis/side.h"

namespace slimtensors::residual {
namespace {

constexpr std::int64_t one = std::int64_t{1} << 30;
constexpr std::size_t head_bytes = 4 + 8 + 1;

// 2^(-cost / 4096), in units of 2^-40.
std::int64_t weight_of(std::int64_t cost) {
    const std::int64_t whole = cost >> 12;
    return whole > 40 ? 0 : fixed_fraction(cost & (octave - 1)) << 10 >> whole;
}

// The share of `total` that odds of 2^(code / 8) to one give, at least 1 and less than `total`.
std::int64_t share_of(int code, std::int64_t total) {
    const std::int64_t cost = std::int64_t{code < 0 ? -code : code} * (octave / 8);
    const std::int64_t rarer = cost >> 12 > 30 ? 0 : fixed_fraction(cost & (octave - 1)) >> (cost >> 12);
    const std::int64_t small = (total * rarer + (one + rarer) / 2) / (one + rarer);
    return std::clamp<std::int64_t>(code < 0 ? small : total - small, 1, total - 1);
}

using Weights = std::array<std::int64_t, symbols>;

// Give the symbols from `first` to `last` frequencies in proportion to their weights, `total` together.
void share_out(const Weights& weights, int first, int last, std::int64_t total,
               std::array<std::uint16_t, symbols>& frequencies) {
    std::int64_t sum = 0;
    for (int s = first; s <= last; ++s) sum += weights[static_cast<std::size_t>(s)];
    for (int s = first; s <= last && sum > 0; ++s) {
        const std::int64_t weight = weights[static_cast<std::size_t>(s)];
        const std::int64_t share = (weight * total + sum / 2) / sum;
        // Symbols below a quarter of the unit are left to the escape.
        if (share != 0 || weight * 4 * total >= sum)
            frequencies[static_cast<std::size_t>(s)] =
                static_cast<std::uint16_t>(std::max<std::int64_t>(share, 1));
    }
}

}  // namespace

ContextTable make_context_table(int context, unsigned shape, ContextParameters parameters,
                                unsigned mantissa) {
    const auto cost_of = [&](std::int64_t distance) {
        return fixed_power(distance * static_cast<std::int64_t>(shape) / 16);
    };
    const std::int64_t available = frequency_unit - 1;
    ContextTable table{0, {}};
    Weights weights{};
    const auto set = [&](int k, std::int64_t weight) {
        weights[static_cast<std::size_t>(symbol_zero + k)] = weight;
    };
    table.frequencies[escape] = 1;
    if (context >= fresh_context) {
        table.low_bits = mantissa - 2;
        for (int j = 0; j < max_symbol; ++j) {
            const std::int64_t place = fixed_log2(9 + 2 * (j & 3)) + ((j >> 2) - 3 - fresh_octaves) * octave;
            const std::int64_t weight = weight_of(cost_of(place - parameters.scale * (octave / 8)));
            set(j + 1, weight >> (7 - (j >> 2)));
            set(-j - 1, weight >> (7 - (j >> 2)));
        }
        const std::int64_t same = share_of(parameters.zero, available);
        share_out(weights, 1, symbol_zero - 1, available - same, table.frequencies);
        share_out(weights, symbol_zero + 1, symbols - 1, same, table.frequencies);
    } else {
        const std::int64_t scale = (context - context_zero + 2 * static_cast<int>(mantissa)) * (octave / 2) +
                                   parameters.scale * (octave / 8);
        table.low_bits = static_cast<unsigned>(std::clamp<std::int64_t>((scale >> 12) - 2, 0, mantissa - 2));
        for (int k = -max_symbol; k <= max_symbol; ++k) {
            // The middle of the numbers of a symbol.
            const std::int64_t middle = table.low_bits == 0
                                            ? fixed_log2(k < 0 ? -k : k)
                                            : fixed_log2(2 * k + 1 < 0 ? -2 * k - 1 : 2 * k + 1) +
                                                  (static_cast<std::int64_t>(table.low_bits) - 1) * octave;
            set(k, weight_of(cost_of(middle - scale)));
        }
        std::int64_t rest = available;
        if (table.low_bits == 0) {
            const std::int64_t unchanged = share_of(parameters.zero, available);
            table.frequencies[symbol_zero] = static_cast<std::uint16_t>(unchanged);
            weights[symbol_zero] = 0;
            rest -= unchanged;
            std::array<std::uint16_t, symbols> others{};
            share_out(weights, 1, symbols - 1, rest, others);
            for (std::size_t s = 1; s < symbols; ++s)
                if (s != symbol_zero) table.frequencies[s] = others[s];
        } else {
            share_out(weights, 1, symbols - 1, rest, table.frequencies);
        }
    }
    // The largest frequency takes what rounding leaves.
    std::int64_t sum = 0;
    for (const std::uint16_t frequency : table.frequencies) sum += frequency;
    const auto largest = std::max_element(table.frequencies.begin() + 1, table.frequencies.end());
    const std::int64_t corrected = *largest + static_cast<std::int64_t>(frequency_unit) - sum;
    check(corrected >= 1 && corrected < static_cast<std::int64_t>(frequency_unit),
          "distribution of changes is out of range");
    *largest = static_cast<std::uint16_t>(corrected);
    return table;
}

std::vector<std::uint8_t> write_expected(const ExpectedParameters& parameters) {
    std::vector<std::uint8_t> out(head_bytes);
    store(out.data(), static_cast<std::uint32_t>(parameters.width));
    store(out.data() + 4, parameters.used);
    out[12] = parameters.shape;
    for (std::size_t c = 0; c < contexts; ++c) {
        if ((parameters.used >> c & 1) == 0) continue;
        out.push_back(static_cast<std::uint8_t>(parameters.tables[c].zero));
        out.push_back(static_cast<std::uint8_t>(parameters.tables[c].scale));
    }
    for (const auto* labels : {&parameters.rows, &parameters.columns}) {
        const std::vector<std::uint8_t> packed = trellis::pack_vector(*labels);
        out.insert(out.end(), packed.begin(), packed.end());
    }
    return out;
}

ExpectedParameters read_expected(Bytes model, std::size_t items) {
    check(model.size() >= head_bytes, "model of changes is truncated");
    ExpectedParameters parameters{
        load<std::uint32_t>(model.data()), load<std::uint64_t>(model.data() + 4), model[12], {}, {}, {}};
    check(parameters.width >= 1 && parameters.width <= items, "width of rows is out of range");
    check(parameters.used != 0 && parameters.shape != 0, "model of changes is malformed");
    std::size_t at = head_bytes;
    check(model.size() - at >= 2 * static_cast<std::size_t>(std::popcount(parameters.used)),
          "model of changes is truncated");
    for (std::size_t c = 0; c < contexts; ++c) {
        if ((parameters.used >> c & 1) == 0) continue;
        parameters.tables[c] = {static_cast<std::int8_t>(model[at]), static_cast<std::int8_t>(model[at + 1])};
        at += 2;
    }
    parameters.rows.resize(ceil_div(items, parameters.width));
    parameters.columns.resize(parameters.width);
    for (auto* labels : {&parameters.rows, &parameters.columns})
        at += trellis::unpack_vector(model.subspan(at), *labels);
    check(at == model.size(), "model of changes is too long");
    return parameters;
}

}  // namespace slimtensors::residual
