#include "bins/bins.h"

#include <algorithm>
#include <memory>

#include "bins/cells.h"
#include "bins/rans.h"
#include "core/check.h"
#include "core/crc32c.h"

namespace slimtensors::bins {
namespace {

constexpr std::size_t block = 4096;  // items per pass; intermediate results stay in the L1 cache
static_assert(block % (vector_lanes * max_vectors) == 0);

// Offsets of chunks. The constructor checks all sizes; nothing that uses it checks bounds again.
struct Layout {
    std::size_t itemsize, items, chunks;

    Layout(std::size_t items_bytes, std::size_t itemsize_, std::size_t rows_bytes) : itemsize(itemsize_) {
        check_items(items_bytes, itemsize);
        items = items_bytes / itemsize;
        chunks = ceil_div(items, chunk_items);
        check(rows_bytes % row_bytes == 0 && rows_bytes / row_bytes == chunks,
              "rows must have one row for each chunk");
    }

    std::size_t count(std::size_t chunk) const { return std::min(chunk_items, items - chunk * chunk_items); }
    std::size_t at(std::size_t chunk) const { return chunk * chunk_items * itemsize; }
};

// The rows that a range of items overlaps.
struct RowSpan {
    std::size_t width, first, items;

    std::size_t begin() const { return width == 0 ? 0 : first / width; }
    std::size_t count() const {
        return width == 0 || items == 0 ? 0 : (first + items - 1) / width + 1 - begin();
    }

    // Call `work(row, first column, first item, items)` for each part of a row within [from, until).
    template <class Work>
    void for_each_part(std::size_t from, std::size_t until, Work work) const {
        while (from < until) {
            const std::size_t column = width == 0 ? 0 : (first + from) % width;
            const std::size_t left = width == 0 ? until - from : std::min(until - from, width - column);
            work(width == 0 ? 0 : (first + from) / width - begin(), column, from, left);
            from += left;
        }
    }
};

// A model, expanded for encoding and decoding.
struct ExpandedModel {
    Model model;
    std::array<RawBins, 2> raw;  // of unmarked and of marked rows
    // [label of the row][label of the column]
    std::array<std::array<std::uint8_t, scale_labels>, scale_labels> table_of;

    ExpandedModel(Bytes bytes, std::size_t itemsize) : model(unpack_model(bytes, itemsize)) {
        for (std::size_t marked = 0; marked < 2; ++marked) {
            raw[marked].drop = marked ? model.drop : 0;
            raw[marked].max_bits = 0;
            for (std::size_t s = 0; s < model.bins.size(); ++s) {
                raw[marked].lower[s] = model.bins[s].lower;
                const unsigned bits = model.bins[s].bits - raw[marked].drop;
                raw[marked].bits[s] = static_cast<std::uint8_t>(bits);
                raw[marked].low[s] = static_cast<std::uint32_t>(model.bins[s].lower);
                if (itemsize == 2) raw[marked].low[s] |= bits << 16;
                if (is_used(s)) raw[marked].max_bits = std::max(raw[marked].max_bits, bits);
            }
        }
        for (std::size_t r = 0; r < scale_labels; ++r)
            for (std::size_t c = 0; c < scale_labels; ++c) table_of[r][c] = model.table_of_sum[r + c];
    }

    bool is_used(std::size_t symbol) const {
        return std::ranges::any_of(model.tables,
                                   [&](const FrequencyCodes& codes) { return codes[symbol] != 0; });
    }
    const RawBins& raw_of(unsigned label) const { return raw[model.width == 0 || label >= scale_labels]; }

    std::vector<Frequencies> frequencies() const {
        std::vector<Frequencies> all;
        for (const FrequencyCodes& codes : model.tables) all.push_back(frequencies_from(codes));
        return all;
    }
    // Find the tables of consecutive items of a row.
    void find_contexts(unsigned label, std::size_t column, std::size_t count, std::uint8_t* contexts) const {
        if (model.width == 0)
            std::fill_n(contexts, count, std::uint8_t{0});
        else
            active_kernels().find_contexts(table_of[label % scale_labels].data(),
                                           model.columns.data() + column, count, contexts);
    }
};

std::uint32_t checksum(Bytes model, Bytes chunk) { return crc32c(chunk, crc32c(model)); }

// Writes bits, lowest first. The memory must have eight bytes of padding.
class RawWriter {
  public:
    explicit RawWriter(std::uint8_t* to) : start_(to), at_(to) {}

    void put(std::uint64_t value, unsigned bits) {  // at most 32
        pending_ |= value << used_;
        used_ += bits;
        store(at_, pending_);
        at_ += used_ / 8;
        pending_ >>= used_ / 8 * 8;
        used_ %= 8;
    }
    Bytes bytes() const { return {start_, static_cast<std::size_t>(at_ - start_) + (used_ != 0)}; }

  private:
    std::uint8_t *start_, *at_;
    std::uint64_t pending_ = 0;
    unsigned used_ = 0;
};

class ChunkEncoder {
  public:
    ChunkEncoder(Bytes model, const ItemType& type)
        : model_(model, type.itemsize),
          tables_(model_.frequencies()),
          cells_(type, model_.model.mapping, model_.model.drop),
          symbol_of_(cells_.count),
          contexts_(chunk_items),
          symbols_(chunk_items),
          raw_(chunk_items * type.itemsize + 16) {
        const std::vector<Bin>& bins = model_.model.bins;
        for (std::size_t s = 0; s < bins.size(); ++s) {
            check(cells_.bits(bins[s].lower) <= bins[s].bits, "model was fitted to items of another type");
            for (std::size_t c = cells_.index(bins[s].lower); c <= cells_.index(last_number(bins[s])); ++c)
                symbol_of_[c] = static_cast<std::uint8_t>(s);
        }
        if (!model_.model.labels.empty()) label_frequencies_ = frequencies_from(model_.model.labels);
    }

    std::size_t width() const { return model_.model.width; }

    // Return the size of the coded chunk; `to` has the size of the items.
    template <class Word>
    std::size_t encode(Bytes items, const RowSpan& rows, Bytes labels, MutableBytes to) {
        RawWriter raw(raw_.data());
        rows.for_each_part(0, rows.items,
                           [&](std::size_t row, std::size_t column, std::size_t from, std::size_t count) {
                               const unsigned label = rows.width == 0 ? 0 : labels[row];
                               model_.find_contexts(label, column, count, contexts_.data() + from);
                               find_symbols<Word>(items.data() + from * sizeof(Word), count,
                                                  model_.raw_of(label), symbols_.data() + from, raw);
                           });
        const std::size_t vectors = vectors_for(rows.items);
        RansEncoder coder(rows.items + labels.size(), vectors);
        coder.run(tables_, contexts_.data(), Bytes(symbols_).first(rows.items));
        if (rows.width != 0) coder.run({&label_frequencies_, 1}, nullptr, labels);

        const Bytes words = coder.words(), states = coder.states(), bits = raw.bytes();
        const std::size_t size = sizeof(std::uint32_t) + states.size() + words.size() + bits.size();
        if (size >= items.size()) {
            std::ranges::copy(items, to.begin());
            return items.size();
        }
        store(to.data(), static_cast<std::uint32_t>(words.size()));
        auto at = to.begin() + sizeof(std::uint32_t);
        for (const Bytes part : {states, words, bits}) at = std::ranges::copy(part, at).out;
        return size;
    }

  private:
    template <class Word>
    void find_symbols(const std::uint8_t* items, std::size_t count, const RawBins& bins,
                      std::uint8_t* symbols, RawWriter& raw) const {
        const Mapping mapping = model_.model.mapping;
        for (std::size_t i = 0; i < count; ++i) {
            const Word number = map_item(load<Word>(items + i * sizeof(Word)), mapping);
            const std::uint8_t symbol = symbol_of_[cells_.index(number)];
            std::uint64_t value = number - bins.lower[symbol];
            if (bins.drop != 0)
                value = mapping == Mapping::sign_last ? value >> (bins.drop + 1) << 1 | (value & 1)
                                                      : value >> bins.drop;
            symbols[i] = symbol;
            const unsigned bits = bins.bits[symbol];
            if (bits <= 32) {
                raw.put(value, bits);
            } else {
                raw.put(value & UINT32_MAX, 32);
                raw.put(value >> 32, bits - 32);
            }
        }
    }

    ExpandedModel model_;
    std::vector<Frequencies> tables_;
    Frequencies label_frequencies_;
    Cells cells_;
    std::vector<std::uint8_t> symbol_of_, contexts_, symbols_, raw_;
};

}  // namespace

std::size_t encode(Bytes items, const ItemType& type, std::size_t first, Bytes labels, Bytes model,
                   MutableBytes rows, MutableBytes data) {
    const Layout layout(items.size(), type.itemsize, rows.size());
    check(data.size() >= items.size(), "data must be at least as large as the items");
    std::unique_ptr<ChunkEncoder> encoder;
    if (!model.empty()) encoder = std::make_unique<ChunkEncoder>(model, type);
    std::size_t used = 0;
    for (std::size_t c = 0; c < layout.chunks; ++c) {
        const Bytes chunk = items.subspan(layout.at(c), layout.count(c) * type.itemsize);
        const MutableBytes to = data.subspan(used, chunk.size());
        const RowSpan span{encoder ? encoder->width() : 0, first + c * chunk_items, layout.count(c)};
        std::size_t size = chunk.size();
        if (!encoder) {
            std::ranges::copy(chunk, to.begin());
        } else {
            check(span.begin() + span.count() <= labels.size(), "labels must have one label for each row");
            const Bytes row_labels = labels.subspan(span.begin(), span.count());
            size = type.itemsize == 1   ? encoder->encode<std::uint8_t>(chunk, span, row_labels, to)
                   : type.itemsize == 2 ? encoder->encode<std::uint16_t>(chunk, span, row_labels, to)
                   : type.itemsize == 4 ? encoder->encode<std::uint32_t>(chunk, span, row_labels, to)
                                        : encoder->encode<std::uint64_t>(chunk, span, row_labels, to);
        }
        store(rows.data() + c * row_bytes, static_cast<std::uint32_t>(size));
        store(rows.data() + c * row_bytes + 4, checksum(model, to.first(size)));
        used += size;
    }
    return used;
}

namespace {

class ChunkDecoder {
  public:
    ChunkDecoder(Bytes model, std::size_t itemsize) : model_(model, itemsize), itemsize_(itemsize) {
        slots_.reserve(model_.model.tables.size() * frequency_unit);
        for (const Frequencies& one : model_.frequencies()) append_slots(one, slots_);
        if (!model_.model.labels.empty()) append_slots(frequencies_from(model_.model.labels), label_slots_);
    }

    std::size_t width() const { return model_.model.width; }

    void decode(Bytes chunk, const RowSpan& rows, MutableBytes items) {
        const std::size_t vectors = vectors_for(rows.items);
        const std::size_t states = vectors * vector_lanes * sizeof(std::uint32_t);
        check(chunk.size() >= sizeof(std::uint32_t) + states, "chunk is truncated");
        const std::size_t words = load<std::uint32_t>(chunk.data());
        chunk = chunk.subspan(sizeof(std::uint32_t));
        check(words <= chunk.size() - states, "chunk has fewer words than its header states");
        RansDecoder coder(chunk, chunk.subspan(states, words), vectors);
        const Bytes bits = chunk.subspan(states + words);
        Raw raw(bits);

        labels_.resize(rows.count());
        zeros_.resize(rows.count());
        if (rows.width != 0) coder.run(label_slots_.data(), zeros_.data(), labels_.size(), labels_.data());
        for (std::size_t from = 0; from < rows.items; from += block) {
            const std::size_t until = std::min(from + block, rows.items);
            rows.for_each_part(
                from, until, [&](std::size_t row, std::size_t column, std::size_t at, std::size_t count) {
                    model_.find_contexts(label(row), column, count, contexts_.data() + at - from);
                });
            coder.run(slots_.data(), contexts_.data(), until - from, symbols_.data());
            rows.for_each_part(
                from, until, [&](std::size_t row, std::size_t, std::size_t at, std::size_t count) {
                    raw.items(model_.raw_of(label(row)), model_.model.mapping, itemsize_,
                              symbols_.data() + at - from, count, items.data() + at * itemsize_);
                });
        }
        coder.finish();
        raw.finish();
    }

  private:
    // Reads raw bits; the last ones come from a padded copy.
    class Raw {
      public:
        explicit Raw(Bytes bytes) : bytes_(bytes), reader_{bytes.data(), 0, 0} {
            if (bytes.size() > raw_margin)
                reader_.bits = 8 * (bytes.size() - raw_margin);
            else
                copy_tail();
        }

        void items(const RawBins& bins, Mapping mapping, std::size_t itemsize, const std::uint8_t* symbols,
                   std::size_t count, std::uint8_t* to) {
            const auto run = [&](std::size_t from) {
                return from + active_kernels().unpack_items(bins, mapping, itemsize, symbols + from,
                                                            count - from, reader_, to + from * itemsize);
            };
            std::size_t done = run(0);
            if (done < count && !in_tail_) {
                copy_tail();
                done = run(done);
            }
            check(done >= count, "chunk has too few raw bits");
        }

        void finish() const {
            const std::size_t all = in_tail_ ? left_ : 8 * bytes_.size();
            const std::uint8_t* bytes = in_tail_ ? tail_.data() : bytes_.data();
            check(reader_.bit <= all && all - reader_.bit < 8, "chunk has trailing or missing bits");
            check(reader_.bit % 8 == 0 || bytes[reader_.bit / 8] >> reader_.bit % 8 == 0,
                  "chunk has nonzero padding bits");
        }

      private:
        // Bits beyond the end are read as zero; finish() detects this.
        void copy_tail() {
            const std::size_t from = reader_.bit / 8, left = bytes_.size() - from;
            std::memcpy(tail_.data(), bytes_.data() + from, left);
            reader_ = {tail_.data(), reader_.bit % 8, 8 * left + 64};
            left_ = 8 * left;
            in_tail_ = true;
        }

        Bytes bytes_;
        RawReader reader_;
        std::size_t left_ = 0;
        bool in_tail_ = false;
        std::array<std::uint8_t, 2 * raw_margin + 3 * 8> tail_{};
    };

    unsigned label(std::size_t row) const { return labels_.empty() ? 0u : labels_[row]; }

    ExpandedModel model_;
    std::size_t itemsize_;
    Slots slots_, label_slots_;
    std::vector<std::uint8_t> labels_, zeros_;
    std::array<std::uint8_t, block> contexts_, symbols_;
};

}  // namespace

void decode(Bytes rows, Bytes data, std::size_t itemsize, std::size_t first, Bytes model,
            MutableBytes items) {
    const Layout layout(items.size(), itemsize, rows.size());
    std::unique_ptr<ChunkDecoder> decoder;
    if (!model.empty() && layout.chunks != 0) decoder = std::make_unique<ChunkDecoder>(model, itemsize);
    for (std::size_t c = 0; c < layout.chunks; ++c) {
        const MutableBytes to = items.subspan(layout.at(c), layout.count(c) * itemsize);
        const std::size_t size = load<std::uint32_t>(rows.data() + c * row_bytes);
        check(size <= to.size() && size <= data.size(), "invalid size of a chunk");
        const Bytes chunk = data.first(size);
        data = data.subspan(size);
        check(checksum(model, chunk) == load<std::uint32_t>(rows.data() + c * row_bytes + 4),
              "checksum mismatch in a chunk");
        if (size == to.size())
            std::ranges::copy(chunk, to.begin());
        else if (decoder)
            decoder->decode(chunk, {decoder->width(), first + c * chunk_items, layout.count(c)}, to);
        else
            fail("chunk is coded, but there is no model");
    }
    check(data.empty(), "data is larger than the sum of the chunk sizes");
}

}  // namespace slimtensors::bins
