// Any tokens: refused before a byte is written, or exactly those that encoding the result gives.
#include "masks/gaps.h"
#include "fuzz/input.h"

using namespace slimtensors;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t mask_size = input.number(20000);
    const std::vector<std::uint8_t> tokens = input.bytes(input.left());
    std::vector<std::uint8_t> mask(mask_size, 0xa5);
    if (!fuzz::accepts([&] { gaps_decode(tokens, mask); })) {
        fuzz::require(mask == std::vector<std::uint8_t>(mask_size, 0xa5));
        mask = tokens;  // as a mask, these bytes may be anything
    }
    fuzz::on_both_paths([&] {
        std::vector<std::uint8_t> again(gaps_bound(mask));
        again.resize(gaps_encode(mask, again));
        if (mask.size() == mask_size && mask != tokens) fuzz::require(again == tokens);
        std::vector<std::uint8_t> back(mask.size(), 0xa5);
        gaps_decode(again, back);
        fuzz::require(back == mask);
    });
    return 0;
}
