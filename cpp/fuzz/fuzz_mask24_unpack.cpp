// Any codes: refused, or exactly those that packing the result gives.
#include "fuzz/input.h"
#include "masks/mask24.h"

using namespace slimtensors;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t size_choice = input.number(8);
    const bool reduce =
        input.number(2) == 1;  // a random byte is a code in five of six cases: too few in a row
    std::vector<std::uint8_t> codes = input.bytes(input.left());
    if (reduce)
        for (std::uint8_t& code : codes) code %= 216;
    std::size_t mask_size = codes.size() / 2 * 3 + codes.size() % 2;
    if (size_choice < 3 && mask_size != 0) --mask_size;  // as good when the number of codes is even
    if (size_choice == 7) mask_size += 1;                // never right
    std::vector<std::uint8_t> mask(mask_size, 0xa5);
    if (!fuzz::accepts([&] { mask24_unpack(codes, mask); })) return 0;
    fuzz::require(mask24_fill(mask) == -1);
    std::vector<std::uint8_t> again(codes.size());
    mask24_pack(mask, again);
    fuzz::require(again == codes);

    std::vector<std::uint8_t>& wild = codes;  // as a mask, these bytes may be anything
    std::vector<std::uint8_t> out((2 * wild.size() + 2) / 3);
    fuzz::accepts([&] { mask24_pack(wild, out); });
    if (mask24_fill(wild) == -1) mask24_pack(wild, out);
    return 0;
}
