#include "trellis/model.h"

#include <algorithm>

#include "core/check.h"
#include "core/logarithms.h"

namespace slimtensors::trellis {
namespace {

constexpr std::int64_t max_steps = 2 * ((std::int64_t{symbol_zero} << max_low_bits) + 1);
static_assert(max_steps <= max_log2);

struct Density {
    const Parameters& parameters;
    std::int64_t scale;  // log2 of the scale, in steps
    unsigned odd;

    // The weight of integer k, at most 2^30 times a power of two for the corrections.
    std::int64_t operator()(std::int64_t k) const {
        const std::int64_t distance = std::abs(steps_of(k, odd));
        std::int64_t cost = 0;
        if (distance != 0) {
            const std::int64_t t = (fixed_log2(distance) - scale) * parameters.shape / 16;
            cost = fixed_power(t);
        }
        if (k == 0) cost -= parameters.zero[odd] * (octave / 16);
        if (k == 1 || k == -1) cost -= parameters.one[odd] * (octave / 16);
        cost += 8 * octave;  // corrections add up to 8 bits at most
        const std::int64_t whole = cost >> 12;
        return whole > 40 ? 0 : fixed_fraction(cost & (octave - 1)) << 8 >> whole;
    }
};

}  // namespace

Parameters read_parameters(Bytes bytes) {
    check(bytes.size() >= parameter_bytes, "parameters are truncated");
    std::array<std::int8_t, parameter_bytes> p;
    std::memcpy(p.data(), bytes.data(), parameter_bytes);
    const Parameters parameters{p[0], p[1], {p[2], p[3]}, {p[4], p[5]}, p[6], p[7]};
    check(parameters.shape > 0, "shape of the distribution must be positive");
    check(parameters.row_fineness >= 0 && parameters.row_fineness <= max_fineness,
          "fineness of row steps is out of range");
    check(parameters.reserved == 0, "unknown parameters");
    return parameters;
}

Table make_table(const Parameters& parameters, int weight_class, unsigned odd) {
    const std::int64_t scale = (weight_class - 12) * (octave / 4) + parameters.scale * (octave / 16);
    const Density density{parameters, scale, odd};
    Table table;
    // Two low bits fewer than the scale has; the last table has symbols for 4.5 standard deviations.
    table.low_bits =
        static_cast<int>(std::clamp<std::int64_t>((scale - 13 * octave / 4) >> 12, 0, max_low_bits));
    std::array<std::int64_t, symbols> weights{};
    std::int64_t total = 0;
    for (int symbol = 1; symbol < symbols; ++symbol) {
        const std::int64_t first = static_cast<std::int64_t>(symbol - symbol_zero) * (1 << table.low_bits);
        for (std::int64_t k = first; k < first + (1 << table.low_bits); ++k)
            weights[static_cast<std::size_t>(symbol)] += density(k);
        total += weights[static_cast<std::size_t>(symbol)];
    }
    // Every symbol that may occur has a frequency; the largest one takes what rounding leaves.
    const std::int64_t available = frequency_unit - 1;
    std::int64_t rest = available;
    table.frequencies[escape] = 1;
    for (std::size_t s = 1; s < symbols; ++s) {
        const std::int64_t share = (weights[s] * available + total / 2) / total;
        // Symbols below a quarter of the unit are left to the escape.
        table.frequencies[s] =
            static_cast<std::uint16_t>(share == 0 && weights[s] * 4 * available >= total ? 1 : share);
        rest -= table.frequencies[s];
    }
    const auto largest = std::max_element(table.frequencies.begin() + 1, table.frequencies.end());
    *largest = static_cast<std::uint16_t>(*largest + rest);
    return table;
}

ClassRange find_classes(std::span<const std::int16_t> rows, std::span<const std::int16_t> columns) {
    if (rows.empty() || columns.empty()) return {0, 0};
    const auto [row_min, row_max] = std::minmax_element(rows.begin(), rows.end());
    const auto [column_min, column_max] = std::minmax_element(columns.begin(), columns.end());
    return {limit_class(*row_min + *column_min), limit_class(*row_max + *column_max)};
}

Tables::Tables(const Parameters& parameters, ClassRange range) : first_(range.first) {
    for (int c = range.first; c <= range.last; ++c)
        for (const unsigned odd : {0u, 1u}) tables_.push_back(make_table(parameters, c, odd));
}

}  // namespace slimtensors::trellis
