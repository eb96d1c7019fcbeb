// Choosing the classes of rows and columns. Only the encoder runs this, so it can improve without a change of
// the format.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "masks/density.h"
#include "masks/density_kernels.h"

namespace slimtensors::masks {
namespace {

using Counts = std::vector<std::uint32_t>;
using PerClass = std::array<double, density_classes>;

// Bits per zero and per one for this frequency of ones.
struct Cost {
    double zero, one;

    Cost(double ones, double trials) {
        const double share = (ones + 0.2) / (trials + 0.4);
        zero = -std::log2(1 - share);
        one = -std::log2(share);
    }
};

// Calls `visit(row, column)` for every one in the mask.
template <class Visit>
void for_each_one(Bytes mask, std::size_t width, Visit visit) {
    for (std::size_t r = 0, begin = 0; begin < mask.size(); ++r, begin += width) {
        const std::size_t bytes = std::min(width, mask.size() - begin);
        for (std::size_t j = 0; j < bytes; j += 8) {
            std::uint64_t word = 0;
            std::memcpy(&word, mask.data() + begin + j, std::min<std::size_t>(8, bytes - j));
            for (; word != 0; word &= word - 1)
                visit(r, 8 * j + static_cast<std::size_t>(std::countr_zero(word)));
        }
    }
}

// One side of the matrix: its lines are the rows or the columns.
struct Side {
    std::vector<std::uint8_t> label;
    std::size_t classes = 1;

    PerClass lines_per_class() const {
        PerClass lines{};
        for (const std::uint8_t k : label) lines[k] += 1;
        return lines;
    }

    PerClass label_cost() const {
        PerClass cost = lines_per_class();
        for (double& c : cost) c = -std::log2(std::max(c, 0.1) / static_cast<double>(label.size()));
        return cost;
    }

    void drop_empty_classes() {
        const PerClass lines = lines_per_class();
        std::array<std::uint8_t, density_classes> renamed{};
        std::size_t kept = 0;
        for (std::size_t k = 0; k < density_classes; ++k)
            if (lines[k] > 0) renamed[k] = static_cast<std::uint8_t>(kept++);
        for (std::uint8_t& k : label) k = renamed[k];
        classes = std::max<std::size_t>(kept, 1);
    }
};

// Lines of similar density; the counts include all levels up to this one.
struct Level {
    std::uint32_t max_ones;
    double lines, ones;
};

// Sort lines by their number of ones and divide them into a few levels of similar size.
std::vector<Level> levels_of(Counts ones) {
    constexpr std::size_t max_levels = 64;
    std::ranges::sort(ones);
    const std::size_t step = ones.size() / max_levels + 1;
    std::vector<Level> levels;
    double sum = 0;
    for (std::size_t i = 0, next = step; i < ones.size(); ++i) {
        sum += ones[i];
        if (i + 1 < ones.size() && (i + 1 < next || ones[i + 1] == ones[i])) continue;
        levels.push_back({ones[i], static_cast<double>(i + 1), sum});
        next = i + 1 + step;
    }
    return levels;
}

// The entropy of counts is a difference of these.
double n_log_n(double n) { return n > 0 ? n * std::log2(n) : 0; }

// Return the last level of each class in the best division of the lines by their density alone.
std::vector<std::size_t> divide(const std::vector<Level>& levels, double trials, double bits_per_class) {
    const double all = levels.back().lines;
    // cost of one class with levels first ... last: its bits, its labels and its entry in the model
    const auto cost = [&](std::size_t first, std::size_t last) {
        const Level before = first == 0 ? Level{} : levels[first - 1];
        const double lines = levels[last].lines - before.lines, ones = levels[last].ones - before.ones;
        const double bits = n_log_n(lines * trials) - n_log_n(ones) - n_log_n(lines * trials - ones);
        return bits + lines * std::log2(all / lines) + bits_per_class;
    };
    struct Best {
        double bits = HUGE_VAL;
        std::size_t first = 0;  // of the last class
    };
    const std::size_t count = levels.size();
    std::vector<double> costs(count * count);
    for (std::size_t first = 0; first < count; ++first)
        for (std::size_t last = first; last < count; ++last) costs[first * count + last] = cost(first, last);
    std::vector<std::vector<Best>> best(density_classes, std::vector<Best>(count));
    for (std::size_t k = 0; k < density_classes; ++k)
        for (std::size_t last = 0; last < count; ++last)
            for (std::size_t first = k; first <= (k == 0 ? 0 : last); ++first) {
                const double bits = (k == 0 ? 0 : best[k - 1][first - 1].bits) + costs[first * count + last];
                if (bits < best[k][last].bits) best[k][last] = {bits, first};
            }
    const auto ends = std::ranges::min_element(best, {}, [](const auto& row) { return row.back().bits; });
    std::vector<std::size_t> lasts;
    for (std::size_t k = static_cast<std::size_t>(ends - best.begin()) + 1, last = count - 1; k-- > 0;) {
        lasts.push_back(last);
        last = best[k][last].first - 1;
    }
    std::ranges::reverse(lasts);
    return lasts;
}

Side classify(const Counts& ones, std::size_t trials, std::size_t crossing_classes) {
    Side side{std::vector<std::uint8_t>(ones.size())};
    if (ones.empty()) return side;
    const std::vector<Level> levels = levels_of(ones);
    const double bits_per_class = 8.0 * static_cast<double>(1 + crossing_classes);  // its count and chances
    Counts limits;
    for (const std::size_t last : divide(levels, static_cast<double>(trials), bits_per_class))
        limits.push_back(levels[last].max_ones);
    for (std::size_t i = 0; i < ones.size(); ++i)
        side.label[i] = static_cast<std::uint8_t>(std::ranges::lower_bound(limits, ones[i]) - limits.begin());
    side.classes = limits.size();
    return side;
}

// Ones of each line by the class of the crossing lines: [line][class].
struct Tally {
    Counts ones;
    PerClass crossing;  // lines of the other side in each class

    std::array<double, density_pairs> by_pair(const Side& side) const {
        std::array<double, density_pairs> sums{};
        for (std::size_t i = 0; i < side.label.size(); ++i)
            for (std::size_t c = 0; c < density_classes; ++c)
                sums[side.label[i] * density_classes + c] += ones[i * density_classes + c];
        return sums;
    }
};

// Move every line to its cheapest class, given the classes of the crossing lines, and return the total cost.
// This finds similarity that the number of ones alone does not show.
double reassign(Side& side, std::size_t crossing_classes, const Tally& tally) {
    const std::array<double, density_pairs> sums = tally.by_pair(side);
    const PerClass lines = side.lines_per_class();
    std::array<double, density_pairs> per_one{};
    PerClass per_line = side.label_cost();
    for (std::size_t k = 0; k < side.classes; ++k)
        for (std::size_t c = 0; c < crossing_classes; ++c) {
            const Cost cost(sums[k * density_classes + c], lines[k] * tally.crossing[c]);
            per_one[k * density_classes + c] = cost.one - cost.zero;
            per_line[k] += tally.crossing[c] * cost.zero;
        }
    double total = 0;
    for (std::size_t i = 0; i < side.label.size(); ++i) {
        double best = HUGE_VAL;
        for (std::size_t k = 0; k < side.classes; ++k) {
            double bits = per_line[k];
            for (std::size_t c = 0; c < crossing_classes; ++c)
                bits += tally.ones[i * density_classes + c] * per_one[k * density_classes + c];
            if (bits < best) {
                best = bits;
                side.label[i] = static_cast<std::uint8_t>(k);
            }
        }
        total += best;
    }
    side.drop_empty_classes();
    return total;
}

class Fit {
  public:
    Fit(Bytes mask, std::size_t width) : mask_(mask), width_(width) {
        const std::size_t rows_count = ceil_div(mask.size(), width);
        Counts in_row(rows_count), in_column(8 * width);
        for_each_one(mask, width, [&](std::size_t r, std::size_t c) {
            ++in_row[r];
            ++in_column[c];
        });
        constexpr std::size_t guess = 6;
        columns = classify(in_column, rows_count, guess);
        rows = classify(in_row, 8 * width, columns.classes);
        columns = classify(in_column, rows_count, rows.classes);
    }

    void refine() {
        constexpr int rounds = 6;
        constexpr double min_gain = 0.9995;
        double before = HUGE_VAL;
        for (int round = 0; round < rounds && rows.classes * columns.classes > 1; ++round) {
            reassign(rows, columns.classes, tally_rows());
            const double after = reassign(columns, rows.classes, tally_columns());
            if (after > before * min_gain) break;
            before = after;
        }
    }

    Tally tally_rows() const {
        Tally tally{Counts(rows.label.size() * density_classes), columns.lines_per_class()};
        for_each_one(mask_, width_, [&](std::size_t r, std::size_t c) {
            ++tally.ones[r * density_classes + columns.label[c]];
        });
        return tally;
    }

    Side rows, columns;

  private:
    Tally tally_columns() const {
        Tally tally{Counts(columns.label.size() * density_classes), rows.lines_per_class()};
        for_each_one(mask_, width_, [&](std::size_t r, std::size_t c) {
            ++tally.ones[c * density_classes + rows.label[r]];
        });
        return tally;
    }

    Bytes mask_;
    std::size_t width_;
};

std::uint8_t nearest_chance(double ones, double trials) {
    const double share = trials > 0 ? ones / trials : 0.5;
    double least = HUGE_VAL;
    unsigned best = 0;
    for (unsigned code = 0; code < 256; ++code) {
        if (!is_chance(code)) continue;
        const double chance = static_cast<double>(chance_of_one(code)) / chance_unit;
        const double bits = -share * std::log2(chance) - (1 - share) * std::log2(1 - chance);
        if (bits < least) {
            least = bits;
            best = code;
        }
    }
    return static_cast<std::uint8_t>(best);
}

}  // namespace

void density_fit(Bytes mask, MutableBytes rows, MutableBytes columns, MutableBytes chances) {
    check_density_sizes(mask.size(), rows.size(), columns.size(), chances.size());
    Fit fit(mask, columns.size() / 8);
    fit.refine();
    std::ranges::copy(fit.rows.label, rows.begin());
    std::ranges::copy(fit.columns.label, columns.begin());

    const Tally tally = fit.tally_rows();
    const std::array<double, density_pairs> sums = tally.by_pair(fit.rows);
    const PerClass lines = fit.rows.lines_per_class();
    std::ranges::fill(chances, std::uint8_t{0});
    for (std::size_t k = 0; k < fit.rows.classes; ++k)
        for (std::size_t c = 0; c < fit.columns.classes; ++c) {
            const std::size_t pair = k * density_classes + c;
            chances[pair] = nearest_chance(sums[pair], lines[k] * tally.crossing[c]);
        }
}

}  // namespace slimtensors::masks
