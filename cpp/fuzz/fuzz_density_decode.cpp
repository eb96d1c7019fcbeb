// Any coded bytes: best and plain kernels reject them, or both give the same mask, and encoding it gives the
// same bytes.
#include <optional>

#include "fuzz/input.h"
#include "masks/density.h"
#include "masks/density_kernels.h"

using namespace slimtensors;

namespace {

// Repeats little input to a mask large enough for any number of states.
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
    const bool corrupt = input.number(2) == 1;
    std::vector<std::uint8_t> rows = input.bytes(ceil_div(mask_size, width));
    std::vector<std::uint8_t> columns = repeat(input.bytes(16), 8 * width);
    std::vector<std::uint8_t> chances = repeat(input.bytes(64), masks::density_pairs);
    for (std::uint8_t& label : rows) label %= masks::density_classes;
    for (std::uint8_t& label : columns) label %= masks::density_classes;
    for (std::uint8_t& code : chances)
        if (!masks::is_chance(code)) code &= 0x3f;

    std::vector<std::uint8_t> coded = input.bytes(input.left());
    if (corrupt) {  // corrupt valid data, which decodes further than random bytes
        const std::size_t at = input.number(mask_size);
        const std::vector<std::uint8_t> mask = repeat(coded, mask_size);
        coded.assign(mask_size, 0);
        coded.resize(masks::density_encode(mask, rows, columns, chances, coded));
        if (at < coded.size()) coded[at] ^= 1;
        if (at % 3 == 0) coded.resize(coded.size() / 2);
    }
    std::optional<std::vector<std::uint8_t>> first;
    bool rejected = false;
    fuzz::on_best_and_plain([&] {
        std::vector<std::uint8_t> mask(mask_size, 0xa5);
        if (!fuzz::accepts([&] { masks::density_decode(coded, rows, columns, chances, mask); })) {
            fuzz::require(!first);
            rejected = true;
            return;
        }
        fuzz::require(!rejected && (!first || *first == mask));
        first = mask;
    });
    if (!first) return 0;
    std::vector<std::uint8_t> again(mask_size);
    again.resize(masks::density_encode(*first, rows, columns, chances, again));
    fuzz::require(again == coded ||
                  coded.size() == mask_size);  // raw storage is accepted even if coding would be smaller
    return 0;
}
