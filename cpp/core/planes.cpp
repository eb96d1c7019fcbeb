#include "core/planes.h"

#include "core/check.h"

namespace slimtensors {
namespace {

constexpr KernelTable<core::PlaneKernels> kernels{.plain = &core::plain::plane_kernels,
                                                  .avx2 = SLIM_X86(&core::avx2::plane_kernels)};

}  // namespace

void check_planes(std::size_t bytes, ItemFormat format) {
    check_items(bytes, format.itemsize);
    check(!format.rotated || format.itemsize > 1, "items of one byte cannot be rotated");
}

void take_plane(const std::uint8_t* items, std::size_t count, ItemFormat format, std::size_t plane,
                std::uint8_t* to) {
    if (format.itemsize == 1)
        std::memcpy(to, items, count);
    else
        kernels.active().take(items, count, format, plane, to);
}

void join_planes(const std::uint8_t* const* planes, std::size_t count, ItemFormat format,
                 std::uint8_t* items) {
    if (format.itemsize == 1)
        std::memcpy(items, planes[0], count);
    else
        kernels.active().join(planes, count, format, items);
}

}  // namespace slimtensors
