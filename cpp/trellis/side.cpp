#include "trellis/side.h"

#include <algorithm>

#include "core/check.h"

namespace slimtensors::trellis {
namespace {

constexpr unsigned max_bits = 12;
constexpr std::size_t head_bytes = 2 + 1 + 4;  // minimum, bits, size of the code

// The probability that a bit is one, in units of 2^-16, learned from the bits before it: quickly at first.
class Bit {
  public:
    std::uint32_t probability() const { return probability_; }
    void learn(unsigned bit) {
        const std::int32_t target = bit ? 65535 : 0;
        const std::int32_t change = (target - static_cast<std::int32_t>(probability_)) / (seen_ + 2);
        probability_ = static_cast<std::uint16_t>(
            std::clamp(static_cast<std::int32_t>(probability_) + change, 64, 65472));
        if (seen_ < 60) ++seen_;
    }

  private:
    std::uint16_t probability_ = 32768;
    std::int32_t seen_ = 0;
};

// A carry-less arithmetic coder with 32-bit bounds.
struct Interval {
    std::uint32_t low = 0, high = 0xffffffff;

    std::uint32_t split(const Bit& bit) const {
        return low + static_cast<std::uint32_t>(std::uint64_t{high - low} * bit.probability() >> 16);
    }
    void choose(unsigned bit, std::uint32_t middle) { bit ? high = middle : low = middle + 1; }
    bool has_common_byte() const { return ((low ^ high) >> 24) == 0; }
    void shift() {
        low <<= 8;
        high = high << 8 | 255;
    }
};

}  // namespace

std::vector<std::uint8_t> pack_vector(std::span<const std::int16_t> values) {
    const std::int16_t least =
        values.empty() ? std::int16_t{0} : *std::min_element(values.begin(), values.end());
    const int range = values.empty() ? 0 : *std::max_element(values.begin(), values.end()) - least;
    const auto bits = static_cast<unsigned>(std::bit_width(static_cast<unsigned>(range)));
    check(bits <= max_bits, "values differ by more than 4095");
    std::vector<std::uint8_t> out(head_bytes);
    store(out.data(), least);
    out[2] = static_cast<std::uint8_t>(bits);
    std::vector<Bit> model(std::size_t{1} << bits);
    Interval interval;
    for (const std::int16_t value : values) {
        const auto number = static_cast<unsigned>(value - least);
        std::size_t node = 1;
        for (unsigned b = bits; b-- > 0;) {
            const unsigned bit = number >> b & 1;
            interval.choose(bit, interval.split(model[node]));
            model[node].learn(bit);
            node = node * 2 + bit;
            for (; interval.has_common_byte(); interval.shift())
                out.push_back(static_cast<std::uint8_t>(interval.low >> 24));
        }
    }
    if (bits != 0)  // enough bytes to select a number inside the interval; missing ones are read as zero
        out.push_back(static_cast<std::uint8_t>((interval.low >> 24) + 1));
    store(out.data() + 3, static_cast<std::uint32_t>(out.size() - head_bytes));
    return out;
}

std::size_t unpack_vector(Bytes bytes, std::span<std::int16_t> values) {
    check(bytes.size() >= head_bytes, "list of steps or classes is truncated");
    const auto least = load<std::int16_t>(bytes.data());
    const unsigned bits = bytes[2];
    const std::size_t size = load<std::uint32_t>(bytes.data() + 3);
    check(bits <= max_bits && size <= bytes.size() - head_bytes, "list of steps or classes is malformed");
    check(least + (1 << bits) - 1 <= 32767, "list of steps or classes is out of range");
    const Bytes code = bytes.subspan(head_bytes, size);
    std::size_t at = 0;
    const auto next = [&] { return at < code.size() ? code[at++] : (++at, std::uint8_t{0}); };
    std::uint32_t number = 0;
    if (bits != 0)
        for (int i = 0; i < 4; ++i) number = number << 8 | next();
    std::vector<Bit> model(std::size_t{1} << bits);
    Interval interval;
    for (std::int16_t& value : values) {
        std::size_t node = 1;
        for (unsigned b = bits; b-- > 0;) {
            const std::uint32_t middle = interval.split(model[node]);
            const unsigned bit = number <= middle;
            interval.choose(bit, middle);
            model[node].learn(bit);
            node = node * 2 + bit;
            for (; interval.has_common_byte(); interval.shift()) number = number << 8 | next();
            check(at <= code.size() + 4, "list of steps or classes is truncated");
        }
        value = static_cast<std::int16_t>(least + static_cast<int>(node - (std::size_t{1} << bits)));
    }
    return head_bytes + size;
}

}  // namespace slimtensors::trellis
