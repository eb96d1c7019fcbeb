#include "huffman/huffman.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "core/crc32c.h"
#include "huffman/streams.h"
#include "core/parallel.h"

namespace slimtensors {
namespace {

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }

constexpr std::size_t most_planes = 8;
constexpr std::size_t sizes_bytes = stream_count * sizeof(std::uint16_t);
constexpr std::size_t most_slack =
    stream_count - 1;  // bits / 8 + 5 bytes hold five streams that end in whole bytes
static_assert(stream_room(huffman_chunk) <= UINT16_MAX);
static_assert(sizes_bytes >= stream_margin);

// Where the chunks lie. Made from checked sizes: nothing that uses it checks bounds again.
struct Layout {
    std::size_t items, chunks, planes;

    Layout(std::size_t items_bytes, ItemKind kind, std::size_t rows_bytes) : planes(kind.size) {
        if (!std::has_single_bit(kind.size) || kind.size > most_planes)
            refuse("itemsize must be 1, 2, 4 or 8");
        if (kind.rotated && kind.size == 1) refuse("items of one byte cannot be rotated");
        if (items_bytes % kind.size != 0) refuse("items are not a whole number of items");
        items = items_bytes / kind.size;
        chunks = items / huffman_chunk + (items % huffman_chunk != 0);
        if (rows_bytes % row_bytes() != 0 || rows_bytes / row_bytes() != chunks)
            refuse("there must be a row for each chunk");
    }

    std::size_t row_bytes() const { return (1 + planes) * sizeof(std::uint32_t); }
    std::size_t count(std::size_t chunk) const {
        return std::min(huffman_chunk, items - chunk * huffman_chunk);
    }
    std::size_t item_at(std::size_t chunk) const { return chunk * huffman_chunk * planes; }
    Bytes chunk_items(Bytes items, std::size_t chunk) const {  // none after the last one
        return chunk < chunks ? items.subspan(item_at(chunk), count(chunk) * planes) : Bytes{};
    }
    std::size_t size_at(std::size_t chunk, std::size_t plane) const {
        return chunk * row_bytes() + (1 + plane) * sizeof(std::uint32_t);
    }
    std::size_t code_at(std::size_t chunk, std::size_t plane) const { return (chunk * planes + plane) * 256; }

    std::size_t size(Bytes rows, std::size_t chunk, std::size_t plane) const {
        return load<std::uint32_t>(rows.data() + size_at(chunk, plane));
    }
    std::size_t chunk_size(Bytes rows, std::size_t chunk) const {
        std::size_t sum = 0;
        for (std::size_t j = 0; j < planes; ++j) sum += size(rows, chunk, j);
        return sum;
    }
    std::uint32_t checksum(Bytes rows, std::size_t chunk, Bytes bytes) const {
        return crc32c(bytes, crc32c(rows.subspan(size_at(chunk, 0), planes * sizeof(std::uint32_t))));
    }
    void check_data(Bytes rows, std::size_t data_bytes) const {
        for (std::size_t c = 0; c < chunks; ++c)
            for (std::size_t j = 0; j < planes; ++j) {
                const std::size_t bytes = size(rows, c, j);
                if (bytes == 0 || bytes > count(c)) refuse("a plane has an impossible size");
                if (bytes > data_bytes) refuse("rows and data disagree: the planes need more bytes");
                data_bytes -= bytes;
            }
        if (data_bytes != 0) refuse("rows and data disagree: there are more bytes than the planes need");
    }
};

enum class Stored { raw, constant, coded };

Stored how_stored(std::size_t bytes, std::size_t count) {
    return bytes == count ? Stored::raw : bytes == 1 ? Stored::constant : Stored::coded;
}

struct Here {};  // for Ahead

ByteCounts count_bytes(const std::uint8_t* bytes, std::size_t count, Bytes soon = {}) {
    std::array<ByteCounts, 4> parts{};  // equal neighbours would wait for each other in one
    Ahead<Here, false, 1> ahead(soon);
    std::size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        for (std::size_t half = 0; half < 16; half += 8) {
            const std::uint64_t word = load<std::uint64_t>(bytes + i + half);
            for (unsigned k = 0; k < 8; ++k) ++parts[k % 4][word >> 8 * k & 255u];
        }
        ahead.fetch();
    }
    for (; i < count; ++i) ++parts[0][bytes[i]];
    for (std::size_t byte = 0; byte < 256; ++byte)
        parts[0][byte] += parts[1][byte] + parts[2][byte] + parts[3][byte];
    return parts[0];
}

// Whether a few of the bytes look as if all could be coded in fewer bits. The sum of squares of the counts is
// smallest when all bytes are equally frequent; a sixteenth above that is about 7.9 bits per byte.
bool looks_even(const std::uint8_t* items, std::size_t count, ItemKind kind, std::size_t plane) {
    constexpr std::size_t runs = 16, run = 256, sampled = runs * run;
    if (count < 4 * sampled) return false;
    std::uint8_t sample[sampled];
    for (std::size_t r = 0; r < runs; ++r)
        take_plane(items + count / runs * r * kind.size, run, kind, plane, sample + r * run);
    std::uint64_t squares = 0;
    for (const std::uint64_t n : count_bytes(sample, sampled)) squares += n * n;
    return squares < sampled * sampled / 256 * 17 / 16 + sampled;
}

CodeLengths choose_code(const ByteCounts& counts, std::uint64_t fewest) {
    const CodeLengths usual = best_code(counts, usual_longest_code);
    const std::uint64_t bits = coded_bits(counts, usual), enough = bits - bits / 512;
    if (fewest >= enough) return usual;
    const CodeLengths longer = best_code(counts, longest_code);
    return coded_bits(counts, longer) < enough ? longer : usual;
}

std::size_t coded_size(const ByteCounts& counts, const CodeLengths& lengths) {
    std::uint8_t packed[longest_packed_code];
    return pack_code(lengths, packed) + sizes_bytes + coded_bits(counts, lengths) / 8 + stream_count;
}

// What any code would take: a nibble for each byte's length, and the bits.
std::size_t least_coded_size(const ByteCounts& counts, std::uint64_t fewest) {
    const auto unused = static_cast<std::size_t>(std::count(counts.begin(), counts.end(), 0u));
    return (counts.size() - unused) / 2 + sizes_bytes + fewest / 8 + stream_count;
}

// Room for the planes of a chunk of any kind. Each thread keeps its own: to touch new memory costs more than
// to code a small tensor.
std::uint8_t* scratch_planes() {
    thread_local const auto room =
        std::make_unique_for_overwrite<std::uint8_t[]>(most_planes * huffman_chunk);
    return room.get();
}

// One plane of a chunk, copied to the scratch planes unless the items are nothing else.
const std::uint8_t* one_plane(const std::uint8_t* items, std::size_t count, ItemKind kind,
                              std::size_t plane) {
    if (kind.size == 1) return items;
    take_plane(items, count, kind, plane, scratch_planes());
    return scratch_planes();
}

// Decoding is slower than copying, so a plane is left alone unless this much of it is saved.
std::size_t worthwhile(std::size_t count) { return count / 128; }

}  // namespace

void huffman_survey(Bytes items, ItemKind kind, MutableBytes codes, MutableBytes rows) {
    const Layout layout(items.size(), kind, rows.size());
    if (codes.size() != layout.code_at(layout.chunks, 0)) refuse("codes must have 256 bytes for each plane");
    for (std::size_t c = 0; c < layout.chunks; ++c) {
        const std::uint8_t* from = items.data() + layout.item_at(c);
        const std::size_t count = layout.count(c);
        for (std::size_t j = 0; j < layout.planes; ++j) {
            std::size_t bytes = count;
            if (!looks_even(from, count, kind, j)) {
                const std::uint8_t* plane = one_plane(from, count, kind, j);
                const ByteCounts counts = count_bytes(plane, count, layout.chunk_items(items, c + 1));
                const std::uint64_t fewest = fewest_bits(counts);
                if (counts[plane[0]] == count) {
                    bytes = 1;
                } else if (least_coded_size(counts, fewest) + worthwhile(count) < count) {
                    const CodeLengths lengths = choose_code(counts, fewest);
                    const std::size_t coded = coded_size(counts, lengths);
                    if (coded + worthwhile(count) < count) {
                        bytes = coded;
                        std::memcpy(codes.data() + layout.code_at(c, j), lengths.data(), lengths.size());
                    }
                }
            }
            store(rows.data() + layout.size_at(c, j), static_cast<std::uint32_t>(bytes));
        }
    }
}

namespace {

class PlaneEncoder {
  public:
    void encode(const std::uint8_t* items, std::size_t count, ItemKind kind, std::size_t j, Bytes code,
                MutableBytes to, const Soon& soon) {
        switch (how_stored(to.size(), count)) {
            case Stored::raw:
                return take_plane(items, count, kind, j, to.data());
            case Stored::constant:
                return take_plane(items, 1, kind, j, to.data());
            case Stored::coded:
                return encode_coded(one_plane(items, count, kind, j), count, code, to, soon);
        }
    }

  private:
    void encode_coded(const std::uint8_t* plane, std::size_t count, Bytes code, MutableBytes to,
                      const Soon& soon) {
        CodeLengths lengths;
        std::copy(code.begin(), code.end(), lengths.begin());
        if (!is_complete(lengths)) refuse("codes were not surveyed");
        build_encode_table(lengths, table_);
        std::uint8_t packed[longest_packed_code];
        const std::size_t packed_bytes = pack_code(lengths, packed);
        const StreamSizes sizes = stream_kernels().encode(table_, plane, count, streams_.get(), soon);

        std::size_t need = packed_bytes + sizes_bytes;
        for (const std::size_t size : sizes) need += size;
        if (need > to.size() || to.size() - need > most_slack) refuse("items were changed since the survey");
        std::uint8_t* at = std::copy_n(packed, packed_bytes, to.data());
        for (const std::size_t size : sizes) {
            store(at, static_cast<std::uint16_t>(size));
            at += sizeof(std::uint16_t);
        }
        for (std::size_t s = 0; s < stream_count; ++s)
            at = std::copy_n(streams_.get() + s * stream_room(count), sizes[s], at);
        std::fill(at, to.data() + to.size(), std::uint8_t{0});
    }

    std::unique_ptr<std::uint8_t[]> streams_ =
        std::make_unique_for_overwrite<std::uint8_t[]>(stream_count * stream_room(huffman_chunk));
    EncodeTable table_;
};

}  // namespace

void huffman_encode(Bytes items, ItemKind kind, Bytes codes, MutableBytes rows, MutableBytes data) {
    const Layout layout(items.size(), kind, rows.size());
    if (codes.size() != layout.code_at(layout.chunks, 0)) refuse("codes must have 256 bytes for each plane");
    layout.check_data(rows, data.size());
    thread_local PlaneEncoder encoder;  // kept like the scratch planes
    for (std::size_t c = 0; c < layout.chunks; ++c) {
        const MutableBytes chunk = data.first(layout.chunk_size(rows, c));
        const std::size_t next = c + 1 < layout.chunks ? layout.chunk_size(rows, c + 1) : 0;
        std::size_t at = 0;
        for (std::size_t j = 0; j < layout.planes; ++j) {
            const std::size_t bytes = layout.size(rows, c, j);
            const Soon soon{data.subspan(at, chunk.size() - at + next), layout.chunk_items(items, c + 1)};
            encoder.encode(items.data() + layout.item_at(c), layout.count(c), kind, j,
                           codes.subspan(layout.code_at(c, j), 256), chunk.subspan(at, bytes), soon);
            at += bytes;
        }
        store(rows.data() + c * layout.row_bytes(), layout.checksum(rows, c, chunk));
        data = data.subspan(chunk.size());
    }
}

namespace {

class ChunkDecoder {
  public:
    // `sizes` points to the bytes of each plane as the row has them; `next` is the chunk to be decoded next.
    void decode(const std::uint8_t* sizes, Bytes chunk, Bytes next, ItemKind kind, MutableBytes items) {
        const std::size_t count = items.size() / kind.size;
        const std::uint8_t* planes[most_planes];
        for (std::size_t j = 0; j < kind.size; ++j) {
            const Bytes from = chunk.first(load<std::uint32_t>(sizes + j * sizeof(std::uint32_t)));
            chunk = chunk.subspan(from.size());
            const Stored stored = how_stored(from.size(), count);
            planes[j] = from.data();
            if (stored == Stored::raw) continue;
            // a single plane goes straight to its place
            std::uint8_t* to = kind.size == 1 ? items.data() : scratch_planes() + j * huffman_chunk;
            if (stored == Stored::constant)
                std::memset(to, from[0], count);
            else
                decode_plane(from, to, count, {items, next});
            planes[j] = to;
        }
        if (kind.size != 1)
            join_planes(planes, count, kind, items.data());
        else if (planes[0] != items.data())
            std::memcpy(items.data(), planes[0], count);
    }

  private:
    void decode_plane(Bytes from, std::uint8_t* to, std::size_t count, const Soon& soon) {
        CodeLengths lengths;
        from = from.subspan(unpack_code(from, lengths));
        if (from.size() < sizes_bytes) refuse("a plane is cut off");
        StreamSizes sizes;
        std::size_t need = sizes_bytes;
        for (std::size_t s = 0; s < stream_count; ++s) {
            sizes[s] = load<std::uint16_t>(from.data() + s * sizeof(std::uint16_t));
            if (sizes[s] == 0) refuse("a stream is empty");
            need += sizes[s];
        }
        if (need > from.size() || from.size() - need > most_slack) refuse("streams do not fit their plane");
        const StreamKernels& kernels = stream_kernels();
        kernels.build(lengths, table_);
        if (!kernels.decode(table_, from.data() + sizes_bytes, sizes, to, count, soon))
            refuse("a stream does not hold as many codes as it should");
    }

    DecodeTable table_;
};

// Decode chunks `c` to `end`, of which the first begins where `data` does.
template <bool compared_before>
void decode_chunks(const Layout& layout, std::size_t c, std::size_t end, Bytes rows, Bytes data, ItemKind kind,
                   MutableBytes items) {
    ChunkDecoder decoder;
    for (; c < end; ++c) {
        const Bytes chunk = data.first(layout.chunk_size(rows, c));
        data = data.subspan(chunk.size());
        if constexpr (!compared_before)
            if (load<std::uint32_t>(rows.data() + c * layout.row_bytes()) != layout.checksum(rows, c, chunk))
                refuse("a chunk does not have its checksum");
        const Bytes next = data.first(c + 1 < end ? layout.chunk_size(rows, c + 1) : 0);
        decoder.decode(rows.data() + layout.size_at(c, 0), chunk, next, kind,
                       items.subspan(layout.item_at(c), layout.count(c) * kind.size));
    }
}

}  // namespace

void huffman_decode(Bytes rows, Bytes data, ItemKind kind, MutableBytes items) {
    const Layout layout(items.size(), kind, rows.size());
    layout.check_data(rows, data.size());
    decode_chunks<false>(layout, 0, layout.chunks, rows, data, kind, items);
}

void huffman_decode_again(Bytes rows, Bytes data, ItemKind kind, MutableBytes items, unsigned threads) {
    const Layout layout(items.size(), kind, rows.size());
    layout.check_data(rows, data.size());
    const std::size_t pieces = std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(layout.chunks, 1));
    on_threads(pieces, [&](std::size_t p) {
        const std::size_t first = layout.chunks * p / pieces, end = layout.chunks * (p + 1) / pieces;
        std::size_t at = 0;
        for (std::size_t c = 0; c < first; ++c) at += layout.chunk_size(rows, c);
        decode_chunks<true>(layout, first, end, rows, data.subspan(at), kind, items);
    });
}

}  // namespace slimtensors
