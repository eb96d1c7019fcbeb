// The steps and classes of rows and columns, in few bytes.
#pragma once
#include "trellis/trellis.h"

namespace slimtensors::trellis {

// A list of small integers with an adaptive binary model: the minimum, the number of bits of the others above
// it, and their arithmetic code.
std::vector<std::uint8_t> pack_vector(std::span<const std::int16_t> values);
// Read `values.size()` integers; return the number of bytes used. Throws std::invalid_argument if they do not
// suffice.
std::size_t unpack_vector(Bytes bytes, std::span<std::int16_t> values);

}  // namespace slimtensors::trellis
