// Loops over the five streams, the same source for every instruction set. AVX2 builds gain from shifts that
// do not touch the flags (BMI2) and from wider vectors when tables are built.
#include "huffman/streams.h"

namespace slimtensors::huffman::SLIM_TARGET {
namespace {

using Table = const std::uint64_t*;
constexpr std::uint64_t bytes_of_entry = ~std::uint64_t{0xffff};

// Prepend a byte to the decoded bytes of an entry.
std::uint64_t prepend(std::uint64_t entry, std::uint64_t byte_and_length) {
    return ((entry & bytes_of_entry) >> 8 & bytes_of_entry) + (entry & 0xffff) + byte_and_length;
}

void build(const CodeLengths& lengths, DecodeTable& table) {
    table.lengths = lengths;
    std::array<std::uint8_t, 256> ordered;  // by code
    std::array<std::size_t, max_length + 2> start{};
    for (const std::uint8_t length : lengths) ++start[length + 1u];
    start[1] = 0;
    for (unsigned l = 1; l <= max_length; ++l) start[l + 1] += start[l];
    const std::size_t used = start[max_length + 1];
    for (std::size_t byte = 0; byte < 256; ++byte)
        if (lengths[byte] != 0) ordered[start[lengths[byte]]++] = static_cast<std::uint8_t>(byte);
    const bool may_overflow = lengths[ordered[0]] == 1;  // otherwise twelve bits are at most six bytes
    table.known = lengths[ordered[used - 1]] > usual_max_length ? max_length : usual_max_length;

    std::uint64_t* entries = table.entries.data();
    entries[0] = entries[1] = 0;
    for (unsigned known = 1; known <= table.known; ++known) {
        std::uint64_t* to = entries + (std::size_t{1} << known);
        std::uint64_t* const end = to + (std::size_t{1} << known);
        for (std::size_t i = 0; i < used; ++i) {
            const std::uint8_t byte = ordered[i], length = lengths[byte];
            if (length > known) break;
            const std::size_t rest = std::size_t{1} << (known - length);
            const std::uint64_t first = std::uint64_t{byte} << 56 | 0x100u | length;
            if (may_overflow) {
                for (std::size_t k = 0; k < rest; ++k) {
                    std::uint64_t entry = entries[rest + k];
                    if ((entry >> 8 & 255u) == DecodeTable::max_bytes)
                        entry -= 0x100u + lengths[entry >> 16 & 255u];  // remove the last byte
                    to[k] = prepend(entry, first);
                }
            } else {
                for (std::size_t k = 0; k < rest; ++k) to[k] = prepend(entries[rest + k], first);
            }
            to += rest;
        }
        while (to != end) *to++ = 0;  // prefixes of longer codes
    }
}

// Reads one stream. `bits` are top-aligned; the lowest set bit is a mark that gives the number of bits used
// since `at` was loaded.
template <unsigned known>
struct Reader {
    static constexpr std::size_t round_codes = 55 / known;  // one load provides at least 55 bits
    static constexpr std::size_t round_bytes = round_codes * DecodeTable::max_bytes;
    static constexpr std::size_t round_input = 7;  // maximum bytes consumed per round

    std::uint64_t bits;
    const std::uint8_t* at;
    const std::uint8_t* low;  // lower bound of `at`
    std::uint8_t* to;         // written downwards
    std::uint8_t* begin;

    bool open(const std::uint8_t* stream, std::size_t size) {
        low = stream - stream_margin;
        at = low + size;
        const std::uint64_t top = load<std::uint64_t>(at);
        bits = (top | 1u) << (std::countl_zero(top | 1u) + 1) % 64;
        return top >> 56 != 0;
    }
    void decode(Table entries) {
        const std::uint64_t entry = entries[bits >> (64 - known)];
        bits <<= entry & 63u;
        store(to - 8, entry);
        to -= static_cast<std::uint8_t>(entry >> 8);
    }
    unsigned used() const { return static_cast<unsigned>(std::countr_zero(bits)); }
    void refill() {
        const unsigned count = used();
        at -= count >> 3;
        bits = (load<std::uint64_t>(at) | 1u) << (count & 7u);
    }
    std::size_t left() const { return static_cast<std::size_t>(to - begin); }
    std::size_t rounds() const {  // that stay in bounds for any bits
        const std::size_t by_output = left() < round_bytes + 8 ? 0 : (left() - 8) / round_bytes;
        const std::size_t by_input = static_cast<std::size_t>(at - low) / round_input;
        return by_output < by_input ? by_output : by_input;
    }
    bool finish(Table entries, const CodeLengths& lengths) {
        while (rounds() != 0) {
            for (std::size_t r = 0; r < round_codes; ++r) decode(entries);
            refill();
        }
        while (left() != 0) {
            for (std::size_t r = 0; r < round_codes && left() != 0; ++r) {
                const auto byte = static_cast<std::uint8_t>(entries[bits >> (64 - known)] >> 56);
                bits <<= lengths[byte];
                *--to = byte;
            }
            if (static_cast<std::size_t>(at - low) < used() >> 3) return false;
            refill();
        }
        return static_cast<std::size_t>(at - low) * 8 == used();
    }
};

template <unsigned known>
bool decode_known(const DecodeTable& table, const std::uint8_t* streams, const StreamSizes& sizes,
                  std::uint8_t* bytes, std::size_t count, const PrefetchRanges& prefetch) {
    Table entries = table.entries.data() + (std::size_t{1} << known);
    Reader<known> readers[stream_count];
    const std::size_t fifth = count / stream_count;
    bool good = true;
    for (std::size_t s = 0; s < stream_count; ++s) {
        good &= readers[s].open(streams, sizes[s]);
        streams += sizes[s];
        readers[s].begin = bytes + s * fifth;
        readers[s].to = s + 1 < stream_count ? bytes + (s + 1) * fifth : bytes + count;
    }
    if (!good) return false;
    static_assert(stream_count == 5);
    Prefetcher<true, 3> written(prefetch.written);
    Prefetcher<false, 2> read(prefetch.read);
    Reader<known> a = readers[0], b = readers[1], c = readers[2], d = readers[3], e = readers[4];
    const auto min = [](std::size_t x, std::size_t y) { return x < y ? x : y; };
    while (std::size_t rounds =
               min(a.rounds(), min(min(b.rounds(), c.rounds()), min(d.rounds(), e.rounds())))) {
        do {
#pragma GCC unroll 5
            for (std::size_t r = 0; r < Reader<known>::round_codes; ++r) {
                a.decode(entries), b.decode(entries), c.decode(entries), d.decode(entries);
                e.decode(entries);
            }
            a.refill(), b.refill(), c.refill(), d.refill(), e.refill();
            written.fetch(), read.fetch();
        } while (--rounds != 0);
    }
    readers[0] = a, readers[1] = b, readers[2] = c, readers[3] = d, readers[4] = e;
    for (Reader<known>& reader : readers) good &= reader.finish(entries, table.lengths);
    return good;
}

bool decode(const DecodeTable& table, const std::uint8_t* streams, const StreamSizes& sizes,
            std::uint8_t* bytes, std::size_t count, const PrefetchRanges& prefetch) {
    const auto decode = table.known == max_length ? decode_known<max_length> : decode_known<usual_max_length>;
    return decode(table, streams, sizes, bytes, count, prefetch);
}

// Writes one stream. The codes not yet written are the top bits of `pending`; the bits below are ignored.
struct Writer {
    std::uint64_t pending = 0, bits = 0;
    const std::uint8_t* from;
    std::uint8_t* to;

    void put(std::uint64_t code) {
        pending = pending >> (code & 63u) | code;
        bits += code;  // only the low byte is used
    }
    void flush() {
        const unsigned count = static_cast<std::uint8_t>(bits);
        store(to, pending >> (64 - count) % 64);
        to += count >> 3;
        bits = count & 7u;
    }
};

// Four bytes per flush: at most 48 bits plus the 7 that a flush leaves, clear of the lengths in the low bits.
constexpr std::size_t step = 4;
template <bool in_pairs>
void advance(Table codes, Writer& writer) {
    if constexpr (in_pairs) {
        writer.put(codes[load<std::uint16_t>(writer.from)]);
        writer.put(codes[load<std::uint16_t>(writer.from + 2)]);
    } else {
        for (std::size_t k = 0; k < step; ++k) writer.put(codes[writer.from[k]]);
    }
    writer.flush();
    writer.from += step;
}

template <bool in_pairs>
void encode_common(Table codes, Writer* writers, std::size_t steps, const PrefetchRanges& prefetch) {
    Prefetcher<true, 1> written(prefetch.written);
    Prefetcher<false, 1> read(prefetch.read);
    Writer a = writers[0], b = writers[1], c = writers[2];
    for (std::size_t i = 0; i < steps; ++i) {
        advance<in_pairs>(codes, a), advance<in_pairs>(codes, b), advance<in_pairs>(codes, c);
        written.fetch();
    }
    writers[0] = a, writers[1] = b, writers[2] = c;
    Writer d = writers[3], e = writers[4];
    for (std::size_t i = 0; i < steps; ++i) {
        advance<in_pairs>(codes, d), advance<in_pairs>(codes, e);
        read.fetch();
    }
    writers[3] = d, writers[4] = e;
}

StreamSizes encode(const EncodeTable& table, const std::uint8_t* bytes, std::size_t count,
                   std::uint8_t* buffers, const PrefetchRanges& prefetch) {
    const std::size_t fifth = count / stream_count, room = stream_room(count);
    Writer writers[stream_count];
    for (std::size_t s = 0; s < stream_count; ++s) {
        writers[s].from = bytes + s * fifth;
        writers[s].to = buffers + s * room;
    }
    if (table.has_pairs)
        encode_common<true>(table.pairs.get(), writers, fifth / step, prefetch);
    else
        encode_common<false>(table.singles.data(), writers, fifth / step, prefetch);
    StreamSizes sizes;
    for (std::size_t s = 0; s < stream_count; ++s) {
        Writer& writer = writers[s];
        const std::uint8_t* end = s + 1 < stream_count ? bytes + (s + 1) * fifth : bytes + count;
        while (writer.from != end) {
            writer.put(table.singles[*writer.from++]);
            writer.flush();
        }
        writer.put(std::uint64_t{1} << 63 | 1u);
        *writer.to++ =
            static_cast<std::uint8_t>(writer.pending >> (64 - static_cast<std::uint8_t>(writer.bits)));
        sizes[s] = static_cast<std::size_t>(writer.to - (buffers + s * room));
    }
    return sizes;
}

}  // namespace

constinit const Kernels kernels{build, encode, decode};

}  // namespace slimtensors::huffman::SLIM_TARGET
