// Checks, threads and offsets of products; the inner loops are in kernels.cpp.
#include "linear/linear.h"

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "core/floats.h"
#include "core/parallel.h"
#include "linear/kernels.h"

namespace slimtensors::linear {
namespace {

using quantize::CodeFormat;
using quantize::Scales;

constexpr KernelTable<Kernels> kernels{
    .plain = &plain::kernels, .avx2 = SLIM_X86(&avx2::kernels), .avx512 = SLIM_X86(&avx512::kernels)};

// Up to this many groups of inputs, decoding the codes for every group is faster than storing them as floats.
constexpr std::size_t max_direct_groups = 2;
constexpr std::size_t inputs_per_pass = 64;  // inputs that stay in the cache while all rows are multiplied

template <class Float>
void read_as(const std::uint8_t* from, float divisor, std::span<float> to) {
    using Bits = typename Float::Bits;
    for (float& scale : to) {
        scale = Float::value(load<Bits>(from)) / divisor;
        from += sizeof(Bits);
    }
}

void read_scales(const Scales& scales, std::size_t first, std::span<float> to) {
    const std::uint8_t* const from = scales.values.data();
    if (scales.type == FloatType::f32) return read_as<F32>(from + 4 * first, scales.divisor, to);
    if (scales.type == FloatType::f16) return read_as<F16>(from + 2 * first, scales.divisor, to);
    read_as<BF16>(from + 2 * first, scales.divisor, to);
}

// The arguments of one call, shared by all rows.
struct Product {
    Bytes codes;
    CodeFormat::Kind kind;
    const Scales& scales;
    std::size_t columns, block, across, rows, stride, count;
    float* products;
    const Kernels& loops = kernels.active();
    // Never a power of two, like row_stride.
    std::size_t padded = ceil_div(columns, column_multiple) * column_multiple + 16;
    std::vector<float> inputs = std::vector<float>(count * padded);  // each padded with zeros

    void copy_inputs(Bytes input_data) {
        for (std::size_t n = 0; n < count; ++n) {
            float* const input = inputs.data() + n * padded;
            const std::uint8_t* const from = input_data.data() + 4 * n * columns;
            if (kind != CodeFormat::packed)
                std::memcpy(input, from, 4 * columns);
            else
                for (std::size_t i = 0; i < columns; ++i)
                    input[deinterleave(i, loops.width)] = load<float>(from + 4 * i);
        }
    }
};

// Multiplies a few rows at a time, which are decoded to floats piece by piece.
class Panel {
  public:
    explicit Panel(const Product& product)
        : product_(product),
          codes_(product.kind == CodeFormat::packed ? loops_.nibbles
                 : product.kind == CodeFormat::fp8  ? loops_.fp8
                                                    : loops_.ints),
          scales_(panel_rows * product.across),
          zeros_(panel_rows * product.across, code_offset()) {}

    void run(std::size_t first, std::size_t last) {
        for (std::size_t n = 0; n < product_.count; n += inputs_per_pass)
            for (std::size_t r = first; r < last; r += panel_rows)
                multiply(r, std::min<std::size_t>(panel_rows, last - r), n,
                         std::min(inputs_per_pass, product_.count - n));
    }

  private:
    // 4-bit codes count from -8.
    std::int32_t code_offset() const { return product_.kind == CodeFormat::packed ? 8 : 0; }

    void multiply(std::size_t first, std::size_t height, std::size_t from, std::size_t inputs) {
        read_blocks(first * product_.across, height * product_.across);
        std::fill(sums_.begin(), sums_.end(), 0.0f);
        for (std::size_t begin = 0; begin < product_.columns; begin += piece_columns) {
            const std::size_t end = std::min(begin + piece_columns, product_.columns);
            const std::size_t length = ceil_div(end - begin, column_multiple) * column_multiple;
            const bool direct = height == panel_rows &&
                                inputs <= max_direct_groups * loops_.inputs_per_call &&
                                is_aligned(begin, end);
            for (std::size_t r = 0; !direct && r < height; ++r) decode(first + r, r, begin, end, length);
            const float* const input_data = product_.inputs.data() + from * product_.padded + begin;
            std::size_t groups = ceil_div(inputs, loops_.inputs_per_call);
            for (std::size_t n = 0, group = 0; n < inputs; n += group, --groups) {
                group = ceil_div(inputs - n, groups);  // groups of similar size
                float* const sums = sums_.data() + n * panel_rows;
                if (direct)
                    codes_.multiply[group](product_.codes.data() + first * product_.stride, product_.stride,
                                           scales(0), product_.across, begin, end,
                                           input_data + n * product_.padded, product_.padded, sums);
                else
                    loops_.multiply[group](floats_.data(), input_data + n * product_.padded, product_.padded,
                                           length, sums);
            }
        }
        for (std::size_t n = 0; n < inputs; ++n)
            std::copy_n(sums_.data() + n * panel_rows, height,
                        product_.products + (from + n) * product_.rows + first);
    }

    RowScales scales(std::size_t place) const {
        return {scales_.data() + place * product_.across, zeros_.data() + place * product_.across,
                product_.block};
    }

    bool is_aligned(std::size_t begin, std::size_t end) const {
        return (end - begin) % column_multiple == 0 &&
               (product_.across == 1 || product_.block % column_multiple == 0);
    }

    void read_blocks(std::size_t first, std::size_t count) {
        read_scales(product_.scales, first, std::span(scales_).first(count));
        if (product_.scales.zero_points.empty()) return;
        for (std::size_t i = 0; i < count; ++i)
            zeros_[i] = code_offset() + static_cast<std::int8_t>(product_.scales.zero_points[first + i]);
    }

    // Prefetch codes of the next panel: rows are too short for the hardware prefetcher.
    void prefetch(std::size_t from, std::size_t count) const {
        const std::size_t end = std::min(from + count, product_.codes.size());
        for (; from < end; from += 64) __builtin_prefetch(product_.codes.data() + from);
    }

    void decode(std::size_t row, std::size_t place, std::size_t begin, std::size_t end, std::size_t length) {
        float* const floats = floats_.data() + place * row_stride;
        if (end - begin < length) std::fill(floats + length - column_multiple, floats + length, 0.0f);
        prefetch((row + panel_rows) * product_.stride + begin * product_.stride / product_.columns,
                 (end - begin) * product_.stride / product_.columns);
        codes_.decode(product_.codes.data() + row * product_.stride, scales(place), begin, end, floats);
    }

    const Product& product_;
    const Kernels& loops_ = product_.loops;
    const CodeKernels& codes_;
    std::vector<float> scales_;
    std::vector<std::int32_t> zeros_;
    std::vector<float> floats_ = std::vector<float>(panel_rows * row_stride);
    std::vector<float> sums_ = std::vector<float>(panel_rows * inputs_per_pass);
};

}  // namespace

void multiply_codes(Bytes codes, CodeFormat format, const Scales& scales, Bytes inputs, MutableBytes products,
                    unsigned threads) {
    const quantize::Blocks& blocks = scales.blocks;
    const bool nibbles = format.kind == CodeFormat::packed && format.bits == 4;
    check(
        nibbles || (format.kind != CodeFormat::packed && format.kind != CodeFormat::fp4 && format.bits == 8),
        "codes must be int8, 8-bit floats or packed int4");
    check(format.kind != CodeFormat::fp8 || scales.zero_points.empty(), "8-bit floats have no zero points");
    check(scales.type <= FloatType::bf16, "scales must be float32, float16 or bfloat16");
    check(blocks.rows == 1 && blocks.columns != 0 && blocks.row != 0, "blocks must be one row high");
    check(!nibbles || blocks.columns % 2 == 0 || blocks.columns >= blocks.row,
          "a byte of packed codes is in two blocks");
    check(blocks.row <= std::size_t{1} << 40, "rows are too long");
    const std::size_t stride = nibbles ? 4 * ceil_div(blocks.row, 8) : blocks.row;
    check(codes.size() % stride == 0, "codes are not whole rows");
    const std::size_t rows = codes.size() / stride, across = ceil_div(blocks.row, blocks.columns);
    const std::size_t scale_size = scales.type == FloatType::f32 ? 4 : 2;
    check(scales.values.size() == rows * across * scale_size, "scales must have one scale per block");
    check(scales.zero_points.empty() || scales.zero_points.size() == rows * across,
          "zero points must have one zero point per scale");
    check(inputs.size() % (4 * blocks.row) == 0, "inputs are not whole rows");
    const std::size_t count = inputs.size() / (4 * blocks.row);
    check(products.size() == 4 * count * rows, "products must have one product per input and row");
    if (count == 0 || rows == 0) return;
    check(reinterpret_cast<std::uintptr_t>(products.data()) % alignof(float) == 0,
          "products must be aligned to 4 bytes");

    Product product{codes,  format.kind, scales, blocks.row, std::min(blocks.columns, blocks.row),
                    across, rows,        stride, count,      reinterpret_cast<float*>(products.data())};
    product.copy_inputs(inputs);
    const std::size_t pieces = std::clamp<std::size_t>(threads, 1, rows);
    parallel_for(pieces,
                 [&](std::size_t p) { Panel(product).run(rows * p / pieces, rows * (p + 1) / pieces); });
}

}  // namespace slimtensors::linear
