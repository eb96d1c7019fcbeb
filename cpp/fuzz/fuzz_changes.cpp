// Any models and chunks: best and plain kernels reject them, or both give the same items. Valid ones survive.
#include <optional>

#include "fuzz/input.h"
#include "residual/expected.h"
#include "residual/sparse.h"

using namespace slimtensors;

namespace {

using Buffer = std::vector<std::uint8_t>;

Buffer repeat(const Buffer& piece, std::size_t size) {
    Buffer out(size);
    for (std::size_t i = 0; i < size && !piece.empty(); ++i) out[i] = piece[i % piece.size()];
    return out;
}

// Run `decode` with both kernels; it must accept or reject its input in both, with the same result.
template <class Decode>
void compare(std::size_t size, Decode decode) {
    std::optional<Buffer> first;
    bool rejected = false;
    fuzz::on_best_and_plain([&] {
        Buffer items(size, 0xa5);
        if (!fuzz::accepts([&] { decode(items); })) {
            fuzz::require(!first);
            rejected = true;
            return;
        }
        fuzz::require(!rejected && (!first || *first == items));
        first = items;
    });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    constexpr FloatType types[] = {FloatType::f32, FloatType::f16, FloatType::bf16};
    const FloatType type = types[input.number(3)];
    const std::size_t itemsize = type == FloatType::f32 ? 4 : 2;
    const std::size_t count = 1 + input.number(1000), width = 1 + input.number(count);
    const bool is_valid = input.number(2) == 1, is_sparse = input.number(2) == 1;
    const std::size_t at = input.number(1 << 16);
    const Buffer base = repeat(input.bytes(64), count * itemsize);
    Buffer model, chunk;
    if (is_valid) {  // correct data, then corrupt it, which decodes further than random bytes
        const Buffer items = repeat(input.bytes(input.left()), base.size());
        if (is_sparse) {
            model.resize(residual::max_sparse_model);
            model.resize(residual::sparse_fit(items, base, type, model));
            chunk.resize(residual::sparse_bound(count));
            chunk.resize(residual::sparse_encode(items, base, type, model, chunk));
        } else {
            model = residual::expected_fit(items, base, type, width);
            const residual::ExpectedModel coder(model, type, count);
            chunk.resize(coder.chunk_bound(count));
            chunk.resize(coder.encode(0, items, base, chunk));
        }
        compare(base.size(), [&](Buffer& out) {
            if (is_sparse)
                residual::sparse_decode(chunk, base, type, model, out);
            else
                residual::ExpectedModel(model, type, count).decode(0, chunk, base, out);
            fuzz::require(out == items);
        });
        Buffer& damaged = at % 2 == 0 || chunk.empty() ? model : chunk;
        damaged[at / 2 % damaged.size()] ^= static_cast<std::uint8_t>(1 + at % 255);
        if (at % 7 == 0) damaged.resize(damaged.size() / 2);
    } else {
        model = input.bytes(input.number(100));
        chunk = input.bytes(input.left());
    }
    compare(base.size(), [&](Buffer& out) {
        if (is_sparse)
            residual::sparse_decode(chunk, base, type, model, out);
        else
            residual::ExpectedModel(model, type, count).decode(0, chunk, base, out);
    });
    return 0;
}
