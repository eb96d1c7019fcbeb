#include "core/planes.h"

#include "core/dispatch.h"

namespace slimtensors {
namespace {

template <class Item>
void take(const std::uint8_t* items, std::size_t begin, std::size_t count, bool rotated, std::size_t plane,
          std::uint8_t* to) {
    for (std::size_t i = begin; i < count; ++i) {
        const Item item = load<Item>(items + i * sizeof(Item));
        to[i] = static_cast<std::uint8_t>(std::rotl(item, rotated) >> 8 * plane);
    }
}

template <class Item>
void join(const std::uint8_t* const* planes, std::size_t begin, std::size_t count, bool rotated,
          std::uint8_t* items) {
    for (std::size_t i = begin; i < count; ++i) {
        Item item = 0;
        for (std::size_t j = 0; j < sizeof(Item); ++j)
            item = static_cast<Item>(item | Item{planes[j][i]} << 8 * j);
        store(items + i * sizeof(Item), std::rotr(item, rotated));
    }
}

}  // namespace

void take_plane(const std::uint8_t* items, std::size_t count, ItemKind kind, std::size_t plane,
                std::uint8_t* to) {
    if (kind.size == 1) {
        std::memcpy(to, items, count);
        return;
    }
    std::size_t done = 0;
#if defined(SLIMTENSORS_X86)
    if (cpu().avx2) done = take_plane_avx2(items, count, kind, plane, to);
#endif
    switch (kind.size) {
        case 2:
            return take<std::uint16_t>(items, done, count, kind.rotated, plane, to);
        case 4:
            return take<std::uint32_t>(items, done, count, kind.rotated, plane, to);
        default:
            return take<std::uint64_t>(items, done, count, kind.rotated, plane, to);
    }
}

void join_planes(const std::uint8_t* const* planes, std::size_t count, ItemKind kind, std::uint8_t* items) {
    if (kind.size == 1) {
        std::memcpy(items, planes[0], count);
        return;
    }
    std::size_t done = 0;
#if defined(SLIMTENSORS_X86)
    if (cpu().avx2) done = join_planes_avx2(planes, count, kind, items);
#endif
    switch (kind.size) {
        case 2:
            return join<std::uint16_t>(planes, done, count, kind.rotated, items);
        case 4:
            return join<std::uint32_t>(planes, done, count, kind.rotated, items);
        default:
            return join<std::uint64_t>(planes, done, count, kind.rotated, items);
    }
}

}  // namespace slimtensors
