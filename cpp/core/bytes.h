#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace slimtensors {

static_assert(std::endian::native == std::endian::little, "files are little-endian and are used as they are");

using Bytes = std::span<const std::uint8_t>;
using MutableBytes = std::span<std::uint8_t>;

// Buffers come from files at any alignment, hence memcpy. Static, so that no unit compiled for a newer
// processor can lend its copy to the plain units.
template <class T>
static inline T load(const std::uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T>
static inline void store(std::uint8_t* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

}  // namespace slimtensors
