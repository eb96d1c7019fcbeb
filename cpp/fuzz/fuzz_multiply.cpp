// Any codes, scales, inputs and sizes: refused before a byte is written, or every product is written, the
// same on any number of threads.
#include "fuzz/input.h"
#include "linear/linear.h"

using namespace slimtensors;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const bool sound = input.number(8) != 0;
    const Codes kinds[] = {
        {Codes::ints, 8}, {Codes::packed, 4}, {Codes::fp8, 8}, {Codes::fp4, 4}, {Codes::packed, 3}};
    const Codes codes = kinds[input.number(sound ? 3 : 5)];
    const auto scale_kind = static_cast<Number>(input.number(sound ? 3 : 5));
    const std::size_t row = input.number(input.number(4) != 0 ? 99 : 1300) + (sound ? 1 : 0),
                      rows = input.number(9), count = input.number(70);
    const std::size_t even = sound && codes.kind == Codes::packed ? 2 : 1;
    const Blocks blocks{row, even * (input.number(400) + (sound ? 1 : 0)), sound ? 1 : input.number(3)};
    const std::size_t stride = codes.kind == Codes::packed ? (row + 7) / 8 * 4 : row;
    const std::size_t scales =
        sound ? rows * ((row + blocks.columns - 1) / blocks.columns) : input.number(100);
    const std::size_t off = sound ? 0 : input.number(3);
    const bool has_zeros = codes.kind != Codes::fp8 && input.number(2) != 0;
    const std::vector<std::uint8_t> values = input.bytes(scales * (scale_kind == Number::f32 ? 4 : 2) + off);
    const std::vector<std::uint8_t> zeros = input.bytes(has_zeros ? scales : 0);
    const std::vector<std::uint8_t> stored = input.bytes(rows * stride + off);
    const std::vector<std::uint8_t> inputs = input.bytes(4 * count * row + off);
    const std::vector<std::uint8_t> untouched(4 * count * rows + off, 0xa5);

    Cpu older = detect_cpu();
    older.avx512 = false;
    fuzz::on_paths({detect_cpu(), older, Cpu{}}, [&] {
        const Scales given{values, scale_kind, 1.0f, zeros};
        std::vector<std::uint8_t> alone = untouched, shared = untouched;
        const bool done =
            fuzz::accepts([&] { multiply_codes(stored, codes, given, blocks, inputs, alone, 1); });
        fuzz::require(done || (!sound && alone == untouched));
        fuzz::accepts([&] { multiply_codes(stored, codes, given, blocks, inputs, shared, 2); });
        fuzz::require(alone == shared);
    });
    return 0;
}
