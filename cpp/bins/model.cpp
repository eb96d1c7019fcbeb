#include "bins/model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>

#include "bins/rans.h"

namespace slimtensors {
namespace {

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }

class BitWriter {
  public:
    void put(std::uint64_t value, unsigned bits) {
        for (unsigned k = 0; k < bits; ++k) {
            if (used_ % 8 == 0) bytes_.push_back(0);
            bytes_.back() |= static_cast<std::uint8_t>((value >> k & 1) << used_++ % 8);
        }
    }
    // Elias gamma of value / 2 + 1, then the lowest bit: short for small numbers.
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
            if (used_ / 8 == bytes_.size()) refuse("a model is cut off");
            value |= std::uint64_t{bytes_[used_ / 8] >> used_ % 8 & 1u} << k;
        }
        return value;
    }
    unsigned take_small() {
        unsigned length = 0;
        while (take(1) == 0)
            if (++length > 7) refuse("a model has a number that is too large");
        const unsigned high = 1u << length | static_cast<unsigned>(take(length));
        return (high - 1) * 2 + static_cast<unsigned>(take(1));
    }
    Bytes rest() {  // the whole bytes that follow
        if (used_ % 8 != 0 && take(8 - used_ % 8) != 0) refuse("a model has bits where none belong");
        return bytes_.subspan(used_ / 8);
    }

  private:
    Bytes bytes_;
    std::size_t used_ = 0;
};

// What the code of a frequency probably is: like that of the symbol before in the first table, where a bin
// that is twice as wide is twice as frequent, and like that of the same symbol in the table before in the
// others.
class Guess {
  public:
    Guess(std::span<const Bin> bins, const Codes* before) : bins_(bins), before_(before) {}

    unsigned operator()(std::span<const std::uint8_t> codes, std::size_t i) const {
        const int last = i > 0 ? codes[i - 1] : 0;
        if (before_ == nullptr) {
            if (last == 0) return 0;
            const int wider =
                bins_.empty() ? 0 : static_cast<int>(bins_[i].bits) - static_cast<int>(bins_[i - 1].bits);
            return clamped(last + 8 * wider);
        }
        const int same = (*before_)[i];
        if (same == 0) return 0;
        const bool both = last != 0 && (*before_)[i - 1] != 0;
        return clamped(both ? same + last - (*before_)[i - 1] : same);
    }

  private:
    static unsigned clamped(int code) {
        return static_cast<unsigned>(std::clamp(code, 0, static_cast<int>(highest_code)));
    }
    std::span<const Bin> bins_;
    const Codes* before_;
};

unsigned zigzag(int value) { return static_cast<unsigned>(value < 0 ? -2 * value - 1 : 2 * value); }
int unzigzag(unsigned value) { return static_cast<int>(value >> 1) ^ -static_cast<int>(value & 1); }

void put_codes(BitWriter& bits, std::span<const std::uint8_t> codes, const Guess& guess) {
    for (std::size_t i = 0; i < codes.size(); ++i)
        bits.put_small(zigzag(static_cast<int>(codes[i]) - static_cast<int>(guess(codes, i))));
}

Codes take_codes(BitReader& bits, std::size_t count, const Guess& guess) {
    Codes codes(count);
    for (std::size_t i = 0; i < count; ++i) {
        const int code = static_cast<int>(guess(codes, i)) + unzigzag(bits.take_small());
        if (code < 0 || code > static_cast<int>(highest_code)) refuse("a model has an impossible frequency");
        codes[i] = static_cast<std::uint8_t>(code);
    }
    return codes;
}

// Halve a range of 2^width numbers until it is a bin, and return the index of the bin after it.
std::size_t put_bins(BitWriter& bits, std::span<const Bin> bins, std::size_t i, unsigned width) {
    const bool whole = bins[i].bits == width;
    if (width > 0) bits.put(!whole, 1);
    if (whole) return i + 1;
    return put_bins(bits, bins, put_bins(bits, bins, i, width - 1), width - 1);
}

void take_bins(BitReader& bits, std::uint64_t lower, unsigned width, std::vector<Bin>& bins) {
    if (width == 0 || bits.take(1) == 0) {
        if (bins.size() == most_bins) refuse("a model has too many bins");
        bins.push_back({lower, width});
        return;
    }
    take_bins(bits, lower, width - 1, bins);
    take_bins(bits, lower + (std::uint64_t{1} << (width - 1)), width - 1, bins);
}

constexpr unsigned width_bits = std::bit_width(widest_row - 1);
constexpr std::size_t column_states = bins_lanes * sizeof(std::uint32_t);

}  // namespace

Codes frequency_codes(std::span<const std::uint64_t> counts) {
    double total = 0;
    for (const std::uint64_t n : counts) total += static_cast<double>(n);
    const std::size_t most = static_cast<std::size_t>(std::ranges::max_element(counts) - counts.begin());
    Codes codes(counts.size());
    // Rare symbols get more than their share, so that the others may have to take less than theirs.
    for (double unit = frequency_unit;; unit *= 0.98) {
        std::uint32_t others = 0;
        for (std::size_t i = 0; i < counts.size(); ++i) {
            const double share = static_cast<double>(counts[i]) / total * unit;
            unsigned code = counts[i] == 0 ? 0 : 1;
            while (code != 0 && code < highest_code &&
                   share * share > 1.0 * frequency_of(code) * frequency_of(code + 1))
                ++code;
            codes[i] = static_cast<std::uint8_t>(code);
            if (i != most) others += frequency_of(code);
        }
        const double share = static_cast<double>(counts[most]) / total * unit;
        if (others < frequency_unit && frequency_unit - others >= 0.97 * share) return codes;
    }
}

Frequencies frequencies_from(std::span<const std::uint8_t> codes) {
    const std::size_t most = static_cast<std::size_t>(std::ranges::max_element(codes) - codes.begin());
    Frequencies frequencies(codes.size());
    std::uint32_t others = 0;
    for (std::size_t i = 0; i < codes.size(); ++i) {
        frequencies[i] = static_cast<std::uint16_t>(frequency_of(codes[i]));
        if (i != most) others += frequencies[i];
    }
    if (codes[most] == 0 || others >= frequency_unit) refuse("a model has frequencies that do not add up");
    frequencies[most] = static_cast<std::uint16_t>(frequency_unit - others);
    return frequencies;
}

std::vector<std::uint8_t> pack_bins_model(const BinsModel& model) {
    BitWriter bits;
    const Bin& last = model.bins.back();  // its lowest number has the top bit, unless it is the only bin
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
        std::array<std::uint64_t, scale_labels> counts{};
        for (const std::uint8_t label : model.columns) ++counts[label];
        const Codes codes = frequency_codes(counts);
        put_codes(bits, codes, {{}, nullptr});
        const Frequencies frequencies = frequencies_from(codes);
        BinsEncoder coder(model.width, 1);
        coder.run({&frequencies, 1}, nullptr, model.columns);
        bits.append(coder.states());
        bits.append(coder.words());
    }
    return std::move(bits).bytes();
}

BinsModel unpack_bins_model(Bytes bytes, std::size_t itemsize) {
    BitReader bits(bytes);
    BinsModel model;
    const auto mapping = static_cast<unsigned>(bits.take(2));
    if (mapping >= mappings) refuse("a model has an unknown mapping");
    model.mapping = static_cast<Mapping>(mapping);
    model.drop = static_cast<unsigned>(bits.take(6));
    const std::size_t tables = bits.take(4) + 1;
    model.width = bits.take(width_bits);
    take_bins(bits, 0, static_cast<unsigned>(8 * itemsize), model.bins);
    const unsigned needs = model.drop + (model.mapping == Mapping::sign_last);
    if (model.drop != 0 &&
        (model.mapping == Mapping::zigzag ||
         std::ranges::any_of(model.bins, [&](const Bin& bin) { return bin.bits < needs; })))
        refuse("a model drops bits that its bins need");
    if (model.width != 0) {
        if (model.width < narrowest_row) refuse("a model has rows that are too narrow");
        for (std::size_t sum = 1; sum < label_sums; ++sum)
            model.table_of_sum[sum] = static_cast<std::uint8_t>(model.table_of_sum[sum - 1] + bits.take(1));
        model.labels = take_codes(bits, row_labels, {{}, nullptr});
    }
    if (model.table_of_sum.back() != tables - 1) refuse("a model has tables that nothing uses");
    for (std::size_t t = 0; t < tables; ++t)
        model.tables.push_back(
            take_codes(bits, model.bins.size(), {model.bins, t == 0 ? nullptr : &model.tables[t - 1]}));
    if (model.width == 0) {
        if (!bits.rest().empty()) refuse("a model has bytes where none belong");
        return model;
    }
    Slots slots;
    append_slots(frequencies_from(take_codes(bits, scale_labels, {{}, nullptr})), slots);
    const Bytes rest = bits.rest();
    if (rest.size() < column_states) refuse("a model is cut off");
    const std::vector<std::uint8_t> contexts(model.width);
    model.columns.resize(model.width);
    BinsDecoder coder(rest, rest.subspan(column_states), 1);
    coder.run(slots.data(), contexts.data(), model.width, model.columns.data());
    coder.finish();
    return model;
}

}  // namespace slimtensors
