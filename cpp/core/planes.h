#pragma once
#include "core/bytes.h"

namespace slimtensors {

// Items of 1, 2, 4 or 8 bytes, taken apart into as many planes: plane j holds byte j of every item, the
// lowest byte first. Floats are rotated left by one bit before, so that the exponent fills the top byte and
// the sign joins the mantissa; never those of one byte.
struct ItemKind {
    std::size_t size;
    bool rotated;
};

// Copy one plane of `count` items.
void take_plane(const std::uint8_t* items, std::size_t count, ItemKind kind, std::size_t plane,
                std::uint8_t* to);

// Undo taking all `kind.size` planes.
void join_planes(const std::uint8_t* const* planes, std::size_t count, ItemKind kind, std::uint8_t* items);

// How many items at the front were done in whole vectors; the caller does the rest.
std::size_t take_plane_avx2(const std::uint8_t* items, std::size_t count, ItemKind kind, std::size_t plane,
                            std::uint8_t* to);
std::size_t join_planes_avx2(const std::uint8_t* const* planes, std::size_t count, ItemKind kind,
                             std::uint8_t* items);

}  // namespace slimtensors
