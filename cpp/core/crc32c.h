#pragma once
#include "core/bytes.h"
#include "core/dispatch.h"

namespace slimtensors {

// CRC-32C (Castagnoli), as in iSCSI, ext4 and zarr. `seed` is the checksum of the preceding bytes.
std::uint32_t crc32c(Bytes data, std::uint32_t seed = 0);

// Checksum of a concatenation, from the checksums of both parts and the length of the second.
std::uint32_t crc32c_join(std::uint32_t a, std::uint32_t b, std::uint64_t length_b);

namespace core {

struct Crc32cKernels {
    // Continue a raw remainder with `data`; crc32c() inverts it before and after.
    std::uint32_t (*update)(Bytes data, std::uint32_t state);
};

namespace plain {
extern const Crc32cKernels crc32c_kernels;
}
namespace crc {
extern const Crc32cKernels crc32c_kernels;
}

}  // namespace core
}  // namespace slimtensors
