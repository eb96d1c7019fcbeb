// Any items: best and plain kernels find and gather the same items, and scattering restores the bytes.
#include "bitmask/bitmask.h"
#include "core/counting.h"
#include "fuzz/input.h"

using namespace slimtensors;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t itemsize = std::size_t{1} << input.number(5);
    const std::size_t row = input.number(200) + 1;
    const std::size_t rows = input.left() / (row * itemsize);
    const std::vector<std::uint8_t> items = input.bytes(rows * row * itemsize);

    std::vector<std::vector<std::uint8_t>> masks;
    std::vector<ZeroCounts> zeros;
    fuzz::on_best_and_plain([&] {
        std::vector<std::uint8_t> mask(rows * ceil_div(row, 8), 0xff);
        const std::size_t count = bitmask::find(items, itemsize, row, mask);
        zeros.push_back(count_zeros(items, itemsize));
        fuzz::require(count == popcount(mask) && count + zeros.back().zero == rows * row);
        std::vector<std::uint8_t> values(count * itemsize);
        bitmask::gather(items, itemsize, row, mask, values);
        std::vector<std::uint8_t> again(items.size(), 0xa5);
        bitmask::scatter(mask, row, values, itemsize, again);
        fuzz::require(again == items);
        masks.push_back(mask);
    });
    fuzz::require(masks[0] == masks[1] && zeros[0].negative_zero == zeros[1].negative_zero);
    return 0;
}
