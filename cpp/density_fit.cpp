// Choosing the classes of rows and columns. Only the writer runs this: what it chooses is stored, so it may
// become better without a change of the format.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "density.h"
#include "density_kernels.h"

namespace slimtensors {
namespace {

using Counts = std::vector<std::uint32_t>;
using PerClass = std::array<double, density_classes>;

// Bits it costs to say a zero and a one where ones have this share.
struct Cost {
    double zero, one;

    Cost(double ones, double trials) {
        const double share = (ones + 0.2) / (trials + 0.4);
        zero = -std::log2(1 - share);
        one = -std::log2(share);
    }
};

// Calls `visit(row, column)` for every one of the mask.
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

// One of the two sides of the matrix: lines are its rows, or its columns.
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

// Lines that have the same number of ones.
struct Level {
    std::uint32_t ones;
    double lines;
};

std::vector<Level> levels_of(Counts ones) {
    std::ranges::sort(ones);
    std::vector<Level> levels;
    for (const std::uint32_t n : ones)
        if (levels.empty() || levels.back().ones != n)
            levels.push_back({n, 1});
        else
            levels.back().lines += 1;
    return levels;
}

// Divide levels into at most `classes` classes of similar density, and return what masks and labels cost.
double divide(const std::vector<Level>& levels, double trials, std::size_t classes,
              std::vector<std::uint8_t>& label) {
    double lines = 0, seen = 0;
    for (const Level& level : levels) lines += level.lines;
    label.resize(levels.size());
    for (std::size_t i = 0; i < levels.size(); ++i) {
        label[i] = static_cast<std::uint8_t>(seen / lines * static_cast<double>(classes));
        seen += levels[i].lines;
    }
    constexpr int rounds = 8;
    double total = 0;
    for (int round = 0; round < rounds; ++round) {
        PerClass ones{}, size{}, per_one{}, per_line{};
        for (std::size_t i = 0; i < levels.size(); ++i) {
            ones[label[i]] += levels[i].ones * levels[i].lines;
            size[label[i]] += levels[i].lines;
        }
        for (std::size_t k = 0; k < classes; ++k) {
            const Cost cost(ones[k], size[k] * trials);
            per_one[k] = cost.one - cost.zero;
            per_line[k] = trials * cost.zero - std::log2(std::max(size[k], 0.1) / lines);
        }
        total = 0;
        for (std::size_t i = 0; i < levels.size(); ++i) {
            double best = HUGE_VAL;
            for (std::size_t k = 0; k < classes; ++k) {
                const double bits = levels[i].ones * per_one[k] + per_line[k];
                if (bits < best) {
                    best = bits;
                    label[i] = static_cast<std::uint8_t>(k);
                }
            }
            total += best * levels[i].lines;
        }
    }
    return total;
}

Side classify(const Counts& ones, std::size_t trials) {
    constexpr std::size_t choices[] = {1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16};
    constexpr double bits_per_class = 8 * 7;  // its count, and its chances with the classes of the other side
    const std::vector<Level> levels = levels_of(ones);
    std::vector<std::uint8_t> best, label;
    double least = HUGE_VAL;
    for (const std::size_t classes : choices) {
        if (classes > levels.size()) break;
        const double bits = divide(levels, static_cast<double>(trials), classes, label) +
                            bits_per_class * static_cast<double>(classes);
        if (bits < least) {
            least = bits;
            best = label;
        } else if (bits > least * 1.01) {
            break;
        }
    }
    Side side{std::vector<std::uint8_t>(ones.size())};
    for (std::size_t i = 0; i < ones.size(); ++i) {
        const auto at = std::ranges::lower_bound(levels, ones[i], {}, &Level::ones) - levels.begin();
        side.label[i] = best[static_cast<std::size_t>(at)];
    }
    side.drop_empty_classes();
    return side;
}

// Ones of each line, apart for each class of the lines that cross it: [line][class].
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

// Move every line to the class where it costs least, given the classes of the lines that cross it, and return
// what it all costs. This finds likeness that the number of ones alone does not show.
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
        const std::size_t rows_count = mask.size() / width + (mask.size() % width != 0);
        Counts in_row(rows_count), in_column(8 * width);
        for_each_one(mask, width, [&](std::size_t r, std::size_t c) {
            ++in_row[r];
            ++in_column[c];
        });
        rows = classify(in_row, 8 * width);
        columns = classify(in_column, rows_count);
    }

    void refine() {
        constexpr int rounds = 6;
        constexpr double worthwhile = 0.9995;
        double before = HUGE_VAL;
        for (int round = 0; round < rounds && rows.classes * columns.classes > 1; ++round) {
            reassign(rows, columns.classes, tally_rows());
            const double after = reassign(columns, rows.classes, tally_columns());
            if (after > before * worthwhile) break;
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

}  // namespace slimtensors
