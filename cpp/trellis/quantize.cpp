#include "trellis/quantize.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/check.h"
#include "trellis/quantize_kernels.h"

namespace slimtensors::trellis {
namespace {

constexpr std::size_t batch = 32;  // columns whose errors are subtracted from later ones at once

const QuantizeKernels& active_quantize_kernels() {
    static constexpr KernelTable<QuantizeKernels> table{.plain = &plain::quantize_kernels,
                                                        .avx2 = SLIM_X86(&avx2::quantize_kernels)};
    return table.active();
}

std::vector<Prices> make_prices(const Tables& tables) {
    std::vector<Prices> prices;
    for (const Table& table : tables.all()) {
        Prices& each = prices.emplace_back();
        each.low_bits = table.low_bits;
        for (std::size_t s = 0; s < symbols; ++s)
            each.bits[s] =
                table.frequencies[s] == 0
                    ? frequency_bits + 32
                    : static_cast<float>(frequency_bits - std::log2(table.frequencies[s]) + table.low_bits);
    }
    return prices;
}

// The columns of a chunk, transposed, in the order in which they are rounded.
struct Columns {
    std::size_t rows;
    std::vector<float> values;

    float* at(std::size_t position) { return values.data() + position * rows; }
};

}  // namespace

void quantize_chunk(const Tables& tables, const Layout& layout, std::span<const float> weights,
                    const Feedback& feedback, float price_of_bit, bool keep_zeros,
                    std::span<std::int32_t> integers) {
    const std::size_t rows = layout.row_classes.size(), columns = layout.column_classes.size();
    check(weights.size() == rows * columns && integers.size() == weights.size(),
          "weights have the wrong size");
    const bool compensates = !feedback.factor.empty();
    check(!compensates || feedback.factor.size() == columns * columns, "factor has the wrong size");
    std::vector<std::uint32_t> order(feedback.order.begin(), feedback.order.end());
    if (order.empty()) {
        order.resize(columns);
        std::iota(order.begin(), order.end(), 0u);
    }
    std::vector<bool> seen(columns);
    check(order.size() == columns, "order has the wrong size");
    for (const std::uint32_t j : order) {
        check(j < columns && !seen[j], "order is not a permutation");
        seen[j] = true;
    }

    const QuantizeKernels& kernels = active_quantize_kernels();
    const std::vector<Prices> prices = make_prices(tables);
    const std::vector<float> row_steps = step_sizes(layout.row_steps, layout.parameters.row_fineness);
    const std::vector<float> column_steps = step_sizes(layout.column_steps, 0);
    Columns block{rows, std::vector<float>(rows * columns)};
    for (std::size_t p = 0; p < columns; ++p)
        for (std::size_t i = 0; i < rows; ++i) block.at(p)[i] = weights[i * columns + order[p]];
    std::vector<std::uint8_t> zero(keep_zeros ? rows : 0);
    std::vector<std::int32_t> chosen(rows);
    std::vector<float> factors(batch);
    for (std::size_t begin = 0; begin < columns; begin += batch) {
        const std::size_t end = std::min(begin + batch, columns);
        for (std::size_t p = begin; p < end; ++p) {
            const std::size_t j = order[p];
            for (std::size_t i = 0; i < zero.size(); ++i) zero[i] = weights[i * columns + j] == 0;
            const Column column{.even = prices.data(),
                                .row_classes = layout.row_classes.data(),
                                .first_class = tables.first(),
                                .column_class = layout.column_classes[j],
                                .row_steps = row_steps.data(),
                                .column_step = column_steps[j],
                                .price_of_bit = price_of_bit,
                                .zero = keep_zeros ? zero.data() : nullptr,
                                .rows = rows};
            kernels.quantize_column(column, block.at(p), chosen.data());
            for (std::size_t i = 0; i < rows; ++i) integers[i * columns + j] = chosen[i];
            if (!compensates) continue;
            const float* factor = feedback.factor.data() + p * columns;
            for (std::size_t i = 0; i < rows; ++i) block.at(p)[i] /= factor[p];
            for (std::size_t q = p + 1; q < end; ++q)
                kernels.subtract(block.at(p), rows, factor + q, 1, rows, block.at(q));
        }
        if (!compensates) continue;
        for (std::size_t q = end; q < columns; ++q) {
            for (std::size_t p = begin; p < end; ++p) factors[p - begin] = feedback.factor[p * columns + q];
            kernels.subtract(block.at(begin), rows, factors.data(), end - begin, rows, block.at(q));
        }
    }
}

void Counts::add(const Layout& layout, std::span<const std::int32_t> integers) {
    const std::size_t rows = layout.row_classes.size(), columns = layout.column_classes.size();
    check(integers.size() == rows * columns, "integers do not match the rows and columns");
    std::vector<std::uint8_t> state(columns);
    for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < columns; ++j) {
            const std::int32_t k = integers[i * columns + j];
            if (k >= -counted && k <= counted)
                ++at(limit_class(layout.row_classes[i] + layout.column_classes[j]), state[j] & 1, k);
            state[j] = next_state[state[j]][static_cast<unsigned>(k) & 1];
        }
}

double measure_bits(const Counts& counts, const Parameters& parameters) {
    double bits = 0;
    for (int c = 0; c < classes; ++c)
        for (const unsigned odd : {0u, 1u}) {
            std::array<std::uint64_t, symbols> numbers{};
            const Table* made = nullptr;
            Table table;
            for (int k = -counted; k <= counted; ++k) {
                const std::uint32_t count = counts.at(c, odd, k);
                if (count == 0) continue;
                if (!made) table = make_table(parameters, c, odd), made = &table;
                const int high = (k >> table.low_bits) + symbol_zero;
                const bool escaped =
                    high <= 0 || high >= symbols || table.frequencies[static_cast<std::size_t>(high)] == 0;
                numbers[escaped ? escape : static_cast<std::size_t>(high)] += count;
                if (!escaped) bits += static_cast<double>(count) * table.low_bits;
            }
            if (!made) continue;
            for (std::size_t s = 0; s < symbols; ++s)
                if (numbers[s] != 0)
                    bits +=
                        static_cast<double>(numbers[s]) * (frequency_bits - std::log2(table.frequencies[s]));
            bits += 32.0 * static_cast<double>(numbers[escape]);
        }
    return bits;
}

Parameters fit(const Counts& counts, const Parameters& start) {
    Parameters best = start;
    double least = measure_bits(counts, best);
    const std::array<std::int8_t Parameters::*, 2> fields{&Parameters::scale, &Parameters::shape};
    const auto attempt = [&](auto change) {
        for (const int sign : {1, -1}) {
            while (true) {
                Parameters next = best;
                if (!change(next, sign) || next.shape <= 0) break;
                const double bits = measure_bits(counts, next);
                if (!(bits < least)) break;
                best = next;
                least = bits;
            }
        }
    };
    const auto move = [](std::int8_t& value, int by) {
        const int moved = value + by;
        if (moved < -127 || moved > 127) return false;
        value = static_cast<std::int8_t>(moved);
        return true;
    };
    for (const int by : {8, 4, 2, 1, 1}) {
        for (const auto field : fields)
            attempt([&](Parameters& p, int sign) { return move(p.*field, sign * by); });
        for (const std::size_t odd : {std::size_t{0}, std::size_t{1}}) {
            attempt([&](Parameters& p, int sign) { return move(p.zero[odd], sign * by); });
            attempt([&](Parameters& p, int sign) { return move(p.one[odd], sign * by); });
        }
    }
    return best;
}

}  // namespace slimtensors::trellis
