// Any model: rejected or valid. Any mask: fitted with a model that round-trips.
#include "fuzz/input.h"
#include "masks/density.h"

using namespace slimtensors;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t width = 1 + input.number(60), row_count = input.number(100);
    const std::size_t missing = input.number(width);
    const std::vector<std::uint8_t> bytes = input.bytes(input.left());
    std::vector<std::uint8_t> rows(row_count), columns(8 * width), chances(masks::density_pairs);
    fuzz::accepts([&] { masks::density_unpack(bytes, rows, columns, chances); });

    std::vector<std::uint8_t> mask(row_count * width - (row_count == 0 ? 0 : missing));
    for (std::size_t i = 0; i < mask.size() && !bytes.empty(); ++i) mask[i] = bytes[i % bytes.size()];
    masks::density_fit(mask, rows, columns, chances);
    std::vector<std::uint8_t> model(masks::density_model_bound(rows.size() + columns.size()));
    model.resize(masks::density_pack(rows, columns, chances, model));
    std::vector<std::uint8_t> rows_again(rows.size()), columns_again(columns.size()),
        chances_again(masks::density_pairs);
    masks::density_unpack(model, rows_again, columns_again, chances_again);
    fuzz::require(rows_again == rows && columns_again == columns && chances_again == chances);

    std::vector<std::uint8_t> coded(mask.size()), again(mask.size(), 0xa5);
    coded.resize(masks::density_encode(mask, rows, columns, chances, coded));
    masks::density_decode(coded, rows, columns, chances, again);
    fuzz::require(again == mask);
    return 0;
}
