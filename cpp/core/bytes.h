#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "core/target.h"

namespace slimtensors {

static_assert(std::endian::native == std::endian::little, "file formats are little-endian");

using Bytes = std::span<const std::uint8_t>;
using MutableBytes = std::span<std::uint8_t>;

__extension__ using Uint128 = unsigned __int128;

inline namespace SLIM_TARGET {

// Unaligned access: buffers come from files at any offset.
template <class T>
inline T load(const std::uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T>
inline void store(std::uint8_t* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

}  // namespace SLIM_TARGET

constexpr std::size_t ceil_div(std::size_t n, std::size_t divisor) {
    return n / divisor + (n % divisor != 0);
}

}  // namespace slimtensors
