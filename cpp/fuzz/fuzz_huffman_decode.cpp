// Any rows and data: rejected, or decoded identically by best and plain kernels to items that round-trip.
#include "core/crc32c.h"
#include "fuzz/input.h"
#include "huffman/huffman.h"

using namespace slimtensors;

namespace {

struct Coded {
    std::vector<std::uint8_t> rows, data;

    bool operator==(const Coded&) const = default;
};

Coded encode(Bytes items, ItemFormat format) {
    const std::size_t chunks = ceil_div(items.size() / format.itemsize, huffman::chunk_items);
    Coded coded{std::vector<std::uint8_t>(chunks * (1 + format.itemsize) * 4), {}};
    std::vector<std::uint8_t> codes(chunks * format.itemsize * 256);
    huffman::survey(items, format, codes, coded.rows);
    std::size_t size = 0;
    for (std::size_t i = 0; i < coded.rows.size(); i += 4)
        if (i % (4 * (1 + format.itemsize)) != 0) size += load<std::uint32_t>(coded.rows.data() + i);
    coded.data.resize(size);
    huffman::encode(items, format, codes, coded.rows, coded.data);
    return coded;
}

// Without a valid checksum nothing passes the first check.
void seal(Coded& coded) {
    if (coded.rows.size() < 4) return;
    store(coded.rows.data(), crc32c(coded.data, crc32c(Bytes(coded.rows).subspan(4))));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t itemsize = std::size_t{1} << input.number(4);
    const ItemFormat format{itemsize, input.number(2) == 1 && itemsize > 1};
    const std::size_t choice = input.number(4);
    std::vector<std::uint8_t> items;
    Coded coded;
    if (choice == 0) {  // raw bytes as rows and data
        items.resize(input.number(3000) * format.itemsize);
        coded.rows = input.bytes((1 + format.itemsize) * 4 + (input.number(16) == 0 ? 4 : 0));
        coded.data = input.bytes(input.left());
    } else {  // valid data, possibly corrupted
        const std::size_t repeats = 1 + input.number(40);
        std::vector<std::size_t> corruption;
        for (std::size_t k = choice == 1 ? 0 : input.number(6); k > 0; --k)
            corruption.push_back(input.number(1 << 24));
        const std::vector<std::uint8_t> piece = input.bytes(input.left());
        for (std::size_t k = 0; k < repeats; ++k) items.insert(items.end(), piece.begin(), piece.end());
        items.resize(items.size() / format.itemsize * format.itemsize);
        std::vector<Coded> both;
        fuzz::on_best_and_plain([&] { both.push_back(encode(items, format)); });
        fuzz::require(both[0] == both[1]);
        coded = both[0];
        if (choice == 1)
            fuzz::on_best_and_plain([&] {
                std::vector<std::uint8_t> again(items.size(), 0xa5);
                huffman::decode(coded.rows, coded.data, format, again);
                fuzz::require(again == items);
            });
        if (!coded.data.empty())
            for (const std::size_t at : corruption)
                coded.data[(at >> 8) % coded.data.size()] ^= static_cast<std::uint8_t>(at);
    }
    if (choice != 3) seal(coded);

    std::vector<std::vector<std::uint8_t>> decoded;
    fuzz::on_best_and_plain([&] {
        std::vector<std::uint8_t> out(items.size(), 0xa5);
        if (fuzz::accepts([&] { huffman::decode(coded.rows, coded.data, format, out); }))
            decoded.push_back(out);
    });
    std::vector<std::uint8_t> unchecked(items.size(), 0xa5);
    fuzz::accepts(
        [&] { huffman::decode_unverified(coded.rows, coded.data, format, unchecked, 1 + choice % 2); });
    fuzz::require(decoded.empty() || unchecked == decoded[0]);
    fuzz::require(decoded.empty() || (decoded.size() == 2 && decoded[0] == decoded[1]));
    if (decoded.empty()) return 0;
    const Coded recoded = encode(decoded[0], format);
    std::vector<std::uint8_t> again(items.size(), 0xa5);
    huffman::decode(recoded.rows, recoded.data, format, again);
    fuzz::require(again == decoded[0]);
    return 0;
}
