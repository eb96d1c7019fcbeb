// Checks, threads and offsets of products; the inner loops are in product_loops.h.
#include "linear/linear.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "core/dispatch.h"
#include "core/floats.h"
#include "linear/kernels.h"
#include "core/parallel.h"

namespace slimtensors {
namespace {

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }

const ProductKernels& kernels() {
#if defined(SLIMTENSORS_X86)
    if (cpu().avx512) return product_kernels_avx512();
    if (cpu().avx2) return product_kernels_avx2();
#endif
    return product_kernels_plain();
}

constexpr std::size_t few = 2;  // groups of inputs for which it is faster to read codes anew than to decode
constexpr std::size_t inputs_in_cache = 64;  // that all rows are multiplied by before the next ones come

std::size_t divide_up(std::size_t n, std::size_t by) { return n / by + (n % by != 0); }

template <class Number>
void read(const std::uint8_t* from, float divisor, std::span<float> to) {
    using Bits = typename Number::Bits;
    for (float& scale : to) {
        scale = Number::value(load<Bits>(from)) / divisor;
        from += sizeof(Bits);
    }
}

void read_scales(const Scales& scales, std::size_t first, std::span<float> to) {
    const std::uint8_t* const from = scales.values.data();
    if (scales.kind == Number::f32) return read<F32>(from + 4 * first, scales.divisor, to);
    if (scales.kind == Number::f16) return read<F16>(from + 2 * first, scales.divisor, to);
    read<BF16>(from + 2 * first, scales.divisor, to);
}

// All that the rows of one call share.
struct Product {
    Bytes codes;
    Codes::Kind kind;
    const Scales& scales;
    std::size_t columns, block, across, rows, stride, count;
    float* products;
    const ProductKernels& loops = kernels();
    std::size_t padded = divide_up(columns, whole) * whole + 16;     // never a power of two, as rows
    std::vector<float> inputs = std::vector<float>(count * padded);  // each ends in zeros

    void take(Bytes given) {
        for (std::size_t n = 0; n < count; ++n) {
            float* const input = inputs.data() + n * padded;
            const std::uint8_t* const from = given.data() + 4 * n * columns;
            if (kind != Codes::packed)
                std::memcpy(input, from, 4 * columns);
            else
                for (std::size_t i = 0; i < columns; ++i)
                    input[sorted(i, loops.width)] = load<float>(from + 4 * i);
        }
    }
};

// A few rows at a time, which become floats piece by piece.
class Panel {
  public:
    explicit Panel(const Product& product)
        : all_(product),
          codes_(product.kind == Codes::packed ? loops_.nibbles
                 : product.kind == Codes::fp8  ? loops_.fp8
                                               : loops_.ints),
          scales_(rows_at_once * product.across),
          zeros_(rows_at_once * product.across, lowest()) {}

    void run(std::size_t first, std::size_t last) {
        for (std::size_t n = 0; n < all_.count; n += inputs_in_cache)
            for (std::size_t r = first; r < last; r += rows_at_once)
                multiply(r, std::min<std::size_t>(rows_at_once, last - r), n,
                         std::min(inputs_in_cache, all_.count - n));
    }

  private:
    // What nibbles count up from is -8.
    std::int32_t lowest() const { return all_.kind == Codes::packed ? 8 : 0; }

    void multiply(std::size_t first, std::size_t height, std::size_t from, std::size_t inputs) {
        read_blocks(first * all_.across, height * all_.across);
        std::fill(sums_.begin(), sums_.end(), 0.0f);
        for (std::size_t begin = 0; begin < all_.columns; begin += one_piece) {
            const std::size_t end = std::min(begin + one_piece, all_.columns);
            const std::size_t length = divide_up(end - begin, whole) * whole;
            const bool direct =
                height == rows_at_once && inputs <= few * loops_.inputs_at_once && is_whole(begin, end);
            for (std::size_t r = 0; !direct && r < height; ++r) decode(first + r, r, begin, end, length);
            const float* const given = all_.inputs.data() + from * all_.padded + begin;
            std::size_t groups = divide_up(inputs, loops_.inputs_at_once);
            for (std::size_t n = 0, some = 0; n < inputs; n += some, --groups) {
                some = divide_up(inputs - n, groups);  // groups of much the same size
                float* const sums = sums_.data() + n * rows_at_once;
                if (direct)
                    codes_.multiply[some](all_.codes.data() + first * all_.stride, all_.stride, scales(0),
                                          all_.across, begin, end, given + n * all_.padded, all_.padded,
                                          sums);
                else
                    loops_.multiply[some](floats_.data(), given + n * all_.padded, all_.padded, length, sums);
            }
        }
        for (std::size_t n = 0; n < inputs; ++n)
            std::copy_n(sums_.data() + n * rows_at_once, height,
                        all_.products + (from + n) * all_.rows + first);
    }

    RowScales scales(std::size_t place) const {
        return {scales_.data() + place * all_.across, zeros_.data() + place * all_.across, all_.block};
    }

    bool is_whole(std::size_t begin, std::size_t end) const {
        return (end - begin) % whole == 0 && (all_.across == 1 || all_.block % whole == 0);
    }

    void read_blocks(std::size_t first, std::size_t count) {
        read_scales(all_.scales, first, std::span(scales_).first(count));
        if (all_.scales.zero_points.empty()) return;
        for (std::size_t i = 0; i < count; ++i)
            zeros_[i] = lowest() + static_cast<std::int8_t>(all_.scales.zero_points[first + i]);
    }

    // Ask for codes that come next: rows are too short for the processor to see it.
    void fetch(std::size_t from, std::size_t count) const {
        const std::size_t end = std::min(from + count, all_.codes.size());
        for (; from < end; from += 64) __builtin_prefetch(all_.codes.data() + from);
    }

    void decode(std::size_t row, std::size_t place, std::size_t begin, std::size_t end, std::size_t length) {
        float* const floats = floats_.data() + place * apart;
        if (end - begin < length) std::fill(floats + length - whole, floats + length, 0.0f);
        fetch((row + rows_at_once) * all_.stride + begin * all_.stride / all_.columns,
              (end - begin) * all_.stride / all_.columns);
        codes_.decode(all_.codes.data() + row * all_.stride, scales(place), begin, end, floats);
    }

    const Product& all_;
    const ProductKernels& loops_ = all_.loops;
    const CodeKernels& codes_;
    std::vector<float> scales_;
    std::vector<std::int32_t> zeros_;
    std::vector<float> floats_ = std::vector<float>(rows_at_once * apart);
    std::vector<float> sums_ = std::vector<float>(rows_at_once * inputs_in_cache);
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
                    across, rows,      stride, count,      reinterpret_cast<float*>(products.data())};
    product.take(inputs);
    const std::size_t pieces = std::clamp<std::size_t>(threads, 1, rows);
    on_threads(pieces, [&](std::size_t p) {
        Panel(product).run(rows * p / pieces, rows * (p + 1) / pieces);
    });
}

}  // namespace slimtensors
