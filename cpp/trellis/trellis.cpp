#include "trellis/trellis.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "trellis/kernels.h"

namespace slimtensors::trellis {
namespace {

constexpr std::size_t word = sizeof(std::uint16_t), state_bytes = sizeof(std::uint32_t);

// How an integer is coded with a table.
struct Symbol {
    std::uint32_t index, low_bits, low;
};

Symbol split(std::int64_t k, const Table& table) {
    const std::int64_t high = k >> table.low_bits;
    if (high <= -symbol_zero || high >= symbol_zero) return {escape, 0, 0};
    const auto index = static_cast<std::uint32_t>(high + symbol_zero);
    if (table.frequencies[index] == 0) return {escape, 0, 0};
    return {index, static_cast<std::uint32_t>(table.low_bits),
            static_cast<std::uint32_t>(k & ((1 << table.low_bits) - 1))};
}

}  // namespace

const Kernels& active_kernels() {
    static constexpr KernelTable<Kernels> table{.plain = &plain::kernels, .avx2 = SLIM_X86(&avx2::kernels)};
    return table.active();
}

std::int32_t take_escape(Cursor& cursor) {
    check(cursor.escapes_end - cursor.escape >= 4, "chunk has too few escaped integers");
    const auto k = load<std::int32_t>(cursor.escape);
    cursor.escape += 4;
    constexpr std::int32_t limit = 1 << 30;  // twice as much must fit into 32 bits
    check(k > -limit && k < limit, "escaped integer is out of range");
    return k;
}

float step_size(int code, int fineness) {
    check(code >= min_step << fineness && code <= max_step << fineness, "step is out of range");
    // 2^(i / 64), rounded to nearest
    constexpr std::array<std::uint32_t, step_unit << max_fineness> mantissas{
        0x3f800000, 0x3f8164d2, 0x3f82cd87, 0x3f843a29, 0x3f85aac3, 0x3f871f62, 0x3f88980f, 0x3f8a14d5,
        0x3f8b95c2, 0x3f8d1adf, 0x3f8ea43a, 0x3f9031dc, 0x3f91c3d3, 0x3f935a2b, 0x3f94f4f0, 0x3f96942d,
        0x3f9837f0, 0x3f99e046, 0x3f9b8d3a, 0x3f9d3eda, 0x3f9ef532, 0x3fa0b051, 0x3fa27043, 0x3fa43516,
        0x3fa5fed7, 0x3fa7cd94, 0x3fa9a15b, 0x3fab7a3a, 0x3fad583f, 0x3faf3b79, 0x3fb123f6, 0x3fb311c4,
        0x3fb504f3, 0x3fb6fd92, 0x3fb8fbaf, 0x3fbaff5b, 0x3fbd08a4, 0x3fbf179a, 0x3fc12c4d, 0x3fc346cd,
        0x3fc5672a, 0x3fc78d75, 0x3fc9b9be, 0x3fcbec15, 0x3fce248c, 0x3fd06334, 0x3fd2a81e, 0x3fd4f35b,
        0x3fd744fd, 0x3fd99d16, 0x3fdbfbb8, 0x3fde60f5, 0x3fe0ccdf, 0x3fe33f89, 0x3fe5b907, 0x3fe8396a,
        0x3feac0c7, 0x3fed4f30, 0x3fefe4ba, 0x3ff28177, 0x3ff5257d, 0x3ff7d0df, 0x3ffa83b3, 0x3ffd3e0c};
    const int bits = 3 + fineness, index = code & ((1 << bits) - 1);
    const std::uint32_t mantissa = mantissas[static_cast<std::size_t>(index << (max_fineness - fineness))];
    return std::ldexp(std::bit_cast<float>(mantissa), code >> bits);
}

std::vector<float> step_sizes(std::span<const std::int16_t> codes, int fineness) {
    std::vector<float> sizes(codes.size());
    std::transform(codes.begin(), codes.end(), sizes.begin(),
                   [&](std::int16_t code) { return step_size(code, fineness); });
    return sizes;
}

Slots make_slots(const Tables& tables) {
    Slots slots;
    slots.reserve(tables.all().size() * frequency_unit);
    for (const Table& table : tables.all())
        for (std::uint32_t s = 0; s < symbols; ++s) {
            const std::uint32_t frequency = table.frequencies[s];
            const std::uint32_t low_bits = s == escape ? 0 : static_cast<std::uint32_t>(table.low_bits);
            const std::uint32_t head = s | low_bits << 6 | (frequency - 1) << 9;
            for (std::uint32_t offset = 0; offset < frequency; ++offset) slots.push_back(head | offset << 20);
        }
    return slots;
}

std::size_t chunk_bound(std::size_t rows, std::size_t columns) {
    return state_bytes + rows * columns * (sizeof(std::int32_t) + word) + lanes * state_bytes;
}

std::size_t encode_chunk(const Tables& tables, const Layout& layout, std::span<const std::int32_t> integers,
                         MutableBytes out) {
    const std::size_t rows = layout.row_classes.size(), columns = layout.column_classes.size();
    check(integers.size() == rows * columns, "integers do not match the rows and columns");
    check(out.size() >= chunk_bound(rows, columns), "output is too small");
    std::vector<std::uint32_t> starts(tables.all().size() * symbols);
    for (std::size_t t = 0; t < tables.all().size(); ++t)
        for (std::size_t s = 1; s < symbols; ++s)
            starts[t * symbols + s] = starts[t * symbols + s - 1] + tables.all()[t].frequencies[s - 1];

    std::array<std::uint32_t, lanes> states;
    states.fill(min_state);
    std::vector<std::uint16_t> words;  // in reverse
    std::vector<std::int32_t> escapes;
    words.reserve(integers.size() / 4);
    std::vector<std::uint8_t> quantizers(rows * lanes);
    const std::size_t groups = ceil_div(columns, lanes);
    for (std::size_t g = groups; g-- > 0;) {
        const std::size_t from = g * lanes, count = std::min(lanes, columns - from);
        std::array<std::uint8_t, lanes> quantizer{};
        for (std::size_t i = 0; i < rows; ++i)
            for (std::size_t j = 0; j < count; ++j) {
                quantizers[i * lanes + j] = quantizer[j];
                const auto k = static_cast<std::uint32_t>(integers[i * columns + from + j]);
                quantizer[j] = next_state[quantizer[j]][k & 1];
            }
        for (std::size_t i = rows; i-- > 0;)
            for (std::size_t j = count; j-- > 0;) {
                const int weight_class = limit_class(layout.row_classes[i] + layout.column_classes[from + j]);
                const unsigned odd = quantizers[i * lanes + j] & 1;
                const Table& table = tables.at(weight_class, odd);
                const std::int32_t k = integers[i * columns + from + j];
                const Symbol symbol = split(k, table);
                if (symbol.index == escape) escapes.push_back(k);
                const std::uint32_t frequency = table.frequencies[symbol.index];
                const std::size_t t = static_cast<std::size_t>(weight_class - tables.first()) * 2 + odd;
                std::uint32_t& state = states[j];
                if (state >= std::uint64_t{frequency} << (32 - frequency_bits - symbol.low_bits)) {
                    words.push_back(static_cast<std::uint16_t>(state));
                    state >>= 16;
                }
                state = state << symbol.low_bits | symbol.low;
                state = (state / frequency << frequency_bits) + state % frequency +
                        starts[t * symbols + symbol.index];
            }
    }
    std::uint8_t* at = out.data();
    const auto put = [&](auto value) { store(at, value), at += sizeof value; };
    put(static_cast<std::uint32_t>(escapes.size()));
    for (std::size_t j = 0; j < std::min(lanes, columns); ++j) put(states[j]);
    std::for_each(escapes.rbegin(), escapes.rend(), put);
    std::for_each(words.rbegin(), words.rend(), put);
    return static_cast<std::size_t>(at - out.data());
}

Decoder::Decoder(const Layout& layout, const Tables& tables)
    : layout_(layout),
      first_class_(tables.first()),
      slots_(make_slots(tables)),
      row_steps_(step_sizes(layout.row_steps, layout.parameters.row_fineness)),
      column_steps_(step_sizes(layout.column_steps, 0)) {
    check(layout.row_steps.size() == layout.row_classes.size() &&
              layout.column_steps.size() == layout.column_classes.size(),
          "steps and classes differ in number");
}

void Decoder::decode(Bytes chunk, std::size_t first, std::size_t count, FloatType type,
                     MutableBytes out) const {
    check(type == FloatType::f32 || type == FloatType::f16 || type == FloatType::bf16,
          "unsupported float type");
    const std::size_t columns = column_steps_.size(), used = std::min(lanes, columns);
    const std::size_t itemsize = type == FloatType::f32 ? 4 : 2;
    check(first <= row_steps_.size() && count <= row_steps_.size() - first, "rows are out of range");
    check(out.size() == count * columns * itemsize, "output has the wrong size");
    check(chunk.size() >= state_bytes * (1 + used), "chunk is truncated");
    const std::size_t escapes = load<std::uint32_t>(chunk.data());
    const Bytes body = chunk.subspan(state_bytes * (1 + used));
    check(escapes <= body.size() / 4 && (body.size() - escapes * 4) % word == 0, "chunk has the wrong size");

    Cursor cursor;
    cursor.states.fill(min_state);
    std::memcpy(cursor.states.data(), chunk.data() + state_bytes, used * state_bytes);
    check(std::ranges::all_of(cursor.states, [](std::uint32_t state) { return state >= min_state; }),
          "state of the coder is out of range");
    cursor.escape = body.data();
    cursor.escapes_end = cursor.next = body.data() + escapes * 4;
    cursor.end = body.data() + body.size();
    for (std::size_t from = 0; from < columns; from += lanes) {
        const Group group{.slots = slots_.data(),
                          .first_class = first_class_,
                          .row_classes = layout_.row_classes.data() + first,
                          .row_steps = row_steps_.data() + first,
                          .column_classes = layout_.column_classes.data() + from,
                          .column_steps = column_steps_.data() + from,
                          .columns = std::min(lanes, columns - from),
                          .rows = count,
                          .out = out.data() + from * itemsize,
                          .stride = columns * itemsize,
                          .type = type};
        cursor.quantizers.fill(0);
        const std::size_t done = active_kernels().decode(group, 0, cursor);
        if (done < count) plain::kernels.decode(group, done, cursor);
    }
    const bool is_reset =
        std::ranges::all_of(cursor.states, [](std::uint32_t state) { return state == min_state; });
    check(cursor.next == cursor.end && cursor.escape == cursor.escapes_end && is_reset,
          "chunk has trailing or missing data");
}

}  // namespace slimtensors::trellis
