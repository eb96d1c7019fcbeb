// Checks, rows and pieces of quantization; the inner loops are in quantize_loops.h.
#include "quantize/quantize.h"

#include <algorithm>
#include <stdexcept>

#include "core/dispatch.h"
#include "core/floats.h"
#include "quantize/kernels.h"
#include "quantize/squares.h"

namespace slimtensors {
namespace {

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }

const QuantizeKernels& kernels() {
#if defined(SLIMTENSORS_X86)
    if (cpu().avx2) return quantize_kernels_avx2();
#endif
    return quantize_kernels_plain();
}

std::size_t divide_up(std::size_t n, std::size_t by) { return n / by + (n % by != 0); }

std::size_t size_of(Number kind) {
    switch (kind) {
        case Number::f32:
            return 4;
        case Number::f16:
        case Number::bf16:
            return 2;
        default:
            return 1;
    }
}

std::size_t selected(Number kind) {
    const auto index = static_cast<std::size_t>(kind);
    if (index > 2) refuse("items must be float32, float16 or bfloat16");
    return index;
}

float value_at(const Scales& scales, std::size_t i) {
    const std::uint8_t* at = scales.values.data() + i * size_of(scales.kind);
    switch (scales.kind) {
        case Number::f32:
            return load<float>(at);
        case Number::f16:
            return F16::value(load<std::uint16_t>(at));
        case Number::bf16:
            return BF16::value(load<std::uint16_t>(at));
        case Number::e4m3:
            return E4M3::value(*at);
        default:  // the exponent of a float; its lowest is one below the least normal float
            return *at == 0 ? 0x1p-127f : from_bits(std::uint32_t{*at} << 23);
    }
}

std::size_t row_bytes(Codes codes, std::size_t row) {
    switch (codes.kind) {
        case Codes::packed:
            return 4 * divide_up(row * codes.bits, 32);
        case Codes::fp4:
            return row / 2;
        default:
            return row;
    }
}

// What both ways do with every piece of every row, once sizes are checked.
class Walk {
  public:
    Walk(std::size_t item_bytes, std::size_t itemsize, const Scales& scales, const Blocks& blocks,
         Codes codes, std::size_t code_bytes)
        : blocks_(blocks), scales_(scales) {
        const std::size_t row = blocks.row;
        if (row == 0 || blocks.columns == 0 || blocks.rows == 0) refuse("rows and blocks must not be empty");
        if (row > most_items || item_bytes % (row * itemsize) != 0) refuse("items are not whole rows");
        if (codes.kind == Codes::fp4 && row % 2 != 0) refuse("4-bit floats come in pairs");
        rows_ = item_bytes / (row * itemsize);
        if (code_bytes != rows_ * row_bytes(codes, row)) refuse("codes do not have the size of their items");
        across_ = divide_up(row, blocks.columns);
        const std::size_t count = across_ * divide_up(rows_, blocks.rows);
        if (scales.values.size() != count * size_of(scales.kind)) refuse("there must be one scale per block");
        if (!scales.zero_points.empty() && scales.zero_points.size() != count)
            refuse("there must be one zero point per scale");
    }

    std::size_t rows() const { return rows_; }

    // Call `work(begin, count, scale, zero)` for all runs of a piece that share a scale. Without zero points,
    // `zero` is 0.0: to subtract it changes nothing, not even the sign of a zero.
    template <class Work>
    void each_scale(std::size_t r, std::size_t begin, std::size_t count, Work work) const {
        const std::size_t above = r / blocks_.rows * across_;
        for (std::size_t at = begin, block = begin / blocks_.columns; at < begin + count; ++block) {
            const std::size_t end = std::min(begin + count, (block + 1) * blocks_.columns);
            const std::size_t i = above + block;
            const float zero =
                scales_.zero_points.empty() ? 0.0f : static_cast<std::int8_t>(scales_.zero_points[i]);
            work(at - begin, end - at, value_at(scales_, i) / scales_.divisor, zero);
            at = end;
        }
    }

    static constexpr std::size_t most_items = std::size_t{1} << 40;

  private:
    Blocks blocks_;
    const Scales& scales_;
    std::size_t rows_, across_;
};

std::uint8_t flip_of(Codes codes) {
    return codes.kind == Codes::packed ? static_cast<std::uint8_t>(1u << (codes.bits - 1)) : 0;
}

bool is_packed(Codes codes) { return codes.kind == Codes::packed || codes.kind == Codes::fp4; }

// Call `work(first item, numbers, count)` with what the codes of every piece stand for.
template <class Work>
void each_piece(Bytes codes, Codes from, const Walk& walk, const Blocks& blocks, Work work) {
    const QuantizeKernels& loops = kernels();
    const auto numbers_of = from.kind == Codes::fp4   ? loops.of_fp4
                            : from.kind == Codes::fp8 ? loops.of_fp8
                                                      : loops.of_ints;
    const std::size_t stride = row_bytes(from, blocks.row);
    alignas(64) float numbers[piece_items];
    alignas(64) std::uint8_t single[piece_items];
    for (std::size_t r = 0; r < walk.rows(); ++r) {
        const std::uint8_t* const in = codes.data() + r * stride;
        for (std::size_t at = 0; at < blocks.row; at += piece_items) {
            const std::size_t count = std::min(piece_items, blocks.row - at);
            if (is_packed(from))
                loops.unpack[from.bits](in + at * from.bits / 8, count, flip_of(from), single);
            numbers_of(is_packed(from) ? single : in + at, count, numbers);
            walk.each_scale(r, at, count, [&](std::size_t begin, std::size_t n, float scale, float zero) {
                loops.multiply(numbers + begin, n, scale, zero);
            });
            work(r * blocks.row + at, numbers, count);
        }
    }
}

// Where many items share a scale, the 16 that 4-bit codes can become are rounded only once.
constexpr std::size_t worth_a_table = 64;
constexpr std::size_t more_than_caches = std::size_t{1} << 20;

void dequantize_by_table(Bytes codes, Codes from, const Walk& walk, const Blocks& blocks, Number kind,
                         MutableBytes items) {
    const QuantizeKernels& loops = kernels();
    const std::size_t stride = row_bytes(from, blocks.row);
    std::uint8_t all[16];
    for (unsigned code = 0; code < 16; ++code) all[code] = static_cast<std::uint8_t>(code - flip_of(from));
    float numbers[16];
    (from.kind == Codes::fp4 ? loops.of_fp4 : loops.of_ints)(all, 16, numbers);
    const auto tabulate = loops.tabulate[selected(kind)];
    for (std::size_t r = 0; r < walk.rows(); ++r)
        walk.each_scale(r, 0, blocks.row, [&](std::size_t begin, std::size_t count, float scale, float zero) {
            std::uint16_t table[16];
            tabulate(numbers, scale, zero, table);
            loops.look_up(codes.data() + r * stride + begin / 2, count, table,
                          items.data() + (r * blocks.row + begin) * 2, items.size() >= more_than_caches);
        });
    loops.settle();
}

}  // namespace

Number number_named(std::string_view name) {
    if (name == "float32") return Number::f32;
    if (name == "float16") return Number::f16;
    if (name == "bfloat16") return Number::bf16;
    if (name == "float8_e4m3fn") return Number::e4m3;
    if (name == "float8_e8m0fnu") return Number::e8m0;
    refuse("unknown kind of numbers");
}

Codes codes_named(std::string_view name, unsigned bits) {
    if (bits < 1 || bits > 8) refuse("codes have 1 to 8 bits");
    if (name == "int") return {Codes::ints, bits};
    if (name == "packed") return {Codes::packed, bits};
    if (name == "fp4" && bits == 4) return {Codes::fp4, bits};
    if (name == "fp8" && bits == 8) return {Codes::fp8, bits};
    refuse("unknown kind of codes");
}

void find_ranges(Bytes items, Number kind, std::size_t row, std::size_t columns, MutableBytes low,
                 MutableBytes high) {
    const auto range = kernels().range[selected(kind)];
    const std::size_t size = size_of(kind);
    if (row == 0 || columns == 0 || row > Walk::most_items || items.size() % (row * size) != 0)
        refuse("items are not whole rows");
    const std::size_t across = divide_up(row, columns), rows = items.size() / (row * size);
    if (low.size() != rows * across * size || high.size() != low.size())
        refuse("there must be one range per run of columns");
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t b = 0; b < across; ++b) {
            const std::size_t count = std::min(columns, row - b * columns), at = (r * across + b) * size;
            range(items.data() + (r * row + b * columns) * size, count, low.data() + at, high.data() + at);
        }
}

bool quantize(Bytes items, Number kind, Number steps, const Scales& scales, const Blocks& blocks, Codes to,
              MutableBytes codes) {
    const QuantizeKernels& loops = kernels();
    const auto load_items = loops.load[selected(kind)];
    const auto divide = loops.divide[selected(steps)];
    const std::size_t size = size_of(kind), stride = row_bytes(to, blocks.row);
    const Walk walk(items.size(), size, scales, blocks, to, codes.size());
    const float half = static_cast<float>(1u << (to.bits - 1));
    alignas(64) float numbers[piece_items];
    alignas(64) std::uint8_t single[piece_items];
    bool finite = true;
    for (std::size_t r = 0; r < walk.rows(); ++r) {
        std::uint8_t* const out = codes.data() + r * stride;
        for (std::size_t at = 0; at < blocks.row; at += piece_items) {
            const std::size_t count = std::min(piece_items, blocks.row - at);
            finite &= load_items(items.data() + (r * blocks.row + at) * size, count, numbers);
            walk.each_scale(r, at, count, [&](std::size_t begin, std::size_t n, float scale, float zero) {
                divide(numbers + begin, n, scale, zero);
            });
            std::uint8_t* const plain = is_packed(to) ? single : out + at;
            if (to.kind == Codes::fp4)
                loops.to_fp4(numbers, count, plain);
            else if (to.kind == Codes::fp8)
                loops.to_fp8(numbers, count, plain);
            else
                loops.to_ints(numbers, count, -half, half - 1, plain);
            if (is_packed(to)) loops.pack[to.bits](single, count, flip_of(to), out + at * to.bits / 8);
        }
        if (to.kind == Codes::packed) {
            const std::size_t used = divide_up(blocks.row * to.bits, 8);
            std::fill(out + used, out + stride, std::uint8_t{0});
        }
    }
    return finite;
}

void dequantize(Bytes codes, Codes from, const Scales& scales, const Blocks& blocks, Number kind,
                MutableBytes items) {
    const auto store_items = kernels().store[selected(kind)];
    const std::size_t size = size_of(kind);
    const Walk walk(items.size(), size, scales, blocks, from, codes.size());
    if (is_packed(from) && from.bits == 4 && size == 2 && blocks.columns >= worth_a_table &&
        (blocks.columns % 2 == 0 || blocks.columns >= blocks.row))
        return dequantize_by_table(codes, from, walk, blocks, kind, items);
    each_piece(codes, from, walk, blocks, [&](std::size_t first, const float* numbers, std::size_t count) {
        store_items(numbers, count, items.data() + first * size);
    });
}

Loss rounding_loss(Bytes items, Number kind, Bytes codes, Codes from, const Scales& scales,
                   const Blocks& blocks) {
    const auto store_items = kernels().store[selected(kind)];
    const std::size_t size = size_of(kind);
    const Walk walk(items.size(), size, scales, blocks, from, codes.size());
    alignas(64) std::uint8_t rounded[piece_items * sizeof(float)];
    SquareSums distance, whole;
    each_piece(codes, from, walk, blocks, [&](std::size_t first, const float* numbers, std::size_t count) {
        const Bytes given = items.subspan(first * size, count * size);
        store_items(numbers, count, rounded);
        distance.add_differences({rounded, given.size()}, given, kind);
        whole.add(given, kind);
    });
    return {distance.total(), whole.total()};
}

void pack_codes(Bytes codes, unsigned bits, std::size_t row, MutableBytes words) {
    const Codes packed = codes_named("packed", bits);
    if (row == 0 || row > Walk::most_items || codes.size() % row != 0) refuse("codes are not whole rows");
    const std::size_t stride = row_bytes(packed, row), used = divide_up(row * bits, 8);
    if (words.size() != codes.size() / row * stride) refuse("words do not have the size of their codes");
    const auto pack = kernels().pack[bits];
    for (std::size_t r = 0; r < codes.size() / row; ++r) {
        std::uint8_t* const out = words.data() + r * stride;
        pack(codes.data() + r * row, row, flip_of(packed), out);
        std::fill(out + used, out + stride, std::uint8_t{0});
    }
}

void unpack_codes(Bytes words, unsigned bits, std::size_t row, MutableBytes codes) {
    const Codes packed = codes_named("packed", bits);
    if (row == 0 || row > Walk::most_items || codes.size() % row != 0) refuse("codes are not whole rows");
    const std::size_t stride = row_bytes(packed, row);
    if (words.size() != codes.size() / row * stride) refuse("words do not have the size of their codes");
    const auto unpack = kernels().unpack[bits];
    for (std::size_t r = 0; r < codes.size() / row; ++r)
        unpack(words.data() + r * stride, row, flip_of(packed), codes.data() + r * row);
}

}  // namespace slimtensors
