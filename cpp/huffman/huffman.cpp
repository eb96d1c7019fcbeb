#include "huffman/huffman.h"

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "core/crc32c.h"
#include "core/parallel.h"
#include "huffman/streams.h"

namespace slimtensors::huffman {
namespace {

constexpr std::size_t max_planes = 8;
constexpr std::size_t sizes_bytes = stream_count * sizeof(std::uint16_t);
constexpr std::size_t max_slack = stream_count - 1;  // coded_size() rounds up, the streams may be shorter
static_assert(stream_room(chunk_items) <= UINT16_MAX);
static_assert(sizes_bytes >= stream_margin);

// Offsets of chunks and planes. The constructor checks all sizes; nothing that uses it checks bounds again.
struct Layout {
    std::size_t items, chunks, planes;

    Layout(std::size_t items_bytes, ItemFormat format, std::size_t rows_bytes) : planes(format.itemsize) {
        check_planes(items_bytes, format);
        items = items_bytes / format.itemsize;
        chunks = ceil_div(items, chunk_items);
        check(rows_bytes % row_bytes() == 0 && rows_bytes / row_bytes() == chunks,
              "rows must have one row for each chunk");
    }

    std::size_t row_bytes() const { return (1 + planes) * sizeof(std::uint32_t); }
    std::size_t count(std::size_t chunk) const { return std::min(chunk_items, items - chunk * chunk_items); }
    std::size_t item_at(std::size_t chunk) const { return chunk * chunk_items * planes; }
    Bytes items_of(Bytes items, std::size_t chunk) const {  // empty after the last chunk
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
                check(bytes != 0 && bytes <= count(c), "invalid size of a plane");
                check(bytes <= data_bytes, "data is smaller than the sum of the plane sizes");
                data_bytes -= bytes;
            }
        check(data_bytes == 0, "data is larger than the sum of the plane sizes");
    }
};

enum class Storage { raw, constant, coded };

Storage storage_of(std::size_t bytes, std::size_t count) {
    return bytes == count ? Storage::raw : bytes == 1 ? Storage::constant : Storage::coded;
}

// Return whether a sample of the plane is close to uniform, so that coding would not pay off. The sum of
// squared counts is minimal for a uniform distribution; a sixteenth above that is about 7.9 bits per byte.
bool looks_uniform(const std::uint8_t* items, std::size_t count, ItemFormat format, std::size_t plane) {
    constexpr std::size_t runs = 16, run = 256, sampled = runs * run;
    if (count < 4 * sampled) return false;
    std::uint8_t sample[sampled];
    for (std::size_t r = 0; r < runs; ++r)
        take_plane(items + count / runs * r * format.itemsize, run, format, plane, sample + r * run);
    std::uint64_t squares = 0;
    for (const std::uint64_t n : histogram({sample, sampled})) squares += n * n;
    return squares < sampled * sampled / 256 * 17 / 16 + sampled;
}

CodeLengths choose_code(const ByteCounts& counts, std::uint64_t min_bits) {
    const CodeLengths usual = best_code(counts, usual_max_length);
    const std::uint64_t bits = coded_bits(counts, usual), target = bits - bits / 512;
    if (min_bits >= target) return usual;
    const CodeLengths longer = best_code(counts, max_length);
    return coded_bits(counts, longer) < target ? longer : usual;
}

std::size_t coded_size(const ByteCounts& counts, const CodeLengths& lengths) {
    std::uint8_t packed[max_packed_code];
    return pack_code(lengths, packed) + sizes_bytes + coded_bits(counts, lengths) / 8 + stream_count;
}

// A lower bound for any code: a nibble for the length of each byte, and the bits.
std::size_t min_coded_size(const ByteCounts& counts, std::uint64_t min_bits) {
    const auto unused = static_cast<std::size_t>(std::count(counts.begin(), counts.end(), 0u));
    return (counts.size() - unused) / 2 + sizes_bytes + min_bits / 8 + stream_count;
}

// Scratch memory for the planes of one chunk, reused by each thread: touching new memory costs more than
// coding a small tensor.
std::uint8_t* scratch_planes() {
    thread_local const auto planes = std::make_unique_for_overwrite<std::uint8_t[]>(max_planes * chunk_items);
    return planes.get();
}

// Return one plane of a chunk, copied to the scratch memory unless items have only one.
const std::uint8_t* one_plane(const std::uint8_t* items, std::size_t count, ItemFormat format,
                              std::size_t plane) {
    if (format.itemsize == 1) return items;
    take_plane(items, count, format, plane, scratch_planes());
    return scratch_planes();
}

// Decoding is slower than copying, so a plane is coded only if this many bytes are saved.
std::size_t min_saving(std::size_t count) { return count / 128; }

}  // namespace

void survey(Bytes items, ItemFormat format, MutableBytes codes, MutableBytes rows) {
    const Layout layout(items.size(), format, rows.size());
    check(codes.size() == layout.code_at(layout.chunks, 0), "codes must have 256 bytes for each plane");
    for (std::size_t c = 0; c < layout.chunks; ++c) {
        const std::uint8_t* from = items.data() + layout.item_at(c);
        const std::size_t count = layout.count(c);
        for (std::size_t j = 0; j < layout.planes; ++j) {
            std::size_t bytes = count;
            if (!looks_uniform(from, count, format, j)) {
                const std::uint8_t* plane = one_plane(from, count, format, j);
                const ByteCounts counts = histogram({plane, count}, layout.items_of(items, c + 1));
                const std::uint64_t min_bits = min_coded_bits(counts);
                if (counts[plane[0]] == count) {
                    bytes = 1;
                } else if (min_coded_size(counts, min_bits) + min_saving(count) < count) {
                    const CodeLengths lengths = choose_code(counts, min_bits);
                    const std::size_t coded = coded_size(counts, lengths);
                    if (coded + min_saving(count) < count) {
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
    void encode(const std::uint8_t* items, std::size_t count, ItemFormat format, std::size_t j, Bytes code,
                MutableBytes to, const PrefetchRanges& prefetch) {
        switch (storage_of(to.size(), count)) {
            case Storage::raw:
                return take_plane(items, count, format, j, to.data());
            case Storage::constant:
                return take_plane(items, 1, format, j, to.data());
            case Storage::coded:
                return encode_coded(one_plane(items, count, format, j), count, code, to, prefetch);
        }
    }

  private:
    void encode_coded(const std::uint8_t* plane, std::size_t count, Bytes code, MutableBytes to,
                      const PrefetchRanges& prefetch) {
        CodeLengths lengths;
        std::copy(code.begin(), code.end(), lengths.begin());
        check(is_complete(lengths), "codes are invalid: run the survey first");
        build_encode_table(lengths, table_);
        std::uint8_t packed[max_packed_code];
        const std::size_t packed_bytes = pack_code(lengths, packed);
        const StreamSizes sizes = active_kernels().encode(table_, plane, count, streams_.get(), prefetch);

        std::size_t need = packed_bytes + sizes_bytes;
        for (const std::size_t size : sizes) need += size;
        check(need <= to.size() && to.size() - need <= max_slack, "items were modified since the survey");
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
        std::make_unique_for_overwrite<std::uint8_t[]>(stream_count * stream_room(chunk_items));
    EncodeTable table_;
};

}  // namespace

void encode(Bytes items, ItemFormat format, Bytes codes, MutableBytes rows, MutableBytes data) {
    const Layout layout(items.size(), format, rows.size());
    check(codes.size() == layout.code_at(layout.chunks, 0), "codes must have 256 bytes for each plane");
    layout.check_data(rows, data.size());
    thread_local PlaneEncoder encoder;  // reused by each thread, like the scratch planes
    for (std::size_t c = 0; c < layout.chunks; ++c) {
        const MutableBytes chunk = data.first(layout.chunk_size(rows, c));
        const std::size_t next = c + 1 < layout.chunks ? layout.chunk_size(rows, c + 1) : 0;
        std::size_t at = 0;
        for (std::size_t j = 0; j < layout.planes; ++j) {
            const std::size_t bytes = layout.size(rows, c, j);
            const PrefetchRanges prefetch{data.subspan(at, chunk.size() - at + next),
                                          layout.items_of(items, c + 1)};
            encoder.encode(items.data() + layout.item_at(c), layout.count(c), format, j,
                           codes.subspan(layout.code_at(c, j), 256), chunk.subspan(at, bytes), prefetch);
            at += bytes;
        }
        store(rows.data() + c * layout.row_bytes(), layout.checksum(rows, c, chunk));
        data = data.subspan(chunk.size());
    }
}

namespace {

class ChunkDecoder {
  public:
    // `sizes` points to the plane sizes in the row; `next` is the chunk that is decoded next.
    void decode(const std::uint8_t* sizes, Bytes chunk, Bytes next, ItemFormat format, MutableBytes items) {
        const std::size_t count = items.size() / format.itemsize;
        const std::uint8_t* planes[max_planes];
        for (std::size_t j = 0; j < format.itemsize; ++j) {
            const Bytes from = chunk.first(load<std::uint32_t>(sizes + j * sizeof(std::uint32_t)));
            chunk = chunk.subspan(from.size());
            const Storage storage = storage_of(from.size(), count);
            planes[j] = from.data();
            if (storage == Storage::raw) continue;
            // a single plane is decoded in place
            std::uint8_t* to = format.itemsize == 1 ? items.data() : scratch_planes() + j * chunk_items;
            if (storage == Storage::constant)
                std::memset(to, from[0], count);
            else
                decode_plane(from, to, count, {items, next});
            planes[j] = to;
        }
        if (format.itemsize != 1)
            join_planes(planes, count, format, items.data());
        else if (planes[0] != items.data())
            std::memcpy(items.data(), planes[0], count);
    }

  private:
    void decode_plane(Bytes from, std::uint8_t* to, std::size_t count, const PrefetchRanges& prefetch) {
        CodeLengths lengths;
        from = from.subspan(unpack_code(from, lengths));
        check(from.size() >= sizes_bytes, "plane is truncated");
        StreamSizes sizes;
        std::size_t need = sizes_bytes;
        for (std::size_t s = 0; s < stream_count; ++s) {
            sizes[s] = load<std::uint16_t>(from.data() + s * sizeof(std::uint16_t));
            check(sizes[s] != 0, "stream is empty");
            need += sizes[s];
        }
        check(need <= from.size() && from.size() - need <= max_slack,
              "stream sizes do not match the plane size");
        const Kernels& kernels = active_kernels();
        kernels.build(lengths, table_);
        check(kernels.decode(table_, from.data() + sizes_bytes, sizes, to, count, prefetch),
              "stream has too few or too many codes");
    }

    DecodeTable table_;
};

// Decode chunks `c` to `end`; the first one starts at the beginning of `data`.
template <bool verify>
void decode_chunks(const Layout& layout, std::size_t c, std::size_t end, Bytes rows, Bytes data,
                   ItemFormat format, MutableBytes items) {
    ChunkDecoder decoder;
    for (; c < end; ++c) {
        const Bytes chunk = data.first(layout.chunk_size(rows, c));
        data = data.subspan(chunk.size());
        if constexpr (verify)
            check(
                load<std::uint32_t>(rows.data() + c * layout.row_bytes()) == layout.checksum(rows, c, chunk),
                "checksum mismatch in a chunk");
        const Bytes next = data.first(c + 1 < end ? layout.chunk_size(rows, c + 1) : 0);
        decoder.decode(rows.data() + layout.size_at(c, 0), chunk, next, format,
                       items.subspan(layout.item_at(c), layout.count(c) * format.itemsize));
    }
}

}  // namespace

void decode(Bytes rows, Bytes data, ItemFormat format, MutableBytes items) {
    const Layout layout(items.size(), format, rows.size());
    layout.check_data(rows, data.size());
    decode_chunks<true>(layout, 0, layout.chunks, rows, data, format, items);
}

void decode_unverified(Bytes rows, Bytes data, ItemFormat format, MutableBytes items, unsigned threads) {
    const Layout layout(items.size(), format, rows.size());
    layout.check_data(rows, data.size());
    const std::size_t pieces = std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(layout.chunks, 1));
    parallel_for(pieces, [&](std::size_t p) {
        const std::size_t first = layout.chunks * p / pieces, end = layout.chunks * (p + 1) / pieces;
        std::size_t at = 0;
        for (std::size_t c = 0; c < first; ++c) at += layout.chunk_size(rows, c);
        decode_chunks<false>(layout, first, end, rows, data.subspan(at), format, items);
    });
}

}  // namespace slimtensors::huffman
