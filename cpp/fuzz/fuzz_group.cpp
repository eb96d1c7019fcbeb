// Any items, grouped by any floats: grouping round-trips.
#include "fuzz/input.h"
#include "residual/grouping.h"

using namespace slimtensors;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t itemsize = input.number(10);
    const unsigned mantissa = static_cast<unsigned>(input.number(70));
    const std::size_t half = input.left() / 2;
    const std::vector<std::uint8_t> items = input.bytes(half), by = input.bytes(half);
    std::vector<std::uint8_t> grouped(half), back(half);
    if (!fuzz::accepts([&] { residual::group(items, by, itemsize, mantissa, grouped); })) return 0;
    residual::ungroup(grouped, by, itemsize, mantissa, back);
    fuzz::require(back == items);
    return 0;
}
