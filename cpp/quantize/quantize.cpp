// Checks, rows and pieces of quantization; the inner loops are in kernels.cpp.
#include "quantize/quantize.h"

#include <algorithm>

#include "core/check.h"
#include "quantize/kernels.h"
#include "quantize/squares.h"

namespace slimtensors::quantize {
namespace {

std::size_t size_of(FloatType type) {
    switch (type) {
        case FloatType::f32:
            return 4;
        case FloatType::f16:
        case FloatType::bf16:
            return 2;
        default:
            return 1;
    }
}

// Return the index of a type in the arrays of kernels.
std::size_t kernel_index(FloatType type) {
    const auto index = static_cast<std::size_t>(type);
    check(index <= 2, "items must be float32, float16 or bfloat16");
    return index;
}

float value_at(const Scales& scales, std::size_t i) {
    const std::uint8_t* at = scales.values.data() + i * size_of(scales.type);
    switch (scales.type) {
        case FloatType::f32:
            return load<float>(at);
        case FloatType::f16:
            return F16::value(load<std::uint16_t>(at));
        case FloatType::bf16:
            return BF16::value(load<std::uint16_t>(at));
        case FloatType::e4m3:
            return E4M3::value(*at);
        default:  // e8m0: the exponent of a float32; 0 is subnormal
            return *at == 0 ? 0x1p-127f : from_bits(std::uint32_t{*at} << 23);
    }
}

std::size_t row_bytes(CodeFormat format, std::size_t row) {
    switch (format.kind) {
        case CodeFormat::packed:
            return 4 * ceil_div(row * format.bits, 32);
        case CodeFormat::fp4:
            return row / 2;
        default:
            return row;
    }
}

// Rows and scales of one matrix. The constructor checks all sizes.
class Matrix {
  public:
    Matrix(std::size_t item_bytes, std::size_t itemsize, const Scales& scales, CodeFormat format,
           std::size_t code_bytes)
        : scales_(scales) {
        const Blocks& blocks = scales.blocks;
        const std::size_t row = blocks.row;
        check(row != 0 && blocks.columns != 0 && blocks.rows != 0, "rows and blocks must not be empty");
        check(row <= max_items && item_bytes % (row * itemsize) == 0, "items are not whole rows");
        check(format.kind != CodeFormat::fp4 || row % 2 == 0,
              "rows of 4-bit floats must have an even number of items");
        rows_ = item_bytes / (row * itemsize);
        check(code_bytes == rows_ * row_bytes(format, row), "codes do not match the size of their items");
        across_ = ceil_div(row, blocks.columns);
        const std::size_t count = across_ * ceil_div(rows_, blocks.rows);
        check(scales.values.size() == count * size_of(scales.type), "scales must have one scale per block");
        check(scales.zero_points.empty() || scales.zero_points.size() == count,
              "zero points must have one zero point per scale");
    }

    std::size_t rows() const { return rows_; }

    // Call `work(begin, count, scale, zero)` for all runs of a piece that share a scale. Without zero points,
    // `zero` is 0.0: subtracting it changes nothing, not even the sign of a zero.
    template <class Work>
    void for_each_scale(std::size_t r, std::size_t begin, std::size_t count, Work work) const {
        const Blocks& blocks = scales_.blocks;
        const std::size_t first = r / blocks.rows * across_;
        for (std::size_t at = begin, block = begin / blocks.columns; at < begin + count; ++block) {
            const std::size_t end = std::min(begin + count, (block + 1) * blocks.columns);
            const std::size_t i = first + block;
            const float zero =
                scales_.zero_points.empty() ? 0.0f : static_cast<std::int8_t>(scales_.zero_points[i]);
            work(at - begin, end - at, value_at(scales_, i) / scales_.divisor, zero);
            at = end;
        }
    }

    static constexpr std::size_t max_items = std::size_t{1} << 40;

  private:
    const Scales& scales_;
    std::size_t rows_, across_;
};

// Difference between packed codes and the integers they represent.
std::uint8_t offset_of(CodeFormat format) {
    return format.kind == CodeFormat::packed ? static_cast<std::uint8_t>(1u << (format.bits - 1)) : 0;
}

bool is_packed(CodeFormat format) {
    return format.kind == CodeFormat::packed || format.kind == CodeFormat::fp4;
}

// Call `work(first item, numbers, count)` with the dequantized numbers of every piece.
template <class Work>
void for_each_piece(Bytes codes, CodeFormat format, const Matrix& matrix, const Blocks& blocks, Work work) {
    const Kernels& loops = active_kernels();
    const auto to_numbers = format.kind == CodeFormat::fp4   ? loops.from_fp4
                            : format.kind == CodeFormat::fp8 ? loops.from_fp8
                                                             : loops.from_ints;
    const std::size_t stride = row_bytes(format, blocks.row);
    alignas(64) float numbers[piece_items];
    alignas(64) std::uint8_t single[piece_items];
    for (std::size_t r = 0; r < matrix.rows(); ++r) {
        const std::uint8_t* const in = codes.data() + r * stride;
        for (std::size_t at = 0; at < blocks.row; at += piece_items) {
            const std::size_t count = std::min(piece_items, blocks.row - at);
            if (is_packed(format))
                loops.unpack[format.bits](in + at * format.bits / 8, count, offset_of(format), single);
            to_numbers(is_packed(format) ? single : in + at, count, numbers);
            matrix.for_each_scale(r, at, count,
                                  [&](std::size_t begin, std::size_t n, float scale, float zero) {
                                      loops.multiply(numbers + begin, n, scale, zero);
                                  });
            work(r * blocks.row + at, numbers, count);
        }
    }
}

// If many items share a scale, the 16 values of 4-bit codes are rounded only once.
constexpr std::size_t min_table_columns = 64;
constexpr std::size_t min_non_temporal_bytes = std::size_t{1} << 20;

void dequantize_by_table(Bytes codes, CodeFormat format, const Matrix& matrix, const Blocks& blocks,
                         FloatType type, MutableBytes items) {
    const Kernels& loops = active_kernels();
    const std::size_t stride = row_bytes(format, blocks.row);
    std::uint8_t all[16];
    for (unsigned code = 0; code < 16; ++code)
        all[code] = static_cast<std::uint8_t>(code - offset_of(format));
    float numbers[16];
    (format.kind == CodeFormat::fp4 ? loops.from_fp4 : loops.from_ints)(all, 16, numbers);
    const auto tabulate = loops.tabulate[kernel_index(type)];
    for (std::size_t r = 0; r < matrix.rows(); ++r)
        matrix.for_each_scale(r, 0, blocks.row,
                              [&](std::size_t begin, std::size_t count, float scale, float zero) {
                                  std::uint16_t table[16];
                                  tabulate(numbers, scale, zero, table);
                                  loops.look_up(codes.data() + r * stride + begin / 2, count, table,
                                                items.data() + (r * blocks.row + begin) * 2,
                                                items.size() >= min_non_temporal_bytes);
                              });
    loops.fence();
}

}  // namespace

const Kernels& active_kernels() {
    static constexpr KernelTable<Kernels> table{.plain = &plain::kernels, .avx2 = SLIM_X86(&avx2::kernels)};
    return table.active();
}

FloatType parse_float_type(std::string_view name) {
    if (name == "float32") return FloatType::f32;
    if (name == "float16") return FloatType::f16;
    if (name == "bfloat16") return FloatType::bf16;
    if (name == "float8_e4m3fn") return FloatType::e4m3;
    if (name == "float8_e8m0fnu") return FloatType::e8m0;
    fail("unknown float type");
}

CodeFormat parse_code_format(std::string_view kind, unsigned bits) {
    check(bits >= 1 && bits <= 8, "codes must have 1 to 8 bits");
    if (kind == "int") return {CodeFormat::ints, bits};
    if (kind == "packed") return {CodeFormat::packed, bits};
    if (kind == "fp4" && bits == 4) return {CodeFormat::fp4, bits};
    if (kind == "fp8" && bits == 8) return {CodeFormat::fp8, bits};
    fail("unknown code format");
}

void find_ranges(Bytes items, FloatType type, std::size_t row, std::size_t columns, MutableBytes low,
                 MutableBytes high) {
    const auto range = active_kernels().range[kernel_index(type)];
    const std::size_t size = size_of(type);
    check(row != 0 && columns != 0 && row <= Matrix::max_items && items.size() % (row * size) == 0,
          "items are not whole rows");
    const std::size_t across = ceil_div(row, columns), rows = items.size() / (row * size);
    check(low.size() == rows * across * size && high.size() == low.size(),
          "low and high must have one item per run of columns");
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t b = 0; b < across; ++b) {
            const std::size_t count = std::min(columns, row - b * columns), at = (r * across + b) * size;
            range(items.data() + (r * row + b * columns) * size, count, low.data() + at, high.data() + at);
        }
}

bool quantize(Bytes items, FloatType type, FloatType compute_type, const Scales& scales, CodeFormat format,
              MutableBytes codes) {
    const Blocks& blocks = scales.blocks;
    const Kernels& loops = active_kernels();
    const auto load_items = loops.load[kernel_index(type)];
    const auto divide = loops.divide[kernel_index(compute_type)];
    const std::size_t size = size_of(type), stride = row_bytes(format, blocks.row);
    const Matrix matrix(items.size(), size, scales, format, codes.size());
    const float half = static_cast<float>(1u << (format.bits - 1));
    alignas(64) float numbers[piece_items];
    alignas(64) std::uint8_t single[piece_items];
    bool finite = true;
    for (std::size_t r = 0; r < matrix.rows(); ++r) {
        std::uint8_t* const out = codes.data() + r * stride;
        for (std::size_t at = 0; at < blocks.row; at += piece_items) {
            const std::size_t count = std::min(piece_items, blocks.row - at);
            finite &= load_items(items.data() + (r * blocks.row + at) * size, count, numbers);
            matrix.for_each_scale(r, at, count,
                                  [&](std::size_t begin, std::size_t n, float scale, float zero) {
                                      divide(numbers + begin, n, scale, zero);
                                  });
            std::uint8_t* const bytes = is_packed(format) ? single : out + at;
            if (format.kind == CodeFormat::fp4)
                loops.to_fp4(numbers, count, bytes);
            else if (format.kind == CodeFormat::fp8)
                loops.to_fp8(numbers, count, bytes);
            else
                loops.to_ints(numbers, count, -half, half - 1, bytes);
            if (is_packed(format))
                loops.pack[format.bits](single, count, offset_of(format), out + at * format.bits / 8);
        }
        if (format.kind == CodeFormat::packed) {
            const std::size_t used = ceil_div(blocks.row * format.bits, 8);
            std::fill(out + used, out + stride, std::uint8_t{0});
        }
    }
    return finite;
}

void dequantize(Bytes codes, CodeFormat format, const Scales& scales, FloatType type, MutableBytes items) {
    const Blocks& blocks = scales.blocks;
    const auto store_items = active_kernels().store[kernel_index(type)];
    const std::size_t size = size_of(type);
    const Matrix matrix(items.size(), size, scales, format, codes.size());
    if (is_packed(format) && format.bits == 4 && size == 2 && blocks.columns >= min_table_columns &&
        (blocks.columns % 2 == 0 || blocks.columns >= blocks.row))
        return dequantize_by_table(codes, format, matrix, blocks, type, items);
    for_each_piece(codes, format, matrix, scales.blocks,
                   [&](std::size_t first, const float* numbers, std::size_t count) {
                       store_items(numbers, count, items.data() + first * size);
                   });
}

RoundingLoss rounding_loss(Bytes items, FloatType type, Bytes codes, CodeFormat format,
                           const Scales& scales) {
    const auto store_items = active_kernels().store[kernel_index(type)];
    const std::size_t size = size_of(type);
    const Matrix matrix(items.size(), size, scales, format, codes.size());
    alignas(64) std::uint8_t rounded[piece_items * sizeof(float)];
    SquareSums distance, total;
    for_each_piece(codes, format, matrix, scales.blocks,
                   [&](std::size_t first, const float* numbers, std::size_t count) {
                       const Bytes given = items.subspan(first * size, count * size);
                       store_items(numbers, count, rounded);
                       distance.add_differences({rounded, given.size()}, given, type);
                       total.add(given, type);
                   });
    return {distance.total(), total.total()};
}

void pack_codes(Bytes codes, unsigned bits, std::size_t row, MutableBytes words) {
    const CodeFormat packed = parse_code_format("packed", bits);
    check(row != 0 && row <= Matrix::max_items && codes.size() % row == 0, "codes are not whole rows");
    const std::size_t stride = row_bytes(packed, row), used = ceil_div(row * bits, 8);
    check(words.size() == codes.size() / row * stride, "words do not match the size of their codes");
    const auto pack = active_kernels().pack[bits];
    for (std::size_t r = 0; r < codes.size() / row; ++r) {
        std::uint8_t* const out = words.data() + r * stride;
        pack(codes.data() + r * row, row, offset_of(packed), out);
        std::fill(out + used, out + stride, std::uint8_t{0});
    }
}

void unpack_codes(Bytes words, unsigned bits, std::size_t row, MutableBytes codes) {
    const CodeFormat packed = parse_code_format("packed", bits);
    check(row != 0 && row <= Matrix::max_items && codes.size() % row == 0, "codes are not whole rows");
    const std::size_t stride = row_bytes(packed, row);
    check(words.size() == codes.size() / row * stride, "words do not match the size of their codes");
    const auto unpack = active_kernels().unpack[bits];
    for (std::size_t r = 0; r < codes.size() / row; ++r)
        unpack(words.data() + r * stride, row, offset_of(packed), codes.data() + r * row);
}

}  // namespace slimtensors::quantize
