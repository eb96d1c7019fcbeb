// Bit mask kernels in portable C++: one item at a time, without branches on the mask.
#include "bitmask/kernels.h"

namespace slimtensors {
namespace {

template <class Item>
struct Group {
    static constexpr std::size_t itemsize = sizeof(Item);

    static std::uint8_t find(const std::uint8_t* items) {
        unsigned mask = 0;
        for (unsigned k = 0; k < group_items; ++k)
            mask |= unsigned{load<Item>(items + k * itemsize) != 0} << k;
        return static_cast<std::uint8_t>(mask);
    }

    static std::uint8_t* gather(const std::uint8_t* items, std::uint8_t mask, std::uint8_t* to) {
        for (unsigned k = 0; k < group_items; ++k) {
            store(to, load<Item>(items + k * itemsize));  // the next one overwrites it unless it is kept
            to += (mask >> k & 1u) * itemsize;
        }
        return to;
    }

    static const std::uint8_t* scatter(std::uint8_t mask, const std::uint8_t* from, std::uint8_t* items) {
        for (unsigned k = 0; k < group_items; ++k) {
            const unsigned bit = mask >> k & 1u;
            store(items + k * itemsize, static_cast<Item>(load<Item>(from) & -static_cast<Item>(bit)));
            from += bit * itemsize;
        }
        return from;
    }
};

__extension__ using Item16 = unsigned __int128;

constexpr BitmaskKernels kernels[] = {kernels_of<Group<std::uint8_t>>(), kernels_of<Group<std::uint16_t>>(),
                                      kernels_of<Group<std::uint32_t>>(), kernels_of<Group<std::uint64_t>>(),
                                      kernels_of<Group<Item16>>()};

}  // namespace

const BitmaskKernels& bitmask_kernels_plain(std::size_t itemsize) {
    return kernels[std::countr_zero(itemsize)];
}

}  // namespace slimtensors
