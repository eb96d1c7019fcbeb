// Any codes: rejected, or equal to the packed result.
#include "fuzz/input.h"
#include "masks/mask24.h"

using namespace slimtensors;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t size_choice = input.number(8);
    const bool reduce = input.number(2) == 1;  // long runs of random bytes are almost never valid codes
    std::vector<std::uint8_t> codes = input.bytes(input.left());
    if (reduce)
        for (std::uint8_t& code : codes) code %= 216;
    std::size_t mask_size = codes.size() / 2 * 3 + codes.size() % 2;
    if (size_choice < 3 && mask_size != 0) --mask_size;  // also valid if the number of codes is even
    if (size_choice == 7) mask_size += 1;                // always invalid
    std::vector<std::uint8_t> mask(mask_size, 0xa5);
    if (!fuzz::accepts([&] { masks::mask24_unpack(codes, mask); })) return 0;
    fuzz::require(masks::mask24_fill(mask) == -1);
    std::vector<std::uint8_t> again(codes.size());
    masks::mask24_pack(mask, again);
    fuzz::require(again == codes);

    std::vector<std::uint8_t>& arbitrary = codes;  // any bytes are a valid mask
    std::vector<std::uint8_t> out(ceil_div(2 * arbitrary.size(), 3));
    fuzz::accepts([&] { masks::mask24_pack(arbitrary, out); });
    if (masks::mask24_fill(arbitrary) == -1) masks::mask24_pack(arbitrary, out);
    return 0;
}
