// Any mask, values and sizes: rejected before a byte is written, or expanded as the reference does.
#include "bitmask/bitmask.h"
#include "core/counting.h"
#include "fuzz/input.h"

using namespace slimtensors;

namespace {

std::vector<std::uint8_t> reference_scatter(Bytes mask, std::size_t row, Bytes values, std::size_t itemsize,
                                            std::size_t size) {
    std::vector<std::uint8_t> items(size);
    std::size_t next = 0;
    for (std::size_t i = 0; i < size / itemsize; ++i) {
        const std::size_t r = i / row, k = i % row;
        if (!(mask[r * ceil_div(row, 8) + k / 8] >> k % 8 & 1)) continue;
        std::memcpy(&items[i * itemsize], &values[next], itemsize);
        next += itemsize;
    }
    fuzz::require(next == values.size());
    return items;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    // Mostly consistent sizes: nothing else passes the first check.
    const bool valid = input.number(8) != 0;
    const std::size_t itemsize = valid ? std::size_t{1} << input.number(5) : input.number(40);
    const std::size_t row = input.number(300) + (valid ? 1 : 0);
    const std::size_t rows = input.number(1000) % (1 + 4000 / (row + 1));
    const std::size_t items_size = rows * row * itemsize + (valid ? 0 : input.number(3));
    std::vector<std::uint8_t> mask = input.bytes(rows * ceil_div(row, 8) + (valid ? 0 : input.number(3)));
    if (valid && row % 8 != 0)
        for (std::size_t r = 1; r <= rows; ++r) mask[r * ceil_div(row, 8) - 1] &= 0xff >> (8 - row % 8);
    const std::vector<std::uint8_t> values =
        input.bytes(valid ? popcount(mask) * itemsize : input.number(items_size + 2));

    fuzz::on_best_and_plain([&] {
        std::vector<std::uint8_t> items(items_size, 0xa5);
        if (!fuzz::accepts([&] { bitmask::scatter(mask, row, values, itemsize, items); })) {
            fuzz::require(!valid && items == std::vector<std::uint8_t>(items_size, 0xa5));
            return;
        }
        fuzz::require(items == reference_scatter(mask, row, values, itemsize, items_size));
        std::vector<std::uint8_t> again(values.size(), 0xa5);
        bitmask::gather(items, itemsize, row, mask, again);
        fuzz::require(again == values);
    });
    return 0;
}
