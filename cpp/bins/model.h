#pragma once
#include <array>
#include <vector>

#include "core/bytes.h"

namespace slimtensors {

inline constexpr std::size_t most_bins = 256, most_tables = 16, scale_labels = 16;
inline constexpr std::size_t row_labels = 2 * scale_labels;  // with and without dropped bits
inline constexpr std::size_t label_sums = 2 * scale_labels - 1;
inline constexpr std::size_t narrowest_row = 8, widest_row = std::size_t{1} << 20;
inline constexpr unsigned frequency_bits = 12;
inline constexpr std::uint32_t frequency_unit = 1u << frequency_bits;

// How an item of w bits becomes the number that is looked up among the bins.
enum class Mapping : std::uint8_t {
    plain = 0,
    sign_last = 1,  // rotated left by one bit
    zigzag = 2,     // 0, -1, 1, -2, … become 0, 1, 2, 3, …
};
inline constexpr unsigned mappings = 3;

// The numbers from `lower` to `lower` + 2^bits - 1, where 2^bits divides `lower`.
struct Bin {
    std::uint64_t lower;
    unsigned bits;
};

inline std::uint64_t last_of(const Bin& bin) {
    return bin.bits == 64 ? ~std::uint64_t{0} : bin.lower | ((std::uint64_t{1} << bin.bits) - 1);
}

using Frequencies = std::vector<std::uint16_t>;  // of all symbols, together `frequency_unit`
using Codes = std::vector<std::uint8_t>;         // frequencies as they are stored

// All that the chunks of a tensor share. An item's table is table_of_sum[label of its row + label of its
// column].
struct BinsModel {
    Mapping mapping = Mapping::plain;
    unsigned drop =
        0;  // low bits, but for a sign there, that are zero in marked rows; in all if there are none
    std::size_t width = 0;  // items of a row; 0: there are no rows
    std::vector<Bin> bins;  // in order, without gaps
    std::vector<Codes> tables;
    std::array<std::uint8_t, label_sums> table_of_sum{};
    Codes labels;                       // of rows: scale, plus 16 where marked
    std::vector<std::uint8_t> columns;  // `width` labels
};

// A frequency as it is stored: exact below 16, then in eight steps for each doubling. 0 to `highest_code`.
constexpr std::uint32_t frequency_of(unsigned code) {
    return code < 8 ? code : (8 + (code & 7)) << ((code >> 3) - 1);
}
inline constexpr unsigned highest_code = 80;
static_assert(frequency_of(highest_code) == frequency_unit);

// Nearest codes for counts; the most frequent symbol takes what the others leave. Counts must not be all
// zero.
Codes frequency_codes(std::span<const std::uint64_t> counts);
// Throws std::invalid_argument if they leave nothing.
Frequencies frequencies_from(std::span<const std::uint8_t> codes);

std::vector<std::uint8_t> pack_bins_model(const BinsModel& model);
// Throws std::invalid_argument for bytes that are no model of items of this size.
BinsModel unpack_bins_model(Bytes bytes, std::size_t itemsize);

}  // namespace slimtensors
