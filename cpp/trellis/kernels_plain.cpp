#include "core/check.h"
#include "trellis/kernels.h"

namespace slimtensors::trellis::plain {
namespace {

template <class Float>
std::size_t decode_rows(const Group& group, std::size_t first, Cursor& cursor) {
    for (std::size_t i = first; i < group.rows; ++i) {
        std::uint8_t* out = group.out + i * group.stride;
        for (std::size_t j = 0; j < group.columns; ++j) {
            const int weight_class = limit_class(group.row_classes[i] + group.column_classes[j]);
            std::uint32_t& state = cursor.states[j];
            std::uint32_t& quantizer = cursor.quantizers[j];
            const std::size_t table =
                static_cast<std::size_t>(weight_class - group.first_class) * 2 + (quantizer & 1);
            const std::uint32_t slot =
                group.slots[(table << frequency_bits) + (state & (frequency_unit - 1))];
            const std::uint32_t low_bits = slot >> 6 & 7;
            state = (state >> frequency_bits) * ((slot >> 9 & (frequency_unit - 1)) + 1) + (slot >> 20);
            const std::uint32_t low = state & ((1u << low_bits) - 1);
            state >>= low_bits;
            if (state < min_state) {
                check(cursor.end - cursor.next >= 2, "chunk has too few words");
                state = state << 16 | load<std::uint16_t>(cursor.next);
                cursor.next += 2;
            }
            const int symbol = static_cast<int>(slot & 63);
            const std::int32_t k = symbol == escape
                                       ? take_escape(cursor)
                                       : (symbol - symbol_zero) * (1 << low_bits) + static_cast<int>(low);
            const auto steps = static_cast<float>(steps_of(k, quantizer));
            const float value = steps * group.row_steps[i] * group.column_steps[j];
            store(out + j * sizeof(typename Float::Bits), Float::nearest(value));
            quantizer = next_state[quantizer][static_cast<unsigned>(k) & 1];
        }
    }
    return group.rows;
}

std::size_t decode(const Group& group, std::size_t first, Cursor& cursor) {
    switch (group.type) {
        case FloatType::bf16:
            return decode_rows<BF16>(group, first, cursor);
        case FloatType::f16:
            return decode_rows<F16>(group, first, cursor);
        default:
            return decode_rows<F32>(group, first, cursor);
    }
}

}  // namespace

constinit const Kernels kernels{decode};

}  // namespace slimtensors::trellis::plain
