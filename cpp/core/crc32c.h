#pragma once
#include "core/bytes.h"

namespace slimtensors {

// CRC-32C (Castagnoli) as in iSCSI, ext4 and zarr. `seed` is the checksum of the bytes before, 0 for none.
std::uint32_t crc32c(Bytes data, std::uint32_t seed = 0);

// Checksum of two pieces laid end to end, from the checksums of both and the length of the second.
std::uint32_t crc32c_join(std::uint32_t a, std::uint32_t b, std::uint64_t length_b);

// The raw remainder of `data`, continuing from `state`; crc32c() inverts it before and after.
// Callable only where cpu().crc32c is set.
std::uint32_t crc32c_hardware(Bytes data, std::uint32_t state);

}  // namespace slimtensors
