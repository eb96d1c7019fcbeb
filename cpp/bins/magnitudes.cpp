#include "bins/magnitudes.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>

#include "core/histogram.h"

namespace slimtensors::bins {
namespace {

// The summand of an item: the magnitude of a float, or the bit width of an integer, because magnitudes of
// integers vary too much.
template <class Word>
class Measure {
  public:
    explicit Measure(const ItemType& type)
        : exponent_bits_(type.exponent_bits),
          mantissa_bits_(8 * static_cast<unsigned>(sizeof(Word)) - 1 - exponent_bits_),
          zigzag_(type.is_signed),
          unit_(std::ldexp(1.0f, 128 - (1 << std::min(exponent_bits_, 8u)) / 2)) {}

    float operator()(Word item) const {
        constexpr unsigned width = 8 * sizeof(Word);
        if (exponent_bits_ == 0) {
            const Word positive = zigzag_ && item >> (width - 1) ? static_cast<Word>(~item) : item;
            return static_cast<float>(std::bit_width(positive));
        }
        const auto magnitude = static_cast<Word>(static_cast<Word>(item << 1) >> 1);
        if (magnitude >> mantissa_bits_ == (Word{1} << exponent_bits_) - 1) return 0;  // infinity or NaN
        if constexpr (sizeof(Word) == 8)
            return static_cast<float>(
                std::min(std::bit_cast<double>(magnitude), double{FLT_MAX} / (1 << 24)));
        else
            return std::bit_cast<float>(static_cast<std::uint32_t>(magnitude) << (23 - mantissa_bits_)) *
                   unit_;
    }

    float logarithm(double sum, std::size_t count) const {
        const double mean = sum / static_cast<double>(count);
        if (exponent_bits_ == 0) return static_cast<float>(mean);
        return static_cast<float>(std::log2(std::max(mean, double{FLT_MIN})));
    }

  private:
    unsigned exponent_bits_, mantissa_bits_;
    bool zigzag_;
    float unit_;  // corrects the exponent bias
};

template <class Word>
Magnitudes measure_as(Bytes items, const ItemType& type, std::size_t width) {
    constexpr std::size_t lanes = 8, piece = 512;
    const Measure<Word> measure(type);
    const std::size_t count = items.size() / sizeof(Word);
    std::vector<double> columns(width);
    Magnitudes magnitudes{width, {}, std::vector<float>(width)};
    std::array<float, piece> sizes;
    for (std::size_t row = 0; row < count; row += width) {
        const std::size_t end = std::min(row + width, count);
        double sum = 0;
        for (std::size_t at = row; at < end; at += piece) {
            const std::size_t n = std::min(piece, end - at);
            for (std::size_t i = 0; i < n; ++i)
                sizes[i] = measure(load<Word>(items.data() + (at + i) * sizeof(Word)));
            std::fill(sizes.begin() + n, sizes.begin() + ceil_div(n, lanes) * lanes, 0.0f);
            for (std::size_t i = 0; i < n; ++i) columns[at - row + i] += sizes[i];
            std::array<float, lanes> sums{};  // a single sum would be one long dependency chain
            for (std::size_t i = 0; i < n; i += lanes)
                for (std::size_t k = 0; k < lanes; ++k) sums[k] += sizes[i + k];
            for (const float s : sums) sum += s;
        }
        magnitudes.rows.push_back(measure.logarithm(sum, end - row));
    }
    const std::size_t rows = magnitudes.rows.size();
    for (std::size_t c = 0; c < width; ++c) magnitudes.columns[c] = measure.logarithm(columns[c], rows);
    return magnitudes;
}

struct Range {
    float low, high;
};

Range middle_of(std::vector<float> values) {  // without 2 % at either end
    const std::size_t cut = values.size() / 50;
    std::ranges::nth_element(values, values.begin() + cut);
    const float low = values[cut];
    std::ranges::nth_element(values, values.end() - 1 - cut);
    return {low, values[values.size() - 1 - cut]};
}

}  // namespace

Magnitudes measure_magnitudes(Bytes items, const ItemType& type, std::size_t width) {
    return type.itemsize == 1   ? measure_as<std::uint8_t>(items, type, width)
           : type.itemsize == 2 ? measure_as<std::uint16_t>(items, type, width)
           : type.itemsize == 4 ? measure_as<std::uint32_t>(items, type, width)
                                : measure_as<std::uint64_t>(items, type, width);
}

Labels label_magnitudes(const Magnitudes& magnitudes, Sides sides) {
    const Range rows = middle_of(magnitudes.rows), columns = middle_of(magnitudes.columns);
    // For short rows, finer steps cost more than they save.
    float step = magnitudes.width < 96 ? 0.5f : 0.25f;
    if (sides.rows) step = std::max(step, (rows.high - rows.low) / (scale_labels - 2));
    if (sides.columns) step = std::max(step, (columns.high - columns.low) / (scale_labels - 2));
    const auto label = [step](const std::vector<float>& values, float low, bool used) {
        std::vector<std::uint8_t> labels(values.size());
        if (used)
            std::ranges::transform(values, labels.begin(), [&](float value) {
                const float place = (value - low) / step + 1.0f;
                return static_cast<std::uint8_t>(std::clamp(place, 0.0f, scale_labels - 0.5f));
            });
        return labels;
    };
    return {label(magnitudes.rows, rows.low, sides.rows),
            label(magnitudes.columns, columns.low, sides.columns)};
}

double label_bits(const std::vector<std::uint8_t>& labels) {
    double bits = 0;
    for (const double n : histogram(labels))
        if (n > 0) bits += n * std::log2(static_cast<double>(labels.size()) / n);
    return bits;
}

}  // namespace slimtensors::bins
