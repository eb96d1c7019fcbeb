// Any codes, scales and sizes: rejected before a byte is written, or dequantized identically by best and
// plain kernels. Unpacking and packing codes round-trips.
#include "fuzz/input.h"
#include "quantize/quantize.h"

using namespace slimtensors;
using quantize::CodeFormat;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const bool valid = input.number(8) != 0;
    const CodeFormat kinds[] = {{CodeFormat::ints, 8}, {CodeFormat::fp4, 4}, {CodeFormat::fp8, 8}};
    const std::size_t which = input.number(11);
    const CodeFormat format =
        which < 3 ? kinds[which] : CodeFormat{CodeFormat::packed, static_cast<unsigned>(which - 2)};
    const auto type = static_cast<FloatType>(input.number(valid ? 3 : 5));
    const auto scale_type = static_cast<FloatType>(input.number(5));
    std::size_t row = input.number(1500) + (valid ? 1 : 0);
    if (valid && format.kind == CodeFormat::fp4) row += row % 2;
    const std::size_t rows = input.number(4);
    const quantize::Blocks blocks{row, input.number(400) + (valid ? 1 : 0),
                                  input.number(4) + (valid ? 1 : 0)};
    const std::size_t stride = format.kind == CodeFormat::packed ? ceil_div(row * format.bits, 32) * 4
                               : format.kind == CodeFormat::fp4  ? row / 2
                                                                 : row;
    const std::size_t scales =
        valid ? ceil_div(row, blocks.columns) * ceil_div(rows, blocks.rows) : input.number(100);
    const std::size_t scale_size = scale_type == FloatType::f32 ? 4 : scale_type <= FloatType::bf16 ? 2 : 1;
    const std::size_t item_size = type == FloatType::f32 ? 4 : 2;
    const std::size_t off = valid ? 0 : input.number(3);
    const std::vector<std::uint8_t> values = input.bytes(scales * scale_size + off);
    const std::vector<std::uint8_t> zeros = input.bytes(input.number(2) != 0 ? scales : 0);
    const std::vector<std::uint8_t> stored = input.bytes(rows * stride + off);
    const std::vector<std::uint8_t> untouched(rows * row * item_size + off, 0xa5);
    std::vector<std::vector<std::uint8_t>> results;

    fuzz::on_best_and_plain([&] {
        std::vector<std::uint8_t> items = untouched;
        const quantize::Scales given{values, scale_type, blocks, 1.0f, zeros};
        const bool done = fuzz::accepts([&] { quantize::dequantize(stored, format, given, type, items); });
        fuzz::require(done || (!valid && items == untouched));
        results.push_back(items);
        if (!done || format.kind != CodeFormat::packed) return;
        std::vector<std::uint8_t> single(rows * row), again(stored.size()), twice(single.size());
        quantize::unpack_codes(stored, format.bits, row, single);
        quantize::pack_codes(single, format.bits, row, again);
        quantize::unpack_codes(again, format.bits, row, twice);
        fuzz::require(single == twice);
    });
    fuzz::require(results[0] == results[1]);
    return 0;
}
