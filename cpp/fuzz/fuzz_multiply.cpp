// Any codes, scales, inputs and sizes: rejected before a byte is written, or multiplied with a result that
// does not depend on the number of threads.
#include "fuzz/input.h"
#include "linear/linear.h"

using namespace slimtensors;
using quantize::CodeFormat;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const bool valid = input.number(8) != 0;
    const CodeFormat kinds[] = {{CodeFormat::ints, 8},
                                {CodeFormat::packed, 4},
                                {CodeFormat::fp8, 8},
                                {CodeFormat::fp4, 4},
                                {CodeFormat::packed, 3}};
    const CodeFormat format = kinds[input.number(valid ? 3 : 5)];
    const auto scale_type = static_cast<FloatType>(input.number(valid ? 3 : 5));
    const std::size_t row = input.number(input.number(4) != 0 ? 99 : 1300) + (valid ? 1 : 0),
                      rows = input.number(9), count = input.number(70);
    const std::size_t even = valid && format.kind == CodeFormat::packed ? 2 : 1;
    const quantize::Blocks blocks{row, even * (input.number(400) + (valid ? 1 : 0)),
                                  valid ? 1 : input.number(3)};
    const std::size_t stride = format.kind == CodeFormat::packed ? ceil_div(row, 8) * 4 : row;
    const std::size_t scales = valid ? rows * ceil_div(row, blocks.columns) : input.number(100);
    const std::size_t off = valid ? 0 : input.number(3);
    const bool has_zeros = format.kind != CodeFormat::fp8 && input.number(2) != 0;
    const std::vector<std::uint8_t> values =
        input.bytes(scales * (scale_type == FloatType::f32 ? 4 : 2) + off);
    const std::vector<std::uint8_t> zeros = input.bytes(has_zeros ? scales : 0);
    const std::vector<std::uint8_t> stored = input.bytes(rows * stride + off);
    const std::vector<std::uint8_t> inputs = input.bytes(4 * count * row + off);
    const std::vector<std::uint8_t> untouched(4 * count * rows + off, 0xa5);

    fuzz::on_all_variants([&] {
        const quantize::Scales given{values, scale_type, blocks, 1.0f, zeros};
        std::vector<std::uint8_t> single = untouched, shared = untouched;
        const bool done =
            fuzz::accepts([&] { linear::multiply_codes(stored, format, given, inputs, single, 1); });
        fuzz::require(done || (!valid && single == untouched));
        fuzz::accepts([&] { linear::multiply_codes(stored, format, given, inputs, shared, 2); });
        fuzz::require(single == shared);
    });
    return 0;
}
