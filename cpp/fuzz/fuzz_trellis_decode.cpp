// Any steps and chunk: rejected, or decoded identically by best and plain kernels; valid chunks round-trip.
#include "fuzz/input.h"
#include "trellis/matrix.h"
#include "trellis/side.h"

using namespace slimtensors;

namespace {

template <class T>
std::vector<std::uint8_t> as_bytes(const std::vector<T>& values) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
    return {bytes, bytes + values.size() * sizeof(T)};
}

std::vector<std::int16_t> numbers(fuzz::Input& input, std::size_t count, int least, std::size_t range) {
    std::vector<std::int16_t> values(count);
    const std::size_t spread = 1 + input.number(range);
    for (std::int16_t& value : values)
        value = static_cast<std::int16_t>(least + static_cast<int>(input.number(spread)));
    return values;
}

void check_lists(const std::vector<std::int16_t>& values) {
    const std::vector<std::uint8_t> packed = trellis::pack_vector(values);
    std::vector<std::int16_t> again(values.size());
    fuzz::require(trellis::unpack_vector(packed, again) == packed.size() && again == values);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t rows = 1 + input.number(12), columns = 1 + input.number(80);
    const std::vector<std::int16_t> row_steps = numbers(input, rows, -1100, 2200),
                                    column_steps = numbers(input, columns, -400, 800),
                                    row_classes = numbers(input, rows, -40, 120),
                                    column_classes = numbers(input, columns, -40, 120);
    for (const auto& values : {row_steps, column_steps, row_classes, column_classes}) check_lists(values);
    const std::vector<std::uint8_t> parameters = input.bytes(trellis::parameter_bytes);
    const FloatType type = std::array{FloatType::f32, FloatType::f16, FloatType::bf16}[input.number(3)];
    const std::size_t itemsize = type == FloatType::f32 ? 4 : 2;
    std::unique_ptr<trellis::Matrix> matrix;
    if (!fuzz::accepts([&] {
            matrix =
                std::make_unique<trellis::Matrix>(parameters, as_bytes(row_steps), as_bytes(column_steps),
                                                  as_bytes(row_classes), as_bytes(column_classes));
        }))
        return 0;

    const std::size_t choice = input.number(3);
    std::vector<std::uint8_t> chunk;
    if (choice == 0) {  // raw bytes
        chunk = input.bytes(input.left());
        std::vector<std::int16_t> values(rows);
        fuzz::accepts([&] { trellis::unpack_vector(chunk, values); });
    } else {  // valid data, possibly corrupted
        std::vector<std::int32_t> integers(rows * columns);
        const std::size_t spread = 1 + input.number(5000);
        for (std::int32_t& k : integers)
            k = static_cast<std::int32_t>(input.number(spread)) - static_cast<std::int32_t>(spread / 2);
        chunk.resize(matrix->chunk_bound(rows));
        chunk.resize(matrix->encode(0, as_bytes(integers), chunk));
        if (choice == 2 && input.left())
            for (std::size_t hits = 1 + input.number(4); hits > 0; --hits)
                chunk[input.number(chunk.size())] ^= static_cast<std::uint8_t>(1 + input.number(255));
    }
    std::vector<std::vector<std::uint8_t>> decoded;
    fuzz::on_best_and_plain([&] {
        std::vector<std::uint8_t> out(rows * columns * itemsize, 0xa5);
        if (fuzz::accepts([&] { matrix->decode(0, chunk, type, out); })) decoded.push_back(out);
    });
    fuzz::require(decoded.empty() || (decoded.size() == 2 && decoded[0] == decoded[1]));
    fuzz::require(choice != 1 || decoded.size() == 2);

    std::vector<float> weights(rows * columns);
    for (float& x : weights) x = static_cast<float>(input.number(2000)) / 100 - 10;
    std::vector<std::vector<std::uint8_t>> chosen;
    fuzz::on_best_and_plain([&] {
        std::vector<std::uint8_t> integers(weights.size() * 4);
        if (fuzz::accepts([&] { matrix->quantize(0, as_bytes(weights), {}, {}, 0.37f, true, integers); }))
            chosen.push_back(integers);
    });
    fuzz::require(chosen.empty() || (chosen.size() == 2 && chosen[0] == chosen[1]));
    return 0;
}
