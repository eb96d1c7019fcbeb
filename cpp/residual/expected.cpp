#include "residual/expected.h"

#include <algorithm>

#include "core/check.h"
#include "residual/expected_kernels.h"
#include "residual/ordered.h"

namespace slimtensors::residual {
namespace {

constexpr std::size_t word = sizeof(std::uint16_t), state_bytes = sizeof(std::uint32_t);
constexpr std::size_t block_items = 4096;

const ExpectedKernels& active_kernels() {
    static constexpr KernelTable<ExpectedKernels> table{.plain = &plain::expected_kernels,
                                                        .avx2 = SLIM_X86(&avx2::expected_kernels)};
    return table.active();
}

// How an item is coded with a table.
struct Symbol {
    std::uint32_t index, low;
};

template <class Word>
Symbol split(Word item, Word base, Word origin, bool fresh, unsigned low_bits) {
    const std::uint32_t mask = (1u << low_bits) - 1;
    if (fresh) {
        const Word magnitude = item & Word(~sign_bit<Word>);
        const std::uint32_t above = std::uint32_t{magnitude} - origin, size = above >> low_bits;
        if (magnitude < origin || size >= max_symbol) return {escape, 0};
        const bool same = ((item ^ base) & sign_bit<Word>) == 0;
        return {same ? symbol_zero + 1 + size : symbol_zero - 1 - size, above & mask};
    }
    const std::int64_t steps = steps_outward(base, item), k = steps >> low_bits;
    if (k < -max_symbol || k > max_symbol) return {escape, 0};
    return {static_cast<std::uint32_t>(k + symbol_zero), static_cast<std::uint32_t>(steps) & mask};
}

// Codes items backwards, and collects words in reverse.
struct Encoder {
    std::array<std::uint32_t, lanes> states;
    std::vector<std::uint16_t> words;

    void put_low(std::size_t lane, std::uint32_t low, unsigned bits) {
        std::uint32_t& state = states[lane];
        if (bits != 0 && state >> (32 - bits) != 0) spill(state);
        state = state << bits | low;
    }
    void put_symbol(std::size_t lane, std::uint32_t frequency, std::uint32_t start, std::uint32_t low,
                    unsigned bits) {
        std::uint32_t& state = states[lane];
        if (state >= std::uint64_t{frequency} << (32 - frequency_bits - bits)) spill(state);
        state = state << bits | low;
        state = (state / frequency << frequency_bits) + state % frequency + start;
    }

  private:
    void spill(std::uint32_t& state) {
        words.push_back(static_cast<std::uint16_t>(state));
        state >>= 16;
    }
};

}  // namespace

ExpectedModel::ExpectedModel(Bytes model, FloatType type, std::size_t items)
    : type_(type), items_(items), fresh_table_(contexts), fresh_context_(contexts) {
    check(type == FloatType::f32 || type == FloatType::f16 || type == FloatType::bf16,
          "unsupported float type");
    ExpectedParameters parameters = read_expected(model, items);
    width_ = parameters.width;
    rows_ = std::move(parameters.rows);
    columns_ = std::move(parameters.columns);
    const unsigned mantissa = layout_of(type).mantissa;
    std::size_t before = 0;  // contexts without table below the first one with a table
    for (std::size_t c = 0; c < contexts; ++c) {
        if (parameters.used >> c & 1) {
            const int context = static_cast<int>(c);
            const ContextTable table =
                make_context_table(context, parameters.shape, parameters.tables[c], mantissa);
            if (context >= residual::fresh_context && fresh_table_ == contexts) {
                fresh_table_ = static_cast<int>(frequencies_.size());
                fresh_context_ = frequencies_.empty() ? 0 : static_cast<unsigned>(c);
            }
            frequencies_.push_back(table.frequencies);
            low_of_[c] = static_cast<std::uint8_t>(table.low_bits);
        } else if (!frequencies_.empty()) {
            low_of_[c] = low_of_[c - 1];
        } else {
            ++before;
            continue;
        }
        table_of_[c] = static_cast<std::uint8_t>(frequencies_.size() - 1);
    }
    std::fill_n(table_of_.begin(), before, std::uint8_t{0});
    std::fill_n(low_of_.begin(), before, low_of_[before]);
    slots_.reserve(frequencies_.size() * frequency_unit);
    for (const auto& frequencies : frequencies_)
        for (std::uint32_t s = 0; s < symbols; ++s)
            for (std::uint32_t offset = 0; offset < frequencies[s]; ++offset)
                slots_.push_back(s | (frequencies[s] - 1u) << 6 | offset << 17);
}

std::size_t ExpectedModel::chunk_bound(std::size_t items) const {
    return state_bytes * (1 + lanes) + items * (layout_of(type_).itemsize + 2 * word);
}

// Call `visit(offset in items, count, tables, lows, origins)` for blocks of a chunk, a multiple of `lanes`.
template <class Visit>
void ExpectedModel::by_blocks(std::size_t first, Bytes base, Visit visit) const {
    const auto [itemsize, mantissa] = layout_of(type_);
    const ContextRule rule{table_of_.data(), low_of_.data(), fresh_context_, mantissa};
    std::vector<std::uint8_t> tables(block_items), lows(block_items), origins(block_items * itemsize);
    const std::size_t count = base.size() / itemsize;
    for (std::size_t begin = 0; begin < count; begin += block_items) {
        const std::size_t size = std::min(block_items, count - begin);
        for (std::size_t at = 0; at < size;) {
            const std::size_t row = (first + begin + at) / width_, column = (first + begin + at) % width_;
            const std::size_t length = std::min(width_ - column, size - at);
            active_kernels().find_contexts(rule, base.data() + (begin + at) * itemsize, itemsize, rows_[row],
                                           columns_.data() + column, length, tables.data() + at,
                                           lows.data() + at, origins.data() + at * itemsize);
            at += length;
        }
        visit(begin, size, tables.data(), lows.data(), origins.data());
    }
}

std::size_t ExpectedModel::encode(std::size_t first, Bytes items, Bytes base, MutableBytes chunk) const {
    const std::size_t itemsize = layout_of(type_).itemsize, count = items.size() / itemsize;
    check(items.size() == base.size() && items.size() % itemsize == 0, "arrays differ in size");
    check(first <= items_ && count <= items_ - first, "items are out of range");
    check(chunk.size() >= chunk_bound(count), "chunk is too small");
    std::vector<std::uint8_t> tables(count), lows(count);
    std::vector<Symbol> coded(count);
    std::vector<std::uint8_t> escapes;
    const auto split_block = [&]<class Word>(Word, std::size_t begin, std::size_t size,
                                             const std::uint8_t* origins) {
        for (std::size_t j = 0; j < size; ++j) {
            const std::size_t i = begin + j;
            const Word item = load<Word>(items.data() + i * sizeof(Word));
            Symbol symbol =
                split<Word>(item, load<Word>(base.data() + i * sizeof(Word)),
                            load<Word>(origins + j * sizeof(Word)), tables[i] >= fresh_table_, lows[i]);
            if (frequencies_[tables[i]][symbol.index] == 0) symbol = {escape, 0};
            if (symbol.index == escape) {
                lows[i] = 0;
                const std::uint8_t* bytes = items.data() + i * sizeof(Word);
                escapes.insert(escapes.end(), bytes, bytes + sizeof(Word));
            }
            coded[i] = symbol;
        }
    };
    by_blocks(first, base,
              [&](std::size_t begin, std::size_t size, const std::uint8_t* block_tables,
                  const std::uint8_t* block_lows, const std::uint8_t* origins) {
                  std::copy_n(block_tables, size, tables.data() + begin);
                  std::copy_n(block_lows, size, lows.data() + begin);
                  itemsize == 2 ? split_block(std::uint16_t{}, begin, size, origins)
                                : split_block(std::uint32_t{}, begin, size, origins);
              });

    std::vector<std::array<std::uint16_t, symbols>> starts(frequencies_.size());
    for (std::size_t t = 0; t < starts.size(); ++t)
        for (std::size_t s = 1; s < symbols; ++s)
            starts[t][s] = static_cast<std::uint16_t>(starts[t][s - 1] + frequencies_[t][s - 1]);
    Encoder encoder;
    encoder.states.fill(min_state);
    encoder.words.reserve(count / 2);
    for (std::size_t g = ceil_div(count, vector_lanes); g-- > 0;) {
        const std::size_t from = g * vector_lanes, until = std::min(from + vector_lanes, count);
        for (std::size_t i = until; i-- > from;)
            if (lows[i] > first_low_bits)
                encoder.put_low(i % lanes, coded[i].low >> first_low_bits, lows[i] - first_low_bits);
        for (std::size_t i = until; i-- > from;) {
            const unsigned bits = std::min<unsigned>(lows[i], first_low_bits);
            encoder.put_symbol(i % lanes, frequencies_[tables[i]][coded[i].index],
                               starts[tables[i]][coded[i].index], coded[i].low & ((1u << bits) - 1), bits);
        }
    }

    const std::size_t used = std::min(lanes, count);
    std::uint8_t* out = chunk.data();
    store(out, static_cast<std::uint32_t>(escapes.size() / itemsize));
    std::memcpy(out + state_bytes, encoder.states.data(), used * state_bytes);
    out += state_bytes * (1 + used);
    if (!escapes.empty()) std::memcpy(out, escapes.data(), escapes.size());
    out += escapes.size();
    for (std::size_t w = encoder.words.size(); w-- > 0; out += word) store(out, encoder.words[w]);
    return static_cast<std::size_t>(out - chunk.data());
}

void ExpectedModel::decode(std::size_t first, Bytes chunk, Bytes base, MutableBytes items) const {
    const auto [itemsize, mantissa] = layout_of(type_);
    const std::size_t count = items.size() / itemsize, used = std::min(lanes, count);
    check(items.size() == base.size() && items.size() % itemsize == 0, "arrays differ in size");
    check(first <= items_ && count <= items_ - first, "items are out of range");
    check(chunk.size() >= state_bytes * (1 + used), "chunk of changes is truncated");
    const std::size_t escapes = load<std::uint32_t>(chunk.data());
    const Bytes body = chunk.subspan(state_bytes * (1 + used));
    check(escapes <= body.size() / itemsize && (body.size() - escapes * itemsize) % word == 0,
          "chunk of changes has the wrong size");
    ItemCursor cursor;
    cursor.states.fill(min_state);
    std::memcpy(cursor.states.data(), chunk.data() + state_bytes, used * state_bytes);
    check(std::ranges::all_of(cursor.states, [](std::uint32_t state) { return state >= min_state; }),
          "state of the coder is out of range");
    cursor.escape = body.data();
    cursor.escapes_end = cursor.next = body.data() + escapes * itemsize;
    cursor.end = body.data() + body.size();
    by_blocks(first, base,
              [&, itemsize = itemsize, mantissa = mantissa](
                  std::size_t begin, std::size_t size, const std::uint8_t* tables, const std::uint8_t* lows,
                  const std::uint8_t* origins) {
                  const ItemBlock block{.slots = slots_.data(),
                                        .tables = tables,
                                        .lows = lows,
                                        .origins = origins,
                                        .base = base.data() + begin * itemsize,
                                        .out = items.data() + begin * itemsize,
                                        .count = size,
                                        .fresh_table = fresh_table_,
                                        .mantissa = mantissa};
                  const std::size_t done = active_kernels().decode(block, itemsize, 0, cursor);
                  if (done < size) plain::expected_kernels.decode(block, itemsize, done, cursor);
              });
    const bool is_reset =
        std::ranges::all_of(cursor.states, [](std::uint32_t state) { return state == min_state; });
    check(cursor.next == cursor.end && cursor.escape == cursor.escapes_end && is_reset,
          "chunk of changes has trailing or missing data");
}

}  // namespace slimtensors::residual
