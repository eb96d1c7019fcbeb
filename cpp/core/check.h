#pragma once
#include <bit>
#include <cstddef>
#include <stdexcept>

namespace slimtensors {

[[noreturn]] inline void fail(const char* message) { throw std::invalid_argument(message); }

// Throw std::invalid_argument unless `condition` is true.
inline void check(bool condition, const char* message) {
    if (!condition) [[unlikely]]
        fail(message);
}

// Check that items have 1, 2, 4 or 8 bytes and that `bytes` is a multiple of that.
inline void check_items(std::size_t bytes, std::size_t itemsize) {
    check(std::has_single_bit(itemsize) && itemsize <= 8, "itemsize must be 1, 2, 4 or 8");
    check(bytes % itemsize == 0, "size of items must be a multiple of itemsize");
}

// The same for items that may also have 16 bytes.
inline void check_wide_items(std::size_t bytes, std::size_t itemsize) {
    check(std::has_single_bit(itemsize) && itemsize <= 16, "itemsize must be 1, 2, 4, 8 or 16");
    check(bytes % itemsize == 0, "size of items must be a multiple of itemsize");
}

}  // namespace slimtensors
