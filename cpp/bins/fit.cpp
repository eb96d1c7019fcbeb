// How the encoder finds a model: nothing here is part of the format.
#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <stdexcept>

#include "bins/cells.h"
#include "bins/magnitudes.h"

namespace slimtensors {
namespace {

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }

constexpr double code_bits = 5;   // what a frequency takes in a model
constexpr double row_cost = 500;  // bits to say how labels are distributed
constexpr std::size_t fewest_for_rows = 4096;
constexpr std::size_t sample = std::size_t{1} << 19;

double n_log_n(double n) { return n > 0 ? n * std::log2(n) : 0; }

using Counts = std::vector<std::uint64_t>;

// What symbols that occur so often take, with their frequencies.
double bits_of(const Counts& counts) {
    double total = 0, bits = 0;
    for (const std::uint64_t n : counts)
        if (n != 0) {
            total += static_cast<double>(n);
            bits += code_bits - n_log_n(static_cast<double>(n));
        }
    return bits + n_log_n(total);
}

// Neighbouring sums of labels that share a table because their items are much alike, or few.
struct Merged {
    std::array<std::uint8_t, label_sums> table_of_sum;
    std::size_t tables;
    double bits;
};

Merged merge(std::vector<Counts> counts) {
    std::vector<std::size_t> first(counts.size());  // sum of labels of each group
    std::vector<double> bits(counts.size());
    for (std::size_t g = 0; g < counts.size(); ++g) {
        first[g] = g;
        bits[g] = bits_of(counts[g]);
    }
    const auto joined = [&](std::size_t g) {
        Counts both = counts[g];
        for (std::size_t s = 0; s < both.size(); ++s) both[s] += counts[g + 1][s];
        return both;
    };
    std::vector<double> saved(counts.size() - 1);  // by joining a group with the next one
    const auto save = [&](std::size_t g) { saved[g] = bits[g] + bits[g + 1] - bits_of(joined(g)); };
    for (std::size_t g = 0; g < saved.size(); ++g) save(g);
    while (!saved.empty()) {
        const auto g = static_cast<std::size_t>(std::ranges::max_element(saved) - saved.begin());
        if (saved[g] < 0 && counts.size() <= most_tables) break;
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

// Bins for items that fall into cells so often: ranges are halved as long as that saves more bits than it
// takes to say so. Counts are those up to a cell, for each table.
class Halving {
  public:
    Halving(const Cells& cells, std::span<const Counts> counts, double dear) : cells_(cells), dear_(dear) {
        for (const Counts& one : counts) {
            upto_.emplace_back(1);
            for (const std::uint64_t n : one) upto_.back().push_back(upto_.back().back() + n);
        }
    }

    double run(std::uint64_t lower, unsigned bits) {
        const Bin whole{lower, bits};
        const double as_bin = bits_as(whole);
        const std::size_t before = bins.size();
        if (as_bin > 0 && cells_.bits(lower) < bits) {
            const double left = run(lower, bits - 1);
            const double right = run(lower + (std::uint64_t{1} << (bits - 1)), bits - 1);
            if (left + right + 1 < as_bin) return left + right + 1;
            bins.resize(before);
        }
        bins.push_back(whole);
        return as_bin;
    }

    std::vector<Bin> bins;

  private:
    // Relative to items without any frequencies; 0 for no items.
    double bits_as(const Bin& bin) const {
        const std::size_t begin = cells_.of(bin.lower), end = cells_.of(last_of(bin)) + 1;
        double bits = 0;
        for (const Counts& upto : upto_) {
            const auto n = static_cast<double>(upto[end] - upto[begin]);
            const auto total = static_cast<double>(upto.back());
            if (n == 0) continue;
            const double least = total / frequency_unit;  // what the rarest symbol counts as
            bits += dear_ + n * (bin.bits + std::log2(total / std::max(n, least)));
            bits += std::max(least - n, 0.0) * 1.4427;  // taken from the others
        }
        return bits;
    }

    const Cells& cells_;
    double dear_;
    std::vector<Counts> upto_;
};

template <class Word>
class Fit {
  public:
    Fit(Bytes items, const BinsKind& kind) : items_(items), kind_(kind), count_(items.size() / sizeof(Word)) {
        model_.mapping = choose_mapping();
    }

    std::optional<BinsModel> run(std::span<const std::size_t> widths) {
        choose_rows(widths);
        choose_drop();
        const Cells cells(kind_, model_.mapping, model_.drop);
        const std::vector<Counts> counts = count(cells, 0, labels_, 1, model_.table_of_sum.back() + 1u,
                                                 [&](std::size_t sum) { return model_.table_of_sum[sum]; });
        double bits = choose_bins(cells, counts);
        if (model_.width != 0) {
            Counts of_labels(row_labels);
            for (const std::uint8_t label : labels_.rows) ++of_labels[label];
            model_.labels = frequency_codes(of_labels);
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

    // A sign tells as much as it can anywhere, unless positive and negative floats differ.
    Mapping choose_mapping() const {
        if (kind_.exponent_bits == 0) return kind_.is_signed ? Mapping::zigzag : Mapping::plain;
        const unsigned shift = 8 * static_cast<unsigned>(sizeof(Word)) - 2 - kind_.exponent_bits;
        Counts counts(std::size_t{4} << kind_.exponent_bits);
        for (std::size_t i = 0; i < count_; ++i) ++counts[item(i) >> shift];
        const std::size_t half = counts.size() / 2;
        double apart = 0, together = 0;
        for (std::size_t c = 0; c < half; ++c) {
            const auto a = static_cast<double>(counts[c]), b = static_cast<double>(counts[half + c]);
            apart += 8 * code_bits * ((a > 0) + (b > 0)) - n_log_n(a) - n_log_n(b);
            together += 8 * code_bits * (a + b > 0) - n_log_n(a + b) + a + b;
        }
        return apart < together ? Mapping::plain : Mapping::sign_last;
    }

    // Count cells for each group of items: group_of(sum of labels). Only every so many rows are looked at.
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
                const std::size_t cell = cells.of(mapped(item(i), model_.mapping)) >> coarser;
                ++of_column[has_rows ? labels.columns[i - begin] : 0][cell];
            }
        }
        return counts;
    }

    void choose_rows(std::span<const std::size_t> widths) {
        if (count_ < fewest_for_rows) return;
        const Cells cells(kind_, model_.mapping, 0);
        unsigned coarser = 0;
        while (cells.count >> coarser > 1024) ++coarser;
        for (const std::size_t width : widths) {
            if (width < narrowest_row || width >= widest_row || count_ < 2 * width) continue;
            const Scales scales = measure_scales(items_, kind_, width);
            const std::size_t stride = std::max<std::size_t>(count_ / sample, 1);
            const std::size_t rows = scales.rows.size(), looked_at = (rows + stride - 1) / stride;
            const auto estimate = [&](const Labels& labels) {
                Merged merged = merge(count(cells, coarser, labels, stride, label_sums, std::identity{}));
                merged.bits *= static_cast<double>(rows) / static_cast<double>(looked_at);
                return merged;
            };
            const double without = estimate(label_scales(scales, {false, false})).bits;
            for (const Use use : {Use{true, true}, Use{true, false}, Use{false, true}}) {
                Labels labels = label_scales(scales, use);
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

    // Which low bits are zero, in all items or in all of many rows: floats that came from a narrower type.
    void choose_drop() {
        if (kind_.exponent_bits == 0) return;
        const unsigned mantissa = 8 * static_cast<unsigned>(sizeof(Word)) - 1 - kind_.exponent_bits;
        const std::size_t width = model_.width != 0 ? model_.width : count_;
        std::vector<unsigned> zeros;
        std::array<std::size_t, 65> rows{};  // that could drop exactly so many
        for (std::size_t begin = 0; begin < count_; begin += width) {
            Word any = 0;
            for (std::size_t i = begin; i < std::min(begin + width, count_); ++i) any |= item(i);
            zeros.push_back(std::min(static_cast<unsigned>(std::countr_zero(any)), mantissa));
            ++rows[zeros.back()];
        }
        std::size_t reached = 0, most = 0;
        for (unsigned drop = mantissa; drop > 0; --drop) {
            reached += rows[drop];
            if (reached * drop > most) {
                most = reached * drop;
                model_.drop = drop;
            }
        }
        for (std::size_t r = 0; r < labels_.rows.size(); ++r)
            if (model_.drop != 0 && zeros[r] >= model_.drop) labels_.rows[r] += scale_labels;
    }

    double choose_bins(const Cells& cells, const std::vector<Counts>& counts) {
        for (double dear = code_bits;; dear *= 1.5) {
            Halving halving(cells, counts, dear);
            const double bits = halving.run(0, 8 * sizeof(Word));
            if (halving.bins.size() > most_bins) continue;
            model_.bins = std::move(halving.bins);
            return bits;
        }
    }

    void add_table(const Cells& cells, const Counts& counts) {
        Counts of_bins;
        for (const Bin& bin : model_.bins) {
            std::uint64_t n = 0;
            for (std::size_t c = cells.of(bin.lower); c <= cells.of(last_of(bin)); ++c) n += counts[c];
            of_bins.push_back(n);
        }
        if (std::ranges::all_of(of_bins, [](std::uint64_t n) { return n == 0; })) of_bins[0] = 1;
        model_.tables.push_back(frequency_codes(of_bins));
    }

    Bytes items_;
    BinsKind kind_;
    std::size_t count_;
    BinsModel model_;
    Labels labels_;
    double saved_ = 0;  // by having them
};

template <class Word>
std::size_t fit_as(Bytes items, const BinsKind& kind, std::span<const std::size_t> widths,
                   MutableBytes labels, MutableBytes model) {
    Fit<Word> fit(items, kind);
    const std::optional<BinsModel> found = fit.run(widths);
    if (!found) return 0;
    const std::vector<std::uint8_t> packed = pack_bins_model(*found);
    if (packed.size() >= items.size()) return 0;
    if (packed.size() > model.size() || fit.labels().size() > labels.size())
        refuse("too little room for a model");
    std::ranges::copy(packed, model.begin());
    std::ranges::copy(fit.labels(), labels.begin());
    return packed.size();
}

}  // namespace

std::size_t bins_model_bound(std::span<const std::size_t> widths) {
    const std::size_t widest = widths.empty() ? 0 : std::ranges::max(widths);
    return (most_tables + 1) * most_bins * 3 + 2 * widest + 1024;
}

std::size_t bins_fit(Bytes items, const BinsKind& kind, std::span<const std::size_t> widths,
                     MutableBytes labels, MutableBytes model) {
    if (!std::has_single_bit(kind.size) || kind.size > 8) refuse("itemsize must be 1, 2, 4 or 8");
    if (items.size() % kind.size != 0) refuse("items are not a whole number of items");
    if (kind.exponent_bits >= 8 * kind.size || kind.exponent_bits > 11) refuse("too many exponent bits");
    if (items.empty()) return 0;
    return kind.size == 1   ? fit_as<std::uint8_t>(items, kind, widths, labels, model)
           : kind.size == 2 ? fit_as<std::uint16_t>(items, kind, widths, labels, model)
           : kind.size == 4 ? fit_as<std::uint32_t>(items, kind, widths, labels, model)
                            : fit_as<std::uint64_t>(items, kind, widths, labels, model);
}

}  // namespace slimtensors
