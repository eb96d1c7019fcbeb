// Any model and chunk: rejected, or decoded identically by best and plain kernels to items that round-trip.
#include "bins/bins.h"
#include "core/crc32c.h"
#include "fuzz/input.h"

using namespace slimtensors;

namespace {

struct Coded {
    std::vector<std::uint8_t> model, rows, data;

    bool operator==(const Coded&) const = default;
};

Coded encode(Bytes items, const bins::ItemType& type, const std::vector<std::size_t>& widths) {
    const std::size_t count = items.size() / type.itemsize, chunks = ceil_div(count, bins::chunk_items);
    std::vector<std::uint8_t> labels(count);
    Coded coded{std::vector<std::uint8_t>(bins::model_bound(widths)),
                std::vector<std::uint8_t>(chunks * bins::row_bytes), std::vector<std::uint8_t>(items.size())};
    coded.model.resize(bins::fit(items, type, widths, labels, coded.model));
    coded.data.resize(bins::encode(items, type, 0, labels, coded.model, coded.rows, coded.data));
    return coded;
}

// Without a valid checksum nothing passes the first check.
void seal(Coded& coded) {
    if (coded.rows.size() < bins::row_bytes) return;
    store(coded.rows.data(), static_cast<std::uint32_t>(coded.data.size()));
    store(coded.rows.data() + 4, crc32c(coded.data, crc32c(coded.model)));
}

void corrupt(std::vector<std::uint8_t>& bytes, std::size_t at) {
    if (!bytes.empty()) bytes[(at >> 8) % bytes.size()] ^= static_cast<std::uint8_t>(at);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t itemsize = std::size_t{1} << input.number(4);
    const unsigned exponents[] = {4, 8, 8, 11};
    const bool floats = input.number(2) == 1;
    const bins::ItemType type{itemsize, floats ? exponents[std::countr_zero(itemsize)] : 0,
                              floats || input.number(2) == 1};
    const std::vector<std::size_t> widths{8 + input.number(600)};
    const std::size_t choice = input.number(4);
    std::vector<std::uint8_t> items;
    Coded coded;
    if (choice == 0) {  // raw bytes as model and data
        items.resize(input.number(9000) * itemsize);
        coded.rows.resize(bins::row_bytes);
        coded.model = input.bytes(input.number(input.left() + 1));
        coded.data = input.bytes(input.left());
    } else {  // valid data, possibly corrupted
        const std::size_t repeats = 1 + input.number(40);
        std::vector<std::size_t> hits;
        for (std::size_t k = choice == 1 ? 0 : input.number(6); k > 0; --k)
            hits.push_back(input.number(1 << 24));
        const std::vector<std::uint8_t> piece = input.bytes(input.left());
        for (std::size_t k = 0; k < repeats; ++k) items.insert(items.end(), piece.begin(), piece.end());
        items.resize(items.size() / itemsize * itemsize);
        std::vector<Coded> both;
        fuzz::on_best_and_plain([&] { both.push_back(encode(items, type, widths)); });
        fuzz::require(both[0] == both[1]);
        coded = both[0];
        if (choice == 1)
            fuzz::on_best_and_plain([&] {
                std::vector<std::uint8_t> again(items.size(), 0xa5);
                bins::decode(coded.rows, coded.data, itemsize, 0, coded.model, again);
                fuzz::require(again == items);
            });
        for (const std::size_t at : hits) corrupt(at >> 23 ? coded.model : coded.data, at);
    }
    if (choice != 3) seal(coded);

    std::vector<std::vector<std::uint8_t>> decoded;
    fuzz::on_best_and_plain([&] {
        std::vector<std::uint8_t> out(items.size(), 0xa5);
        if (fuzz::accepts([&] { bins::decode(coded.rows, coded.data, itemsize, 0, coded.model, out); }))
            decoded.push_back(out);
    });
    fuzz::require(decoded.empty() || (decoded.size() == 2 && decoded[0] == decoded[1]));
    if (decoded.empty()) return 0;
    const Coded recoded = encode(decoded[0], type, widths);
    std::vector<std::uint8_t> again(items.size(), 0xa5);
    bins::decode(recoded.rows, recoded.data, itemsize, 0, recoded.model, again);
    fuzz::require(again == decoded[0]);
    return 0;
}
