#include "bins/magnitudes.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>

namespace slimtensors {
namespace {

// What is added up: the magnitude of a float, and the bits of an integer, whose magnitudes differ too much
// for that.
template <class Word>
class Measure {
  public:
    explicit Measure(const BinsKind& kind)
        : exponent_bits_(kind.exponent_bits),
          mantissa_bits_(8 * static_cast<unsigned>(sizeof(Word)) - 1 - exponent_bits_),
          zigzag_(kind.is_signed),
          unit_(std::ldexp(1.0f, 128 - (1 << std::min(exponent_bits_, 8u)) / 2)) {}

    float operator()(Word item) const {
        constexpr unsigned width = 8 * sizeof(Word);
        if (exponent_bits_ == 0) {
            const Word positive = zigzag_ && item >> (width - 1) ? static_cast<Word>(~item) : item;
            return static_cast<float>(std::bit_width(positive));
        }
        const auto magnitude = static_cast<Word>(static_cast<Word>(item << 1) >> 1);
        if (magnitude >> mantissa_bits_ == (Word{1} << exponent_bits_) - 1)
            return 0;  // infinite, or no number
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
    float unit_;  // makes a float32 whose exponent has another bias what it should be
};

template <class Word>
Scales measure_as(Bytes items, const BinsKind& kind, std::size_t width) {
    constexpr std::size_t lanes = 8, piece = 512;
    const Measure<Word> measure(kind);
    const std::size_t count = items.size() / sizeof(Word);
    std::vector<double> columns(width);
    Scales scales{width, {}, std::vector<float>(width)};
    std::array<float, piece> sizes;
    for (std::size_t row = 0; row < count; row += width) {
        const std::size_t end = std::min(row + width, count);
        double sum = 0;
        for (std::size_t at = row; at < end; at += piece) {
            const std::size_t n = std::min(piece, end - at);
            for (std::size_t i = 0; i < n; ++i)
                sizes[i] = measure(load<Word>(items.data() + (at + i) * sizeof(Word)));
            std::fill(sizes.begin() + n, sizes.begin() + (n + lanes - 1) / lanes * lanes, 0.0f);
            for (std::size_t i = 0; i < n; ++i) columns[at - row + i] += sizes[i];
            std::array<float, lanes> sums{};  // adding to one would wait for itself
            for (std::size_t i = 0; i < n; i += lanes)
                for (std::size_t k = 0; k < lanes; ++k) sums[k] += sizes[i + k];
            for (const float one : sums) sum += one;
        }
        scales.rows.push_back(measure.logarithm(sum, end - row));
    }
    const std::size_t rows = scales.rows.size();
    for (std::size_t c = 0; c < width; ++c) scales.columns[c] = measure.logarithm(columns[c], rows);
    return scales;
}

struct Range {
    float low, high;
};

Range middle_of(std::vector<float> values) {  // without the outermost fiftieths
    const std::size_t cut = values.size() / 50;
    std::ranges::nth_element(values, values.begin() + cut);
    const float low = values[cut];
    std::ranges::nth_element(values, values.end() - 1 - cut);
    return {low, values[values.size() - 1 - cut]};
}

}  // namespace

Scales measure_scales(Bytes items, const BinsKind& kind, std::size_t width) {
    return kind.size == 1   ? measure_as<std::uint8_t>(items, kind, width)
           : kind.size == 2 ? measure_as<std::uint16_t>(items, kind, width)
           : kind.size == 4 ? measure_as<std::uint32_t>(items, kind, width)
                            : measure_as<std::uint64_t>(items, kind, width);
}

Labels label_scales(const Scales& scales, Use use) {
    const Range rows = middle_of(scales.rows), columns = middle_of(scales.columns);
    // Finer steps say more than they save where a row has few items.
    float step = scales.width < 96 ? 0.5f : 0.25f;
    if (use.rows) step = std::max(step, (rows.high - rows.low) / (scale_labels - 2));
    if (use.columns) step = std::max(step, (columns.high - columns.low) / (scale_labels - 2));
    const auto label = [step](const std::vector<float>& values, float low, bool used) {
        std::vector<std::uint8_t> labels(values.size());
        if (used)
            std::ranges::transform(values, labels.begin(), [&](float value) {
                const float place = (value - low) / step + 1.0f;
                return static_cast<std::uint8_t>(std::clamp(place, 0.0f, scale_labels - 0.5f));
            });
        return labels;
    };
    return {label(scales.rows, rows.low, use.rows), label(scales.columns, columns.low, use.columns)};
}

double label_bits(const std::vector<std::uint8_t>& labels) {
    std::array<double, row_labels> counts{};
    for (const std::uint8_t label : labels) ++counts[label];
    double bits = 0;
    for (const double n : counts)
        if (n > 0) bits += n * std::log2(static_cast<double>(labels.size()) / n);
    return bits;
}

}  // namespace slimtensors
