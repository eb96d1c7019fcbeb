// Any tokens: rejected before a byte is written, or equal to the encoded result.
#include "fuzz/input.h"
#include "masks/gaps.h"

using namespace slimtensors;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t mask_size = input.number(20000);
    const std::vector<std::uint8_t> tokens = input.bytes(input.left());
    std::vector<std::uint8_t> mask(mask_size, 0xa5);
    if (!fuzz::accepts([&] { masks::gaps_decode(tokens, mask); })) {
        fuzz::require(mask == std::vector<std::uint8_t>(mask_size, 0xa5));
        mask = tokens;  // any bytes are a valid mask
    }
    fuzz::on_best_and_plain([&] {
        std::vector<std::uint8_t> again(masks::gaps_bound(mask));
        again.resize(masks::gaps_encode(mask, again));
        if (mask.size() == mask_size && mask != tokens) fuzz::require(again == tokens);
        std::vector<std::uint8_t> back(mask.size(), 0xa5);
        masks::gaps_decode(again, back);
        fuzz::require(back == mask);
    });
    return 0;
}
