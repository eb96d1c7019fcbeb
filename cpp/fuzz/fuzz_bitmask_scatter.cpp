// Any mask, values and sizes: refused before a byte is written, or expanded as the definition says.
#include "bitmask/bitmask.h"
#include "core/counting.h"
#include "fuzz/input.h"

using namespace slimtensors;

namespace {

std::vector<std::uint8_t> slow_scatter(Bytes mask, std::size_t row, Bytes values, std::size_t itemsize,
                                       std::size_t size) {
    std::vector<std::uint8_t> items(size);
    std::size_t next = 0;
    for (std::size_t i = 0; i < size / itemsize; ++i) {
        const std::size_t r = i / row, k = i % row;
        if (!(mask[r * ((row + 7) / 8) + k / 8] >> k % 8 & 1)) continue;
        std::memcpy(&items[i * itemsize], &values[next], itemsize);
        next += itemsize;
    }
    fuzz::require(next == values.size());
    return items;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    // Mostly sizes that fit together, because nothing else gets past the first check.
    const bool sound = input.number(8) != 0;
    const std::size_t itemsize = sound ? std::size_t{1} << input.number(5) : input.number(40);
    const std::size_t row = input.number(300) + (sound ? 1 : 0);
    const std::size_t rows = input.number(1000) % (1 + 4000 / (row + 1));
    const std::size_t items_size = rows * row * itemsize + (sound ? 0 : input.number(3));
    std::vector<std::uint8_t> mask = input.bytes(rows * ((row + 7) / 8) + (sound ? 0 : input.number(3)));
    if (sound && row % 8 != 0)
        for (std::size_t r = 1; r <= rows; ++r) mask[r * ((row + 7) / 8) - 1] &= 0xff >> (8 - row % 8);
    const std::vector<std::uint8_t> values =
        input.bytes(sound ? popcount(mask) * itemsize : input.number(items_size + 2));

    fuzz::on_both_paths([&] {
        std::vector<std::uint8_t> items(items_size, 0xa5);
        if (!fuzz::accepts([&] { bitmask_scatter(mask, row, values, itemsize, items); })) {
            fuzz::require(!sound && items == std::vector<std::uint8_t>(items_size, 0xa5));
            return;
        }
        fuzz::require(items == slow_scatter(mask, row, values, itemsize, items_size));
        std::vector<std::uint8_t> again(values.size(), 0xa5);
        bitmask_gather(items, itemsize, row, mask, again);
        fuzz::require(again == values);
    });
    return 0;
}
