// Checks, threads and offsets of products; the inner loops are in product_loops.h.
#include "product.h"

#include <algorithm>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu.h"
#include "floats.h"
#include "product_kernels.h"

namespace slimtensors {
namespace {

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }

const ProductKernels& kernels() {
#if defined(SLIMTENSORS_X86)
    if (cpu().avx2) return product_kernels_avx2();
#endif
    return product_kernels_plain();
}

std::size_t divide_up(std::size_t n, std::size_t by) { return n / by + (n % by != 0); }

float scale_at(const Scales& scales, std::size_t i) {
    const std::uint8_t* const at = scales.values.data();
    switch (scales.kind) {
        case Number::f32:
            return load<float>(at + 4 * i);
        case Number::f16:
            return F16::value(load<std::uint16_t>(at + 2 * i));
        default:
            return BF16::value(load<std::uint16_t>(at + 2 * i));
    }
}

// All that the rows of one call share.
struct Product {
    Bytes codes;
    Codes::Kind kind;
    const Scales& scales;
    std::size_t columns, block, across, rows, stride, count;
    float* products;
    std::vector<float> inputs, sorted;

    void prepare(Bytes given) {
        inputs.resize(count * columns);
        std::memcpy(inputs.data(), given.data(), given.size());
        if (kind != Codes::packed) return;
        sorted.resize(inputs.size());
        for (std::size_t n = 0; n < count; ++n)
            for (std::size_t begin = 0; begin < columns; begin += block)
                for (std::size_t i = begin; i + 16 <= std::min(begin + block, columns); i += 16)
                    for (std::size_t k = 0; k < 16; ++k)
                        sorted[n * columns + i + k / 2 + 8 * (k % 2)] = inputs[n * columns + i + k];
    }

    void run(std::size_t first, std::size_t last) const {
        const ProductKernels& all = kernels();
        const auto& loops = kind == Codes::packed ? all.nibbles : kind == Codes::fp8 ? all.fp8 : all.ints;
        const std::int32_t lowest = kind == Codes::packed ? 8 : 0;  // what nibbles count up from is -8
        std::vector<float> factors(across);
        std::vector<std::int32_t> zeros(across, lowest);
        for (std::size_t r = first; r < last; ++r) {
            for (std::size_t b = 0, i = r * across; b < across; ++b, ++i) {
                factors[b] = scale_at(scales, i) / scales.divisor;
                if (!scales.zero_points.empty())
                    zeros[b] = lowest + static_cast<std::int8_t>(scales.zero_points[i]);
            }
            for (std::size_t n = 0; n < count; n += most_inputs) {
                const std::size_t some = std::min<std::size_t>(most_inputs, count - n);
                const Inputs these{inputs.data() + n * columns,
                                   sorted.empty() ? nullptr : sorted.data() + n * columns, columns, block};
                float found[most_inputs];
                loops[some](codes.data() + r * stride, factors.data(), zeros.data(), these, found);
                for (std::size_t k = 0; k < some; ++k) products[(n + k) * rows + r] = found[k];
            }
        }
    }
};

}  // namespace

void multiply_codes(Bytes codes, Codes from, const Scales& scales, const Blocks& blocks, Bytes inputs,
                    MutableBytes products, unsigned threads) {
    const bool nibbles = from.kind == Codes::packed && from.bits == 4;
    if (!nibbles && (from.kind == Codes::packed || from.kind == Codes::fp4 || from.bits != 8))
        refuse("codes must be int8, 8-bit floats, or int4 packed");
    if (from.kind == Codes::fp8 && !scales.zero_points.empty()) refuse("8-bit floats have no zero points");
    if (scales.kind > Number::bf16) refuse("scales must be float32, float16 or bfloat16");
    if (blocks.rows != 1 || blocks.columns == 0 || blocks.row == 0) refuse("a block must be one row high");
    if (nibbles && blocks.columns % 2 != 0 && blocks.columns < blocks.row)
        refuse("a byte lies in two blocks");
    if (blocks.row > std::size_t{1} << 40) refuse("rows are too long");
    const std::size_t stride = nibbles ? 4 * divide_up(blocks.row, 8) : blocks.row;
    if (codes.size() % stride != 0) refuse("codes are not whole rows");
    const std::size_t rows = codes.size() / stride, across = divide_up(blocks.row, blocks.columns);
    const std::size_t scale_size = scales.kind == Number::f32 ? 4 : 2;
    if (scales.values.size() != rows * across * scale_size) refuse("there must be one scale per block");
    if (!scales.zero_points.empty() && scales.zero_points.size() != rows * across)
        refuse("there must be one zero point per scale");
    if (inputs.size() % (4 * blocks.row) != 0) refuse("inputs are not whole rows");
    const std::size_t count = inputs.size() / (4 * blocks.row);
    if (products.size() != 4 * count * rows) refuse("there must be one product per input and row");
    if (count == 0 || rows == 0) return;
    if (reinterpret_cast<std::uintptr_t>(products.data()) % alignof(float) != 0)
        refuse("products must be aligned");

    Product product{codes,  from.kind, scales, blocks.row, std::min(blocks.columns, blocks.row),
                    across, rows,      stride, count,      reinterpret_cast<float*>(products.data()),
                    {},     {}};
    product.prepare(inputs);
    const std::size_t pieces = std::clamp<std::size_t>(threads, 1, rows);
    std::vector<std::thread> others;
    for (std::size_t p = 1; p < pieces; ++p) {
        const auto piece = [&, p] { product.run(rows * p / pieces, rows * (p + 1) / pieces); };
        try {
            others.emplace_back(piece);
        } catch (const std::system_error&) {  // there are no more threads to be had
            piece();
        }
    }
    product.run(0, rows / pieces);
    for (auto& other : others) other.join();
}

}  // namespace slimtensors
