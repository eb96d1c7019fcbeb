// Finding a model. Nothing here is part of the format.
#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "bins/cells.h"
#include "bins/magnitudes.h"
#include "core/check.h"

namespace slimtensors::bins {
namespace {

constexpr double code_bits = 5;   // bits per frequency in a model
constexpr double row_cost = 500;  // bits for the frequencies of labels
constexpr std::size_t min_items_for_rows = 4096;
constexpr std::size_t sample_items = std::size_t{1} << 19;

double n_log_n(double n) { return n > 0 ? n * std::log2(n) : 0; }

using Counts = std::vector<std::uint64_t>;

// Return the bits of symbols with these counts, including their frequencies.
double total_bits(const Counts& counts) {
    double total = 0, bits = 0;
    for (const std::uint64_t n : counts)
        if (n != 0) {
            total += static_cast<double>(n);
            bits += code_bits - n_log_n(static_cast<double>(n));
        }
    return bits + n_log_n(total);
}

// Adjacent sums of labels share a table if their items are similar or few.
struct Merged {
    std::array<std::uint8_t, label_sums> table_of_sum;
    std::size_t tables;
    double bits;
};

Merged merge(std::vector<Counts> counts) {
    std::vector<std::size_t> first(counts.size());  // smallest sum of labels in each group
    std::vector<double> bits(counts.size());
    for (std::size_t g = 0; g < counts.size(); ++g) {
        first[g] = g;
        bits[g] = total_bits(counts[g]);
    }
    const auto joined = [&](std::size_t g) {
        Counts both = counts[g];
        for (std::size_t s = 0; s < both.size(); ++s) both[s] += counts[g + 1][s];
        return both;
    };
    std::vector<double> saved(counts.size() - 1);  // by joining each group with the next one
    const auto save = [&](std::size_t g) { saved[g] = bits[g] + bits[g + 1] - total_bits(joined(g)); };
    for (std::size_t g = 0; g < saved.size(); ++g) save(g);
    while (!saved.empty()) {
        const auto g = static_cast<std::size_t>(std::ranges::max_element(saved) - saved.begin());
        if (saved[g] < 0 && counts.size() <= max_tables) break;
        counts[g] = joined(g);
        bits[g] += bits[g + 1] - saved[g];
        const auto gone = static_cast<std::ptrdiff_t>(g + 1);
        counts.erase(counts.begin() + gone);
        bits.erase(bits.begin() + gone);
        first.erase(first.begin() + gone);
        saved.erase(saved.begin() + static_cast<std::ptrdiff_t>(g));
        if (g < saved.size()) save(g);
        if (g > 0) save(g - 1);
    }
    Merged merged{{}, counts.size(), 0};
    for (std::size_t g = 0; g < counts.size(); ++g) {
        merged.bits += bits[g];
        for (std::size_t sum = first[g]; sum < label_sums; ++sum)
            merged.table_of_sum[sum] = static_cast<std::uint8_t>(g);
    }
    return merged;
}

// Finds bins for items with these counts of cells: ranges are halved as long as this saves more bits than it
// costs. `cumulative_` are the counts before each cell, for each table.
class Halving {
  public:
    Halving(const Cells& cells, std::span<const Counts> counts, double table_cost)
        : cells_(cells), table_cost_(table_cost) {
        for (const Counts& one : counts) {
            cumulative_.emplace_back(1);
            for (const std::uint64_t n : one) cumulative_.back().push_back(cumulative_.back().back() + n);
        }
    }

    double run(std::uint64_t lower, unsigned bits) {
        const Bin bin{lower, bits};
        const double as_bin = cost_of(bin);
        const std::size_t before = bins.size();
        if (as_bin > 0 && cells_.bits(lower) < bits) {
            const double left = run(lower, bits - 1);
            const double right = run(lower + (std::uint64_t{1} << (bits - 1)), bits - 1);
            if (left + right + 1 < as_bin) return left + right + 1;
            bins.resize(before);
        }
        bins.push_back(bin);
        return as_bin;
    }

    std::vector<Bin> bins;

  private:
    // Bits of the items in a bin; 0 without items.
    double cost_of(const Bin& bin) const {
        const std::size_t begin = cells_.index(bin.lower), end = cells_.index(last_number(bin)) + 1;
        double bits = 0;
        for (const Counts& cumulative : cumulative_) {
            const auto n = static_cast<double>(cumulative[end] - cumulative[begin]);
            const auto total = static_cast<double>(cumulative.back());
            if (n == 0) continue;
            const double least = total / frequency_unit;  // a frequency is at least one unit
            bits += table_cost_ + n * (bin.bits + std::log2(total / std::max(n, least)));
            bits += std::max(least - n, 0.0) * 1.4427;  // at the expense of the others
        }
        return bits;
    }

    const Cells& cells_;
    double table_cost_;
    std::vector<Counts> cumulative_;
};

template <class Word>
class Fit {
  public:
    Fit(Bytes items, const ItemType& type) : items_(items), type_(type), count_(items.size() / sizeof(Word)) {
        model_.mapping = choose_mapping();
    }

    std::optional<Model> run(std::span<const std::size_t> widths) {
        choose_rows(widths);
        choose_drop();
        const Cells cells(type_, model_.mapping, model_.drop);
        const std::vector<Counts> counts = count(cells, 0, labels_, 1, model_.table_of_sum.back() + 1u,
                                                 [&](std::size_t sum) { return model_.table_of_sum[sum]; });
        double bits = choose_bins(cells, counts);
        if (model_.width != 0) {
            model_.labels = frequency_codes(label_counts(labels_.rows, row_labels));
            model_.columns = labels_.columns;
            bits += label_bits(labels_.rows) + label_bits(labels_.columns);
        }
        for (const Counts& one : counts) add_table(cells, one);
        std::size_t dropping = model_.width == 0 ? count_ : 0;
        for (std::size_t r = 0; r < labels_.rows.size(); ++r)
            if (labels_.rows[r] >= scale_labels)
                dropping += std::min(model_.width, count_ - r * model_.width);
        bits -= static_cast<double>(dropping) * model_.drop;
        if (bits > 8.0 * static_cast<double>(items_.size())) return std::nullopt;
        return std::move(model_);
    }

    const std::vector<std::uint8_t>& labels() const { return labels_.rows; }

  private:
    Word item(std::size_t i) const { return load<Word>(items_.data() + i * sizeof(Word)); }

    // Move the sign to the end unless positive and negative floats are distributed differently.
    Mapping choose_mapping() const {
        if (type_.exponent_bits == 0) return type_.is_signed ? Mapping::zigzag : Mapping::plain;
        const unsigned shift = 8 * static_cast<unsigned>(sizeof(Word)) - 2 - type_.exponent_bits;
        Counts counts(std::size_t{4} << type_.exponent_bits);
        for (std::size_t i = 0; i < count_; ++i) ++counts[item(i) >> shift];
        const std::size_t half = counts.size() / 2;
        double separate = 0, joint = 0;
        for (std::size_t c = 0; c < half; ++c) {
            const auto a = static_cast<double>(counts[c]), b = static_cast<double>(counts[half + c]);
            separate += 8 * code_bits * ((a > 0) + (b > 0)) - n_log_n(a) - n_log_n(b);
            joint += 8 * code_bits * (a + b > 0) - n_log_n(a + b) + a + b;
        }
        return separate < joint ? Mapping::plain : Mapping::sign_last;
    }

    // Count cells for each group of items, group_of(sum of labels), in every `stride`-th row.
    template <class Group>
    std::vector<Counts> count(const Cells& cells, unsigned coarser, const Labels& labels, std::size_t stride,
                              std::size_t groups, Group group_of) const {
        std::vector<Counts> counts(groups, Counts((cells.count >> coarser) + 1));
        const bool has_rows = !labels.rows.empty();
        const std::size_t width = has_rows ? labels.columns.size() : count_;
        const std::size_t rows = has_rows ? labels.rows.size() : 1;
        std::array<std::uint64_t*, scale_labels> of_column;
        for (std::size_t r = 0; r < rows; r += stride) {
            const std::size_t label = has_rows ? labels.rows[r] % scale_labels : 0;
            for (std::size_t c = 0; c < scale_labels; ++c) of_column[c] = counts[group_of(label + c)].data();
            const std::size_t begin = r * width, end = std::min(begin + width, count_);
            for (std::size_t i = begin; i < end; ++i) {
                const std::size_t cell = cells.index(map_item(item(i), model_.mapping)) >> coarser;
                ++of_column[has_rows ? labels.columns[i - begin] : 0][cell];
            }
        }
        return counts;
    }

    void choose_rows(std::span<const std::size_t> widths) {
        if (count_ < min_items_for_rows) return;
        const Cells cells(type_, model_.mapping, 0);
        unsigned coarser = 0;
        while (cells.count >> coarser > 1024) ++coarser;
        for (const std::size_t width : widths) {
            if (width < min_row_items || width >= max_row_items || count_ < 2 * width) continue;
            const Magnitudes magnitudes = measure_magnitudes(items_, type_, width);
            const std::size_t stride = std::max<std::size_t>(count_ / sample_items, 1);
            const std::size_t rows = magnitudes.rows.size(), sampled = ceil_div(rows, stride);
            const auto estimate = [&](const Labels& labels) {
                Merged merged = merge(count(cells, coarser, labels, stride, label_sums, std::identity{}));
                merged.bits *= static_cast<double>(rows) / static_cast<double>(sampled);
                return merged;
            };
            const double without = estimate(label_magnitudes(magnitudes, {false, false})).bits;
            for (const Sides sides : {Sides{true, true}, Sides{true, false}, Sides{false, true}}) {
                Labels labels = label_magnitudes(magnitudes, sides);
                const Merged merged = estimate(labels);
                const double bits =
                    merged.bits + label_bits(labels.rows) + label_bits(labels.columns) + row_cost;
                if (without - bits <= saved_) continue;
                saved_ = without - bits;
                labels_ = std::move(labels);
                model_.width = width;
                model_.table_of_sum = merged.table_of_sum;
            }
        }
    }

    // Find low bits that are zero in all items, or in many rows: floats converted from a narrower type.
    void choose_drop() {
        if (type_.exponent_bits == 0) return;
        const unsigned mantissa = 8 * static_cast<unsigned>(sizeof(Word)) - 1 - type_.exponent_bits;
        const std::size_t width = model_.width != 0 ? model_.width : count_;
        std::vector<unsigned> zeros;
        std::array<std::size_t, 65> rows{};  // by the number of droppable bits
        for (std::size_t begin = 0; begin < count_; begin += width) {
            Word any = 0;
            for (std::size_t i = begin; i < std::min(begin + width, count_); ++i) any |= item(i);
            zeros.push_back(std::min(static_cast<unsigned>(std::countr_zero(any)), mantissa));
            ++rows[zeros.back()];
        }
        std::size_t reached = 0, best = 0;
        for (unsigned drop = mantissa; drop > 0; --drop) {
            reached += rows[drop];
            if (reached * drop > best) {
                best = reached * drop;
                model_.drop = drop;
            }
        }
        for (std::size_t r = 0; r < labels_.rows.size(); ++r)
            if (model_.drop != 0 && zeros[r] >= model_.drop) labels_.rows[r] += scale_labels;
    }

    double choose_bins(const Cells& cells, const std::vector<Counts>& counts) {
        for (double table_cost = code_bits;; table_cost *= 1.5) {
            Halving halving(cells, counts, table_cost);
            const double bits = halving.run(0, 8 * sizeof(Word));
            if (halving.bins.size() > max_bins) continue;
            model_.bins = std::move(halving.bins);
            return bits;
        }
    }

    void add_table(const Cells& cells, const Counts& counts) {
        Counts of_bins;
        for (const Bin& bin : model_.bins) {
            std::uint64_t n = 0;
            for (std::size_t c = cells.index(bin.lower); c <= cells.index(last_number(bin)); ++c)
                n += counts[c];
            of_bins.push_back(n);
        }
        if (std::ranges::all_of(of_bins, [](std::uint64_t n) { return n == 0; })) of_bins[0] = 1;
        model_.tables.push_back(frequency_codes(of_bins));
    }

    Bytes items_;
    ItemType type_;
    std::size_t count_;
    Model model_;
    Labels labels_;
    double saved_ = 0;  // by using rows
};

template <class Word>
std::size_t fit_as(Bytes items, const ItemType& type, std::span<const std::size_t> widths,
                   MutableBytes labels, MutableBytes model) {
    Fit<Word> fit(items, type);
    const std::optional<Model> found = fit.run(widths);
    if (!found) return 0;
    const std::vector<std::uint8_t> packed = pack_model(*found);
    if (packed.size() >= items.size()) return 0;
    check(packed.size() <= model.size() && fit.labels().size() <= labels.size(),
          "model or labels are too small");
    std::ranges::copy(packed, model.begin());
    std::ranges::copy(fit.labels(), labels.begin());
    return packed.size();
}

}  // namespace

std::size_t model_bound(std::span<const std::size_t> widths) {
    const std::size_t max_width = widths.empty() ? 0 : std::ranges::max(widths);
    return (max_tables + 1) * max_bins * 3 + 2 * max_width + 1024;
}

std::size_t fit(Bytes items, const ItemType& type, std::span<const std::size_t> widths, MutableBytes labels,
                MutableBytes model) {
    check_items(items.size(), type.itemsize);
    check(type.exponent_bits < 8 * type.itemsize && type.exponent_bits <= 11, "too many exponent bits");
    if (items.empty()) return 0;
    return type.itemsize == 1   ? fit_as<std::uint8_t>(items, type, widths, labels, model)
           : type.itemsize == 2 ? fit_as<std::uint16_t>(items, type, widths, labels, model)
           : type.itemsize == 4 ? fit_as<std::uint32_t>(items, type, widths, labels, model)
                                : fit_as<std::uint64_t>(items, type, widths, labels, model);
}

}  // namespace slimtensors::bins
