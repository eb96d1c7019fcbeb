#include "bins/model.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "bins/rans.h"
#include "core/check.h"
#include "core/histogram.h"

namespace slimtensors::bins {
namespace {

class BitWriter {
  public:
    void put(std::uint64_t value, unsigned bits) {
        for (unsigned k = 0; k < bits; ++k) {
            if (used_ % 8 == 0) bytes_.push_back(0);
            bytes_.back() |= static_cast<std::uint8_t>((value >> k & 1) << used_++ % 8);
        }
    }
    // Elias gamma code of value / 2 + 1, then the lowest bit.
    void put_small(unsigned value) {
        const unsigned high = value / 2 + 1, length = std::bit_width(high) - 1;
        put(0, length);
        put(1, 1);
        put(high, length);
        put(value, 1);
    }
    void append(Bytes bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
    std::vector<std::uint8_t> bytes() && { return std::move(bytes_); }

  private:
    std::vector<std::uint8_t> bytes_;
    std::size_t used_ = 0;
};

class BitReader {
  public:
    explicit BitReader(Bytes bytes) : bytes_(bytes) {}

    std::uint64_t take(unsigned bits) {
        std::uint64_t value = 0;
        for (unsigned k = 0; k < bits; ++k, ++used_) {
            check(used_ / 8 != bytes_.size(), "model is truncated");
            value |= std::uint64_t{bytes_[used_ / 8] >> used_ % 8 & 1u} << k;
        }
        return value;
    }
    unsigned take_small() {
        unsigned length = 0;
        while (take(1) == 0) check(++length <= 7, "model has a number that is too large");
        const unsigned high = 1u << length | static_cast<unsigned>(take(length));
        return (high - 1) * 2 + static_cast<unsigned>(take(1));
    }
    Bytes rest() {  // skip to the next byte boundary
        check(used_ % 8 == 0 || take(8 - used_ % 8) == 0, "model has nonzero padding bits");
        return bytes_.subspan(used_ / 8);
    }

  private:
    Bytes bytes_;
    std::size_t used_ = 0;
};

// Predicts the code of a frequency. In the first table it is predicted from the previous symbol, assuming
// that twice as wide a bin is twice as frequent; in the others from the same symbol of the previous table.
class Predictor {
  public:
    Predictor(std::span<const Bin> bins, const FrequencyCodes* previous) : bins_(bins), previous_(previous) {}

    unsigned operator()(std::span<const std::uint8_t> codes, std::size_t i) const {
        const int last = i > 0 ? codes[i - 1] : 0;
        if (previous_ == nullptr) {
            if (last == 0) return 0;
            const int wider =
                bins_.empty() ? 0 : static_cast<int>(bins_[i].bits) - static_cast<int>(bins_[i - 1].bits);
            return clamp(last + 8 * wider);
        }
        const int same = (*previous_)[i];
        if (same == 0) return 0;
        const bool both = last != 0 && (*previous_)[i - 1] != 0;
        return clamp(both ? same + last - (*previous_)[i - 1] : same);
    }

  private:
    static unsigned clamp(int code) {
        return static_cast<unsigned>(std::clamp(code, 0, static_cast<int>(max_code)));
    }
    std::span<const Bin> bins_;
    const FrequencyCodes* previous_;
};

unsigned zigzag(int value) { return static_cast<unsigned>(value < 0 ? -2 * value - 1 : 2 * value); }
int unzigzag(unsigned value) { return static_cast<int>(value >> 1) ^ -static_cast<int>(value & 1); }

void put_codes(BitWriter& bits, std::span<const std::uint8_t> codes, const Predictor& predict) {
    for (std::size_t i = 0; i < codes.size(); ++i)
        bits.put_small(zigzag(static_cast<int>(codes[i]) - static_cast<int>(predict(codes, i))));
}

FrequencyCodes take_codes(BitReader& bits, std::size_t count, const Predictor& predict) {
    FrequencyCodes codes(count);
    for (std::size_t i = 0; i < count; ++i) {
        const int code = static_cast<int>(predict(codes, i)) + unzigzag(bits.take_small());
        check(code >= 0 && code <= static_cast<int>(max_code), "model has an invalid frequency");
        codes[i] = static_cast<std::uint8_t>(code);
    }
    return codes;
}

// Write how a range of 2^width numbers is halved into bins; returns the index of the next bin.
std::size_t put_bins(BitWriter& bits, std::span<const Bin> bins, std::size_t i, unsigned width) {
    const bool is_bin = bins[i].bits == width;
    if (width > 0) bits.put(!is_bin, 1);
    if (is_bin) return i + 1;
    return put_bins(bits, bins, put_bins(bits, bins, i, width - 1), width - 1);
}

void take_bins(BitReader& bits, std::uint64_t lower, unsigned width, std::vector<Bin>& bins) {
    if (width == 0 || bits.take(1) == 0) {
        check(bins.size() != max_bins, "model has too many bins");
        bins.push_back({lower, width});
        return;
    }
    take_bins(bits, lower, width - 1, bins);
    take_bins(bits, lower + (std::uint64_t{1} << (width - 1)), width - 1, bins);
}

constexpr unsigned width_bits = std::bit_width(max_row_items - 1);
constexpr std::size_t column_states = vector_lanes * sizeof(std::uint32_t);

}  // namespace

std::vector<std::uint64_t> label_counts(Bytes labels, std::size_t count) {
    const ByteCounts counts = histogram(labels);
    return {counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(count)};
}

FrequencyCodes frequency_codes(std::span<const std::uint64_t> counts) {
    double total = 0;
    for (const std::uint64_t n : counts) total += static_cast<double>(n);
    const std::size_t largest = static_cast<std::size_t>(std::ranges::max_element(counts) - counts.begin());
    FrequencyCodes codes(counts.size());
    // Rare symbols are rounded up, so the others may have to be scaled down.
    for (double unit = frequency_unit;; unit *= 0.98) {
        std::uint32_t others = 0;
        for (std::size_t i = 0; i < counts.size(); ++i) {
            const double share = static_cast<double>(counts[i]) / total * unit;
            unsigned code = counts[i] == 0 ? 0 : 1;
            while (code != 0 && code < max_code &&
                   share * share > 1.0 * frequency_of(code) * frequency_of(code + 1))
                ++code;
            codes[i] = static_cast<std::uint8_t>(code);
            if (i != largest) others += frequency_of(code);
        }
        const double share = static_cast<double>(counts[largest]) / total * unit;
        if (others < frequency_unit && frequency_unit - others >= 0.97 * share) return codes;
    }
}

Frequencies frequencies_from(std::span<const std::uint8_t> codes) {
    const std::size_t largest = static_cast<std::size_t>(std::ranges::max_element(codes) - codes.begin());
    Frequencies frequencies(codes.size());
    std::uint32_t others = 0;
    for (std::size_t i = 0; i < codes.size(); ++i) {
        frequencies[i] = static_cast<std::uint16_t>(frequency_of(codes[i]));
        if (i != largest) others += frequencies[i];
    }
    check(codes[largest] != 0 && others < frequency_unit, "model has frequencies with an invalid sum");
    frequencies[largest] = static_cast<std::uint16_t>(frequency_unit - others);
    return frequencies;
}

std::vector<std::uint8_t> pack_model(const Model& model) {
    BitWriter bits;
    const Bin& last = model.bins.back();  // contains the top bit unless it is the only bin
    const unsigned width = last.lower == 0 ? last.bits : static_cast<unsigned>(std::bit_width(last.lower));
    bits.put(static_cast<unsigned>(model.mapping), 2);
    bits.put(model.drop, 6);
    bits.put(model.tables.size() - 1, 4);
    bits.put(model.width, width_bits);
    put_bins(bits, model.bins, 0, width);
    if (model.width != 0) {
        for (std::size_t sum = 1; sum < label_sums; ++sum)
            bits.put(model.table_of_sum[sum] - model.table_of_sum[sum - 1], 1);
        put_codes(bits, model.labels, {{}, nullptr});
    }
    for (std::size_t t = 0; t < model.tables.size(); ++t)
        put_codes(bits, model.tables[t], {model.bins, t == 0 ? nullptr : &model.tables[t - 1]});
    if (model.width != 0) {
        const FrequencyCodes codes = frequency_codes(label_counts(model.columns, scale_labels));
        put_codes(bits, codes, {{}, nullptr});
        const Frequencies frequencies = frequencies_from(codes);
        RansEncoder coder(model.width, 1);
        coder.run({&frequencies, 1}, nullptr, model.columns);
        bits.append(coder.states());
        bits.append(coder.words());
    }
    return std::move(bits).bytes();
}

Model unpack_model(Bytes bytes, std::size_t itemsize) {
    BitReader bits(bytes);
    Model model;
    const auto mapping = static_cast<unsigned>(bits.take(2));
    check(mapping < mappings, "model has an unknown mapping");
    model.mapping = static_cast<Mapping>(mapping);
    model.drop = static_cast<unsigned>(bits.take(6));
    const std::size_t tables = bits.take(4) + 1;
    model.width = bits.take(width_bits);
    take_bins(bits, 0, static_cast<unsigned>(8 * itemsize), model.bins);
    const unsigned needs = model.drop + (model.mapping == Mapping::sign_last);
    check(model.drop == 0 ||
              (model.mapping != Mapping::zigzag &&
               !(std::ranges::any_of(model.bins, [&](const Bin& bin) { return bin.bits < needs; }))),
          "model drops bits that its bins need");
    if (model.width != 0) {
        check(model.width >= min_row_items, "model has rows that are too short");
        for (std::size_t sum = 1; sum < label_sums; ++sum)
            model.table_of_sum[sum] = static_cast<std::uint8_t>(model.table_of_sum[sum - 1] + bits.take(1));
        model.labels = take_codes(bits, row_labels, {{}, nullptr});
    }
    check(model.table_of_sum.back() == tables - 1, "model has unused tables");
    for (std::size_t t = 0; t < tables; ++t)
        model.tables.push_back(
            take_codes(bits, model.bins.size(), {model.bins, t == 0 ? nullptr : &model.tables[t - 1]}));
    if (model.width == 0) {
        check(bits.rest().empty(), "model has trailing bytes");
        return model;
    }
    Slots slots;
    append_slots(frequencies_from(take_codes(bits, scale_labels, {{}, nullptr})), slots);
    const Bytes rest = bits.rest();
    check(rest.size() >= column_states, "model is truncated");
    const std::vector<std::uint8_t> contexts(model.width);
    model.columns.resize(model.width);
    RansDecoder coder(rest, rest.subspan(column_states), 1);
    coder.run(slots.data(), contexts.data(), model.width, model.columns.data());
    coder.finish();
    return model;
}

}  // namespace slimtensors::bins
