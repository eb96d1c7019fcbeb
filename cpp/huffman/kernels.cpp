#pragma once
#include "huffman/streams.h"

namespace slimtensors {

// The loops over streams, the same for every instruction set: what differs is what the compiler may use.
// `Unit` is a type in the unnamed namespace of the including file, which keeps the code made from these
// templates there.

template <class Unit>
struct StreamLoops {
    using Table = const std::uint64_t*;
    static constexpr std::uint64_t bytes_of_entry = ~std::uint64_t{0xffff};

    // Put a byte in front of what an entry stands for.
    static std::uint64_t prepend(std::uint64_t entry, std::uint64_t byte_and_length) {
        return ((entry & bytes_of_entry) >> 8 & bytes_of_entry) + (entry & 0xffff) + byte_and_length;
    }

    static void build(const CodeLengths& lengths, DecodeTable& table) {
        table.lengths = lengths;
        std::array<std::uint8_t, 256> ordered;  // by code
        std::array<std::size_t, longest_code + 2> start{};
        for (const std::uint8_t length : lengths) ++start[length + 1u];
        start[1] = 0;
        for (unsigned l = 1; l <= longest_code; ++l) start[l + 1] += start[l];
        const std::size_t used = start[longest_code + 1];
        for (std::size_t byte = 0; byte < 256; ++byte)
            if (lengths[byte] != 0) ordered[start[lengths[byte]]++] = static_cast<std::uint8_t>(byte);
        const bool may_overflow = lengths[ordered[0]] == 1;  // else twelve bits hold at most six bytes
        table.known = lengths[ordered[used - 1]] > usual_longest_code ? longest_code : usual_longest_code;

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
                        if ((entry >> 8 & 255u) == DecodeTable::most_bytes)
                            entry -= 0x100u + lengths[entry >> 16 & 255u];  // the last byte has to go
                        to[k] = prepend(entry, first);
                    }
                } else {
                    for (std::size_t k = 0; k < rest; ++k) to[k] = prepend(entries[rest + k], first);
                }
                to += rest;
            }
            while (to != end) *to++ = 0;  // the bits are the beginning of a longer code
        }
    }

    // Where reading one stream has got to. `bits` are top-aligned; the lowest one is a mark that shows how
    // many have been used since `at` was loaded.
    template <unsigned known>
    struct Reader {
        static constexpr std::size_t round_codes = 55 / known;  // one load always provides 55 bits
        static constexpr std::size_t round_bytes = round_codes * DecodeTable::most_bytes;
        static constexpr std::size_t round_input = 7;  // bytes by which one round moves at most

        std::uint64_t bits;
        const std::uint8_t* at;
        const std::uint8_t* low;  // `at` never goes below
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
        std::size_t rounds() const {  // that stay inside, whatever the bits
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

    static bool decode(const DecodeTable& table, const std::uint8_t* streams, const StreamSizes& sizes,
                       std::uint8_t* bytes, std::size_t count, const Soon& soon) {
        const auto decode =
            table.known == longest_code ? decode_knowing<longest_code> : decode_knowing<usual_longest_code>;
        return decode(table, streams, sizes, bytes, count, soon);
    }

    template <unsigned known>
    static bool decode_knowing(const DecodeTable& table, const std::uint8_t* streams,
                               const StreamSizes& sizes, std::uint8_t* bytes, std::size_t count,
                               const Soon& soon) {
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
        Ahead<Unit, true, 3> written(soon.written);
        Ahead<Unit, false, 2> read(soon.read);
        Reader<known> a = readers[0], b = readers[1], c = readers[2], d = readers[3], e = readers[4];
        const auto least = [](std::size_t x, std::size_t y) { return x < y ? x : y; };
        while (std::size_t rounds =
                   least(a.rounds(), least(least(b.rounds(), c.rounds()), least(d.rounds(), e.rounds())))) {
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

    // Writes one stream. The codes not yet written are the top of `held`; what lies below them is of no
    // account.
    struct Writer {
        std::uint64_t held = 0, bits = 0;
        const std::uint8_t* from;
        std::uint8_t* to;

        void put(std::uint64_t code) {
            held = held >> (code & 63u) | code;
            bits += code;  // only the low byte counts
        }
        void flush() {
            const unsigned count = static_cast<std::uint8_t>(bits);
            store(to, held >> (64 - count) % 64);
            to += count >> 3;
            bits = count & 7u;
        }
    };

    // Four bytes of one stream: at most 48 bits on top of the 7 that a flush leaves, clear of the lengths
    // below.
    static constexpr std::size_t step = 4;
    template <bool in_pairs>
    static void advance(Table codes, Writer& writer) {
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
    static void encode_common(Table codes, Writer* writers, std::size_t steps, const Soon& soon) {
        Ahead<Unit, true, 1> written(soon.written);
        Ahead<Unit, false, 1> read(soon.read);
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

    static StreamSizes encode(const EncodeTable& table, const std::uint8_t* bytes, std::size_t count,
                              std::uint8_t* buffers, const Soon& soon) {
        const std::size_t fifth = count / stream_count, room = stream_room(count);
        Writer writers[stream_count];
        for (std::size_t s = 0; s < stream_count; ++s) {
            writers[s].from = bytes + s * fifth;
            writers[s].to = buffers + s * room;
        }
        if (table.has_pairs)
            encode_common<true>(table.pairs.get(), writers, fifth / step, soon);
        else
            encode_common<false>(table.singles.data(), writers, fifth / step, soon);
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
                static_cast<std::uint8_t>(writer.held >> (64 - static_cast<std::uint8_t>(writer.bits)));
            sizes[s] = static_cast<std::size_t>(writer.to - (buffers + s * room));
        }
        return sizes;
    }

    static constexpr StreamKernels kernels() { return {build, encode, decode}; }
};

}  // namespace slimtensors
