#pragma once
#include <array>
#include <vector>

#include "core/bytes.h"

namespace slimtensors::bins {

inline constexpr std::size_t max_bins = 256, max_tables = 16, scale_labels = 16;
inline constexpr std::size_t row_labels = 2 * scale_labels;  // without and with dropped bits
inline constexpr std::size_t label_sums = 2 * scale_labels - 1;
inline constexpr std::size_t min_row_items = 8, max_row_items = std::size_t{1} << 20;
inline constexpr unsigned frequency_bits = 12;
inline constexpr std::uint32_t frequency_unit = 1u << frequency_bits;

// How an item of w bits is mapped to the number that is looked up among the bins.
enum class Mapping : std::uint8_t {
    plain = 0,
    sign_last = 1,  // rotated left by one bit
    zigzag = 2,     // 0, -1, 1, -2, … become 0, 1, 2, 3, …
};
inline constexpr unsigned mappings = 3;

// The numbers from `lower` to `lower` + 2^bits - 1; 2^bits divides `lower`.
struct Bin {
    std::uint64_t lower;
    unsigned bits;
};

inline std::uint64_t last_number(const Bin& bin) {
    return bin.bits == 64 ? ~std::uint64_t{0} : bin.lower | ((std::uint64_t{1} << bin.bits) - 1);
}

using Frequencies = std::vector<std::uint16_t>;    // of all symbols; they sum to `frequency_unit`
using FrequencyCodes = std::vector<std::uint8_t>;  // stored form of the frequencies

// The data that all chunks of a tensor share. An item uses table_of_sum[label of its row + label of its
// column].
struct Model {
    Mapping mapping = Mapping::plain;
    unsigned drop = 0;  // low bits, except a sign, that are zero in marked rows, or in all items without rows
    std::size_t width = 0;  // items per row; 0 without rows
    std::vector<Bin> bins;  // ascending, without gaps
    std::vector<FrequencyCodes> tables;
    std::array<std::uint8_t, label_sums> table_of_sum{};
    FrequencyCodes labels;              // frequencies of row labels: magnitude, plus 16 for marked rows
    std::vector<std::uint8_t> columns;  // `width` labels
};

// Decode a stored frequency: exact below 16, then eight steps per doubling. Codes are 0 to
// `max_code`.
constexpr std::uint32_t frequency_of(unsigned code) {
    return code < 8 ? code : (8 + (code & 7)) << ((code >> 3) - 1);
}
inline constexpr unsigned max_code = 80;
static_assert(frequency_of(max_code) == frequency_unit);

// Count labels below `count`.
std::vector<std::uint64_t> label_counts(Bytes labels, std::size_t count);

// Return the nearest codes for counts, not all zero. The most frequent symbol gets the remainder.
FrequencyCodes frequency_codes(std::span<const std::uint64_t> counts);
// Throws std::invalid_argument if no remainder is left.
Frequencies frequencies_from(std::span<const std::uint8_t> codes);

std::vector<std::uint8_t> pack_model(const Model& model);
// Throws std::invalid_argument unless the bytes are a model of items of this size.
Model unpack_model(Bytes bytes, std::size_t itemsize);

}  // namespace slimtensors::bins
