// Any coded bytes: both paths refuse, or both give the same mask, and encoding that gives the same bytes.
#include <optional>

#include "masks/density.h"
#include "masks/density_kernels.h"
#include "fuzz/input.h"

using namespace slimtensors;

namespace {

// A mask large enough for the number of states in question, from little input.
std::vector<std::uint8_t> repeat(const std::vector<std::uint8_t>& piece, std::size_t size) {
    std::vector<std::uint8_t> out(size);
    for (std::size_t i = 0; i < size && !piece.empty(); ++i) out[i] = piece[i % piece.size()];
    return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    constexpr std::size_t sizes[] = {200, 5000, 1 << 15, 1 << 17};
    const std::size_t width = 1 + input.number(100);
    const std::size_t mask_size = sizes[input.number(4)] + input.number(200);
    const bool damage = input.number(2) == 1;
    std::vector<std::uint8_t> rows = input.bytes(mask_size / width + (mask_size % width != 0));
    std::vector<std::uint8_t> columns = repeat(input.bytes(16), 8 * width);
    std::vector<std::uint8_t> chances = repeat(input.bytes(64), density_pairs);
    for (std::uint8_t& label : rows) label %= density_classes;
    for (std::uint8_t& label : columns) label %= density_classes;
    for (std::uint8_t& code : chances)
        if (!is_chance(code)) code &= 0x3f;

    std::vector<std::uint8_t> coded = input.bytes(input.left());
    if (damage) {  // bytes that decode further than random ones
        const std::size_t at = input.number(mask_size);
        const std::vector<std::uint8_t> mask = repeat(coded, mask_size);
        coded.assign(mask_size, 0);
        coded.resize(density_encode(mask, rows, columns, chances, coded));
        if (at < coded.size()) coded[at] ^= 1;
        if (at % 3 == 0) coded.resize(coded.size() / 2);
    }
    std::optional<std::vector<std::uint8_t>> first;
    bool refused = false;
    fuzz::on_both_paths([&] {
        std::vector<std::uint8_t> mask(mask_size, 0xa5);
        if (!fuzz::accepts([&] { density_decode(coded, rows, columns, chances, mask); })) {
            fuzz::require(!first);
            refused = true;
            return;
        }
        fuzz::require(!refused && (!first || *first == mask));
        first = mask;
    });
    if (!first) return 0;
    std::vector<std::uint8_t> again(mask_size);
    again.resize(density_encode(*first, rows, columns, chances, again));
    fuzz::require(again == coded || coded.size() == mask_size);  // a copy need not have been necessary
    return 0;
}
