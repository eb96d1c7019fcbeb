// Choice of a model: labels of rows and columns, and the distribution in each context.
#include <algorithm>
#include <bit>
#include <cmath>

#include "core/check.h"
#include "core/logarithms.h"
#include "residual/expected.h"
#include "residual/expected_model.h"
#include "residual/ordered.h"
#include "trellis/side.h"

namespace slimtensors::residual {
namespace {

constexpr std::size_t max_sample = std::size_t{1} << 19, piece = 4096;  // items
constexpr std::uint64_t min_items = 24;                                 // per table
constexpr std::array<std::uint8_t, 6> shapes{12, 16, 22, 28, 34, 42};
constexpr int zero_row = 0, zero_column = -400;  // labels where nothing changes

// Sizes of changes: exact below 32, then 16 per octave.
constexpr std::size_t exact = 32, size_bins = exact + 16 * 28;
std::size_t bin_of(std::uint64_t size) {
    if (size < exact) return size;
    const auto width = static_cast<unsigned>(std::bit_width(size));
    return exact + 16 * (width - 6) + (size >> (width - 5) & 15);
}
std::uint64_t size_of(std::size_t bin) {
    if (bin < exact) return bin;
    return (16 + (bin - exact) % 16) << ((bin - exact) / 16 + 1);
}

// What was observed in a context.
struct Counts {
    std::uint64_t items = 0;
    std::array<std::uint32_t, size_bins> sizes{};
    std::array<std::array<std::uint32_t, max_symbol + 1>, 2> fresh{};  // by sign and symbol; 0: escape

    void add(const Counts& other) {
        items += other.items;
        for (std::size_t i = 0; i < size_bins; ++i) sizes[i] += other.sizes[i];
        for (std::size_t side = 0; side < 2; ++side)
            for (std::size_t j = 0; j <= max_symbol; ++j) fresh[side][j] += other.fresh[side][j];
    }
};

template <class Float>
float finite_difference(const std::uint8_t* item, const std::uint8_t* base) {
    using Bits = typename Float::Bits;
    const float change = Float::value(load<Bits>(item)) - Float::value(load<Bits>(base));
    return std::isfinite(change) ? change : 0.0f;
}

// round(4 log2(sqrt(x)))
int label_of(double x) {
    int exponent;
    const double fraction = std::frexp(x, &exponent);
    return 2 * exponent - (fraction >= 0.8408964152537145 ? 0 : fraction >= 0.5946035575013605 ? 1 : 2);
}

struct Labels {
    std::vector<std::int16_t> rows, columns;
};

template <class Float>
Labels measure_labels(Bytes items, Bytes base, std::size_t width, int bias, bool flat) {
    constexpr std::size_t itemsize = sizeof(typename Float::Bits);
    const std::size_t count = items.size() / itemsize, rows = ceil_div(count, width);
    std::vector<double> columns(width);
    Labels labels{std::vector<std::int16_t>(rows), std::vector<std::int16_t>(width)};
    double total = 0;
    for (std::size_t r = 0; r < rows; ++r) {
        const std::size_t length = std::min(width, count - r * width);
        double sum = 0;
        for (std::size_t j = 0; j < length; ++j) {
            const std::size_t at = (r * width + j) * itemsize;
            const double change = finite_difference<Float>(items.data() + at, base.data() + at);
            sum += change * change;
            columns[j] += change * change;
        }
        const double mean = sum / static_cast<double>(length);
        labels.rows[r] =
            static_cast<std::int16_t>(mean > 0 ? std::max(label_of(mean) + 4 * bias, zero_row) : zero_row);
        total += sum;
    }
    const double mean = total / static_cast<double>(count);
    if (flat || mean == 0) {
        const int label = mean > 0 ? label_of(mean) + 4 * bias : zero_row;
        std::ranges::fill(labels.rows, static_cast<std::int16_t>(std::max(label, zero_row)));
        return labels;
    }
    for (std::size_t j = 0; j < width; ++j) {
        const double share = columns[j] / static_cast<double>(rows) / mean;
        labels.columns[j] =
            static_cast<std::int16_t>(share > 0 ? std::max(label_of(share), zero_column) : zero_column);
    }
    return labels;
}

int context_of(std::uint32_t magnitude, unsigned mantissa, int sum) {
    const int exponent = static_cast<int>(magnitude >> mantissa);
    return std::clamp((sum >> 1) - 2 * std::max(exponent, 1) + context_zero, 0, contexts - 1);
}

template <class Word>
std::vector<Counts> count_changes(Bytes items, Bytes base, unsigned mantissa, std::size_t width,
                                  const Labels& labels) {
    std::vector<Counts> counts(contexts);
    const std::size_t count = items.size() / sizeof(Word);
    // Evenly spaced pieces if there are many items.
    const std::size_t stride = piece * std::max<std::size_t>(count / max_sample, 1);
    for (std::size_t begin = 0; begin < count; begin += stride) {
        std::size_t row = begin / width, column = begin % width;
        for (std::size_t i = begin; i < std::min(begin + piece, count); ++i) {
            const Word from = load<Word>(base.data() + i * sizeof(Word));
            const Word to = load<Word>(items.data() + i * sizeof(Word));
            const Word magnitude = from & Word(~sign_bit<Word>), size = to & Word(~sign_bit<Word>);
            const int sum = labels.rows[row] + labels.columns[column];
            const int context = context_of(magnitude, mantissa, sum);
            Counts& found = counts[static_cast<std::size_t>(context)];
            ++found.items;
            const std::int64_t steps = steps_outward(from, to);
            ++found.sizes[bin_of(static_cast<std::uint64_t>(steps < 0 ? -steps : steps))];
            if (context >= fresh_context) {
                const std::int64_t origin = std::int64_t{std::max((sum >> 2) - fresh_octaves, 0)} << mantissa;
                const std::int64_t above = std::int64_t{size} - origin;
                const std::int64_t j = above >> (mantissa - 2);
                const bool same = ((from ^ to) & sign_bit<Word>) == 0;
                ++found.fresh[same][above < 0 || j >= max_symbol ? 0 : static_cast<std::size_t>(j) + 1];
            }
            if (++column == width) column = 0, ++row;
        }
    }
    return counts;
}

// Bits that the items of a context take, in 1/4096.
std::int64_t cost_of(const Counts& counts, const ContextTable& table, bool fresh, unsigned item_bits) {
    const auto bits_of = [&](std::uint16_t frequency) {
        return frequency == 0 ? static_cast<std::int64_t>(frequency_bits + item_bits) * octave
                              : static_cast<std::int64_t>(frequency_bits + table.low_bits) * octave -
                                    fixed_log2(frequency);
    };
    std::int64_t cost = 0;
    if (fresh) {
        for (std::size_t side = 0; side < 2; ++side)
            for (std::size_t j = 0; j <= max_symbol; ++j) {
                if (counts.fresh[side][j] == 0) continue;
                const std::size_t symbol = side ? symbol_zero + j : symbol_zero - j;
                cost +=
                    counts.fresh[side][j] * bits_of(j == 0 ? std::uint16_t{0} : table.frequencies[symbol]);
            }
        return cost;
    }
    for (std::size_t bin = 0; bin < size_bins; ++bin) {
        if (counts.sizes[bin] == 0) continue;
        const std::uint64_t k = size_of(bin) >> table.low_bits;
        cost += counts.sizes[bin] *
                bits_of(k > max_symbol ? std::uint16_t{0} : table.frequencies[symbol_zero + k]);
    }
    return cost;
}

// 8 log2(a / b), rounded, limited to the range of parameters.
std::int8_t log_odds(std::uint64_t a, std::uint64_t b) {
    const auto logarithm = [](std::uint64_t n) {
        const int shift = std::max(static_cast<int>(std::bit_width(n)) - 11, 0);
        return fixed_log2(static_cast<std::int64_t>(n >> shift)) + shift * octave;
    };
    if (b == 0) return 127;
    if (a == 0) return -128;
    const int difference = logarithm(a) - logarithm(b);
    return static_cast<std::int8_t>(std::clamp((difference + octave / 16) >> 9, -128, 127));
}

struct Fit {
    ContextParameters parameters;
    std::int64_t cost;
};

Fit fit_scale(const Counts& counts, int context, unsigned shape, unsigned mantissa, unsigned item_bits) {
    const bool fresh = context >= fresh_context;
    ContextParameters parameters{};
    if (fresh) {
        std::array<std::uint64_t, 2> sides{};
        for (std::size_t side = 0; side < 2; ++side)
            for (std::size_t j = 1; j <= max_symbol; ++j) sides[side] += counts.fresh[side][j];
        parameters.zero = log_odds(sides[1], sides[0]);
    } else {
        parameters.zero = log_odds(counts.sizes[0], counts.items - counts.sizes[0]);
    }
    Fit best{parameters, std::int64_t{1} << 62};
    const auto attempt = [&](int scale) {
        if (scale < -128 || scale > 127) return;
        parameters.scale = static_cast<std::int8_t>(scale);
        const std::int64_t cost =
            cost_of(counts, make_context_table(context, shape, parameters, mantissa), fresh, item_bits);
        if (cost < best.cost) best = {parameters, cost};
    };
    for (int scale = -48; scale <= 40; scale += 8) attempt(scale);
    for (const int step : {4, 2, 1})
        for (const int sign : {-1, 1}) attempt(best.parameters.scale + sign * step);
    return best;
}

struct Choice {
    ExpectedParameters parameters;
    double bits;
};

Choice fit_tables(const std::vector<Counts>& counts, Labels labels, std::size_t width, unsigned mantissa,
                  unsigned item_bits, std::size_t items) {
    // Contexts with few items share the table of the next lower one.
    std::vector<std::pair<int, Counts>> merged;
    std::uint64_t total = 0;
    for (int c = 0; c < contexts; ++c) {
        const Counts& here = counts[static_cast<std::size_t>(c)];
        if (here.items == 0) continue;
        total += here.items;
        const bool starts_fresh =
            c >= fresh_context && !merged.empty() && merged.back().first < fresh_context;
        if (merged.empty() || starts_fresh || merged.back().second.items >= min_items)
            merged.emplace_back(c, here);
        else
            merged.back().second.add(here);
    }
    Choice choice{{width, 0, shapes[0], {}, std::move(labels.rows), std::move(labels.columns)}, 0};
    std::vector<std::size_t> largest(merged.size());
    for (std::size_t i = 0; i < largest.size(); ++i) largest[i] = i;
    std::ranges::stable_sort(largest, std::greater{}, [&](std::size_t i) { return merged[i].second.items; });
    largest.resize(std::min<std::size_t>(largest.size(), 3));
    std::int64_t least = std::int64_t{1} << 62;
    for (const std::uint8_t shape : shapes) {
        std::int64_t cost = 0;
        for (const std::size_t i : largest)
            cost += fit_scale(merged[i].second, merged[i].first, shape, mantissa, item_bits).cost;
        if (cost < least) least = cost, choice.parameters.shape = shape;
    }
    std::int64_t cost = 0;
    for (const auto& [context, found] : merged) {
        const Fit fit = fit_scale(found, context, choice.parameters.shape, mantissa, item_bits);
        choice.parameters.used |= std::uint64_t{1} << context;
        choice.parameters.tables[static_cast<std::size_t>(context)] = fit.parameters;
        cost += fit.cost;
    }
    choice.bits =
        static_cast<double>(cost) / octave / static_cast<double>(total) * static_cast<double>(items);
    for (const auto* list : {&choice.parameters.rows, &choice.parameters.columns})
        choice.bits += 8.0 * static_cast<double>(trellis::pack_vector(*list).size());
    return choice;
}

template <class Float>
Choice fit(Bytes items, Bytes base, FloatType type, std::size_t width, bool flat) {
    using Word = typename Float::Bits;
    const unsigned mantissa = layout_of(type).mantissa;
    const int bias = (1 << (8 * sizeof(Word) - 2 - mantissa)) - 1;
    Labels labels = measure_labels<Float>(items, base, width, bias, flat);
    const std::vector<Counts> counts = count_changes<Word>(items, base, mantissa, width, labels);
    return fit_tables(counts, std::move(labels), width, mantissa, 8 * sizeof(Word),
                      items.size() / sizeof(Word));
}

}  // namespace

std::vector<std::uint8_t> expected_fit(Bytes items, Bytes base, FloatType type, std::size_t width) {
    const std::size_t itemsize = layout_of(type).itemsize, count = items.size() / itemsize;
    check(items.size() == base.size() && items.size() % itemsize == 0 && count > 0, "arrays differ in size");
    check(width >= 1 && width <= count, "width of rows is out of range");
    const auto run = [&](bool flat) {
        return type == FloatType::f32   ? fit<F32>(items, base, type, width, flat)
               : type == FloatType::f16 ? fit<F16>(items, base, type, width, flat)
                                        : fit<BF16>(items, base, type, width, flat);
    };
    const Choice plain = run(true);
    if (width == count) return write_expected(plain.parameters);
    const Choice labelled = run(false);
    return write_expected((labelled.bits < plain.bits ? labelled : plain).parameters);
}

}  // namespace slimtensors::residual
