// Any codes, scales and sizes: refused before a byte is written, or the same numbers from both kinds of code;
// codes that are packed again are those that were read.
#include "fuzz/input.h"
#include "quantize/quantize.h"

using namespace slimtensors;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const bool sound = input.number(8) != 0;
    const Codes kinds[] = {{Codes::ints, 8}, {Codes::fp4, 4}, {Codes::fp8, 8}};
    const std::size_t which = input.number(11);
    const Codes codes = which < 3 ? kinds[which] : Codes{Codes::packed, static_cast<unsigned>(which - 2)};
    const auto kind = static_cast<Number>(input.number(sound ? 3 : 5));
    const auto scale_kind = static_cast<Number>(input.number(5));
    std::size_t row = input.number(1500) + (sound ? 1 : 0);
    if (sound && codes.kind == Codes::fp4) row += row % 2;
    const std::size_t rows = input.number(4);
    const Blocks blocks{row, input.number(400) + (sound ? 1 : 0), input.number(4) + (sound ? 1 : 0)};
    const std::size_t stride = codes.kind == Codes::packed ? (row * codes.bits + 31) / 32 * 4
                               : codes.kind == Codes::fp4  ? row / 2
                                                           : row;
    const std::size_t scales =
        sound ? (row + blocks.columns - 1) / blocks.columns * ((rows + blocks.rows - 1) / blocks.rows)
              : input.number(100);
    const std::size_t scale_size = scale_kind == Number::f32 ? 4 : scale_kind <= Number::bf16 ? 2 : 1;
    const std::size_t item_size = kind == Number::f32 ? 4 : 2;
    const std::size_t off = sound ? 0 : input.number(3);
    const std::vector<std::uint8_t> values = input.bytes(scales * scale_size + off);
    const std::vector<std::uint8_t> zeros = input.bytes(input.number(2) != 0 ? scales : 0);
    const std::vector<std::uint8_t> stored = input.bytes(rows * stride + off);
    const std::vector<std::uint8_t> untouched(rows * row * item_size + off, 0xa5);
    std::vector<std::vector<std::uint8_t>> results;

    fuzz::on_both_paths([&] {
        std::vector<std::uint8_t> items = untouched;
        const Scales given{values, scale_kind, 1.0f, zeros};
        const bool done = fuzz::accepts([&] { dequantize(stored, codes, given, blocks, kind, items); });
        fuzz::require(done || (!sound && items == untouched));
        results.push_back(items);
        if (!done || codes.kind != Codes::packed) return;
        std::vector<std::uint8_t> single(rows * row), again(stored.size()), twice(single.size());
        unpack_codes(stored, codes.bits, row, single);
        pack_codes(single, codes.bits, row, again);
        unpack_codes(again, codes.bits, row, twice);
        fuzz::require(single == twice);
    });
    fuzz::require(results[0] == results[1]);
    return 0;
}
