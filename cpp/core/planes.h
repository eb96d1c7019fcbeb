#pragma once
#include "core/bytes.h"
#include "core/dispatch.h"

namespace slimtensors {

// Items of 1, 2, 4 or 8 bytes are split into byte planes: plane j contains byte j of every item, lowest byte
// first. If `rotated`, items are first rotated left by one bit, so that the exponent of a float fills the top
// byte and the sign joins the mantissa. Items of one byte are never rotated.
struct ItemFormat {
    std::size_t itemsize;
    bool rotated;
};

// Throw std::invalid_argument unless `bytes` is a whole number of items of a valid format.
void check_planes(std::size_t bytes, ItemFormat format);

// Copy one plane of `count` items.
void take_plane(const std::uint8_t* items, std::size_t count, ItemFormat format, std::size_t plane,
                std::uint8_t* to);

// Reassemble items from all of their planes.
void join_planes(const std::uint8_t* const* planes, std::size_t count, ItemFormat format,
                 std::uint8_t* items);

namespace core {

// For items of 2, 4 or 8 bytes.
struct PlaneKernels {
    void (*take)(const std::uint8_t* items, std::size_t count, ItemFormat format, std::size_t plane,
                 std::uint8_t* to);
    void (*join)(const std::uint8_t* const* planes, std::size_t count, ItemFormat format,
                 std::uint8_t* items);
};

namespace plain {
extern const PlaneKernels plane_kernels;
}
namespace avx2 {
extern const PlaneKernels plane_kernels;
}

}  // namespace core
}  // namespace slimtensors
