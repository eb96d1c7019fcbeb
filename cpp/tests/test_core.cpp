// Tests of every algorithm of the core: each is run with the kernels of all instruction sets of this machine,
// which must agree, and inverted. Prints one line per test with the CRC-32C of what was written: the same on
// every processor (answers.txt).
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "bins/bins.h"
#include "bitmask/bitmask.h"
#include "core/counting.h"
#include "core/crc32c.h"
#include "core/dispatch.h"
#include "core/histogram.h"
#include "huffman/huffman.h"
#include "linear/linear.h"
#include "masks/density.h"
#include "masks/gaps.h"
#include "masks/mask24.h"
#include "quantize/quantize.h"
#include "quantize/squares.h"
#include "residual/difference.h"
#include "residual/expected.h"
#include "residual/grouping.h"
#include "residual/sparse.h"
#include "trellis/matrix.h"
#include "trellis/side.h"

using namespace slimtensors;

namespace {

using Buffer = std::vector<std::uint8_t>;

void require(bool condition, const std::string& name) {
    if (condition) return;
    std::fprintf(stderr, "%s failed\n", name.c_str());
    std::exit(1);
}

// Run `write` with all kernels, require the same bytes from each, and print their checksum.
void test(const std::string& name, const std::function<Buffer()>& write) {
    Buffer first;
    bool has_first = false;
    for (const Isa isa : {Isa::plain, Isa::crc, Isa::avx2, Isa::avx512}) {
        if (isa > detect_isa()) continue;
        set_isa(isa);
        Buffer found = write();
        if (has_first) require(found == first, name + " with other instructions");
        first = std::move(found);
        has_first = true;
    }
    std::printf("%s %zu %08x\n", name.c_str(), first.size(), crc32c(first));
}

template <class T>
void append(Buffer& to, const T& value) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&value);
    to.insert(to.end(), bytes, bytes + sizeof value);
}

Buffer join(std::initializer_list<Buffer> parts) {
    Buffer all;
    for (const Buffer& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
}

// The same numbers on every machine.
class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    std::uint64_t next() {  // splitmix64
        std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }
    std::size_t below(std::size_t limit) { return next() % limit; }
    float normal() {  // by sums: libraries round their functions differently
        int sum = 0;
        for (int i = 0; i < 12; ++i) sum += static_cast<int>(below(256));
        return static_cast<float>(sum - 1530) / 256.0f;
    }

  private:
    std::uint64_t state_;
};

enum class Content { noise, constant, rare, floats, integers };
constexpr Content contents[] = {Content::noise, Content::constant, Content::rare, Content::floats,
                                Content::integers};

Buffer make_items(Content content, std::size_t count, std::size_t itemsize) {
    Random random(count * 16 + itemsize);
    Buffer items(count * itemsize);
    for (std::size_t i = 0; i < count; ++i) {
        std::uint64_t word = 0;
        switch (content) {
            case Content::noise:
                word = random.next();
                break;
            case Content::constant:
                word = 0x3f80123456789abc;
                break;
            case Content::rare:
                word = random.below(20) ? 0 : random.next();
                break;
            case Content::floats: {  // upper bytes of doubles, floats or bfloat16, by width
                const float x = random.normal() * (i % 7 < 3 ? 4.0f : 0.125f);
                const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
                word = itemsize == 8   ? std::bit_cast<std::uint64_t>(static_cast<double>(x))
                       : itemsize == 4 ? bits
                                       : bits >> (itemsize == 2 ? 16 : 24);
                break;
            }
            case Content::integers:
                word = static_cast<std::uint64_t>(std::lrintf(random.normal() * 20.0f));
                break;
        }
        for (std::size_t k = 0; k < itemsize; ++k)
            items[i * itemsize + k] = static_cast<std::uint8_t>(k < 8 ? word >> 8 * k : word >> 8 * (k - 8));
    }
    return items;
}

std::string label(const char* algorithm, Content content, std::size_t itemsize, std::size_t count) {
    const char* names[] = {"noise", "constant", "rare", "floats", "integers"};
    return std::string(algorithm) + "/" + names[static_cast<int>(content)] + "/" + std::to_string(itemsize) +
           "/" + std::to_string(count);
}

void test_core() {
    const std::string digits = "123456789";
    const Bytes check{reinterpret_cast<const std::uint8_t*>(digits.data()), digits.size()};
    test("crc32c", [&] {
        require(crc32c(check) == 0xe3069283, "crc32c");
        Buffer out;
        const Buffer noise = make_items(Content::noise, 5000, 1);
        for (std::size_t size : {0, 1, 7, 8, 63, 1000, 5000}) {
            const Bytes all = Bytes(noise).first(size), head = all.first(size / 3),
                        tail = all.subspan(size / 3);
            append(out, crc32c(all));
            require(crc32c(tail, crc32c(head)) == crc32c(all), "crc32c of parts");
            require(crc32c_join(crc32c(head), crc32c(tail), tail.size()) == crc32c(all), "crc32c_join");
        }
        return out;
    });
    for (const Content content : contents)
        for (const std::size_t itemsize : {1, 2, 4, 8, 16}) {
            const Buffer items = make_items(content, 1003, itemsize);
            test(label("counting", content, itemsize, 1003), [&] {
                Buffer out;
                const ZeroCounts zeros = count_zeros(items, itemsize);
                append(out, static_cast<std::uint64_t>(popcount(items)));
                append(out, static_cast<std::uint64_t>(zeros.zero));
                append(out, static_cast<std::uint64_t>(zeros.negative_zero));
                for (const bool signed_zero : {false, true})
                    append(out, group_peaks(items, itemsize, signed_zero));
                if (itemsize <= 8) {
                    Buffer counts(itemsize * 256 * 8);
                    count_bytes(items, {itemsize, itemsize > 1}, counts);
                    out = join({out, counts});
                }
                return out;
            });
        }
}

void test_bitmask() {
    for (const std::size_t itemsize : {1, 2, 4, 8, 16})
        for (const std::size_t row : {8, 13, 64, 1000}) {
            const Buffer items = make_items(Content::rare, 3 * row, itemsize);
            test(label("bitmask", Content::rare, itemsize, row), [&] {
                Buffer mask(3 * ceil_div(row, 8));
                Buffer values(bitmask::find(items, itemsize, row, mask) * itemsize),
                    again(items.size(), 0xa5);
                bitmask::gather(items, itemsize, row, mask, values);
                bitmask::scatter(mask, row, values, itemsize, again);
                require(again == items, "bitmask");
                return join({mask, values});
            });
        }
}

void test_masks() {
    for (const std::size_t size : {1, 2, 3, 100, 1001}) {
        Buffer mask(size);
        Random random(size);
        for (auto& byte : mask)
            for (int shift : {0, 4}) byte |= static_cast<std::uint8_t>((1 << random.below(4)) << shift);
        test("mask24/" + std::to_string(size), [&] {
            Buffer filled = mask, codes(ceil_div(2 * size, 3)), again(size);
            require(masks::mask24_fill(filled) == -1, "mask24_fill");
            masks::mask24_pack(filled, codes);
            masks::mask24_unpack(codes, again);
            require(again == filled, "mask24");
            return codes;
        });
    }
    for (const Content content : contents)
        for (const std::size_t size : {0, 1, 5000, 140000}) {
            const Buffer mask = make_items(content, size, 1);
            test(label("gaps", content, 1, size), [&] {
                Buffer tokens(masks::gaps_bound(mask)), again(size, 0xa5);
                tokens.resize(masks::gaps_encode(mask, tokens));
                masks::gaps_decode(tokens, again);
                require(again == mask, "gaps");
                return tokens;
            });
        }
    for (const Content content : contents)
        for (const std::size_t size : {700, 40000, 140000}) {
            const std::size_t width = 100;
            const Buffer mask = make_items(content, size, 1);
            test(label("density", content, 1, size), [&] {
                Buffer rows(size / width), columns(8 * width), chances(masks::density_pairs);
                masks::density_fit(mask, rows, columns, chances);
                Buffer model(masks::density_model_bound(rows.size() + columns.size())), coded(size);
                model.resize(masks::density_pack(rows, columns, chances, model));
                coded.resize(masks::density_encode(mask, rows, columns, chances, coded));
                Buffer again(size, 0xa5), rows2(rows.size()), columns2(columns.size()),
                    chances2(chances.size());
                masks::density_unpack(model, rows2, columns2, chances2);
                masks::density_decode(coded, rows2, columns2, chances2, again);
                require(again == mask, "density");
                return join({model, coded});
            });
        }
}

void test_huffman() {
    for (const Content content : contents)
        for (const std::size_t itemsize : {1, 2, 4, 8})
            for (const std::size_t count : {1, 777, 140000}) {
                const Buffer items = make_items(content, count, itemsize);
                const ItemFormat format{itemsize, itemsize > 1 && content == Content::floats};
                test(label("huffman", content, itemsize, count), [&] {
                    const std::size_t chunks = ceil_div(count, huffman::chunk_items);
                    Buffer codes(chunks * itemsize * 256), rows(chunks * 4 * (1 + itemsize));
                    huffman::survey(items, format, codes, rows);
                    std::size_t bytes = 0;
                    for (std::size_t i = 0; i < rows.size() / 4; ++i)
                        if (i % (1 + itemsize)) bytes += load<std::uint32_t>(rows.data() + 4 * i);
                    Buffer data(bytes), again(items.size(), 0xa5), fast(items.size(), 0xa5);
                    huffman::encode(items, format, codes, rows, data);
                    huffman::decode(rows, data, format, again);
                    huffman::decode_unverified(rows, data, format, fast, 2);
                    require(again == items && fast == items, "huffman");
                    return join({rows, data});
                });
            }
}

void test_bins() {
    for (const Content content : contents)
        for (const std::size_t itemsize : {1, 2, 4, 8})
            for (const std::size_t count : {777, 9000, 140000}) {
                const Buffer items = make_items(content, count, itemsize);
                const unsigned exponents[] = {4, 8, 8, 11};
                const bool floats = content == Content::floats;
                const bins::ItemType type{itemsize, floats ? exponents[std::countr_zero(itemsize)] : 0, true};
                const std::vector<std::size_t> widths{70};
                test(label("bins", content, itemsize, count), [&] {
                    const std::size_t chunks = ceil_div(count, bins::chunk_items);
                    Buffer labels(ceil_div(count, 70)), model(bins::model_bound(widths)),
                        rows(chunks * bins::row_bytes), data(items.size()), again(items.size(), 0xa5);
                    model.resize(bins::fit(items, type, widths, labels, model));
                    data.resize(bins::encode(items, type, 0, labels, model, rows, data));
                    bins::decode(rows, data, itemsize, 0, model, again);
                    require(again == items, "bins");
                    return join({model, rows, data});
                });
            }
}

void test_residual() {
    for (const std::size_t itemsize : {1, 2, 4, 8}) {
        const Buffer base = make_items(Content::floats, 1001, itemsize);
        Buffer items = base;
        for (std::size_t i = 0; i < items.size(); i += 5) items[i] ^= static_cast<std::uint8_t>(i * 37);
        const unsigned mantissas[] = {3, 7, 23, 52};
        const unsigned mantissa = mantissas[std::countr_zero(itemsize)];
        test("residual/" + std::to_string(itemsize), [&] {
            Buffer all;
            for (const auto order :
                 {residual::Order::integers, residual::Order::floats, residual::Order::outward}) {
                Buffer change(items.size()), again(items.size(), 0xa5);
                residual::difference(items, base, itemsize, order, change);
                residual::add_difference(change, base, itemsize, order, again);
                require(again == items, "difference");
                all = join({all, change});
            }
            Buffer grouped(items.size()), again(items.size(), 0xa5);
            residual::group(items, base, itemsize, mantissa, grouped);
            residual::ungroup(grouped, base, itemsize, mantissa, again);
            require(again == items, "group");
            return join({all, grouped});
        });
    }
}

Buffer make_weights(FloatType type, std::size_t count) {
    const Buffer floats = make_items(Content::floats, count, 4);
    if (type == FloatType::f32) return floats;
    Buffer out(2 * count);
    for (std::size_t i = 0; i < count; ++i) {
        const float x = load<float>(floats.data() + 4 * i);
        store(out.data() + 2 * i, type == FloatType::bf16 ? BF16::nearest(x) : F16::nearest(x));
    }
    return out;
}

// Few and many changes of weights; the last items are a part of a vector, and one change needs an escape.
void test_changes() {
    const std::pair<const char*, FloatType> types[] = {
        {"f32", FloatType::f32}, {"f16", FloatType::f16}, {"bf16", FloatType::bf16}};
    constexpr std::size_t count = 70021, width = 97;
    for (const auto& [name, type] : types)
        for (const std::size_t every : {50, 2}) {
            const Buffer base = make_weights(type, count);
            const std::size_t itemsize = base.size() / count;
            Buffer items = base;
            Random random(every);
            for (std::size_t i = 0; i < count; i += 1 + random.below(every))
                items[i * itemsize] ^= static_cast<std::uint8_t>(1 + random.below(3));
            items[itemsize - 1] ^= 0x80;
            items.back() ^= 0x3f;
            const std::string of = std::string("/") + name + "/" + std::to_string(every);
            test("sparse-change" + of, [&, type = type] {
                Buffer model(residual::max_sparse_model), chunk(residual::sparse_bound(count));
                Buffer again(items.size(), 0xa5);
                model.resize(residual::sparse_fit(items, base, type, model));
                chunk.resize(residual::sparse_encode(items, base, type, model, chunk));
                residual::sparse_decode(chunk, base, type, model, again);
                require(again == items, "sparse-change");
                return join({model, chunk});
            });
            test("expected-change" + of, [&, type = type] {
                const Buffer model = residual::expected_fit(items, base, type, width);
                const residual::ExpectedModel coder(model, type, count);
                Buffer chunk(coder.chunk_bound(count)), again(items.size(), 0xa5);
                chunk.resize(coder.encode(0, items, base, chunk));
                coder.decode(0, chunk, base, again);
                require(again == items, "expected-change");
                return join({model, chunk});
            });
        }
}

void test_quantize() {
    using quantize::CodeFormat;
    constexpr std::size_t rows = 6, row = 96, columns = 32;
    const std::pair<const char*, CodeFormat> formats[] = {
        {"int8", {CodeFormat::ints, 8}},      {"int5", {CodeFormat::ints, 5}},
        {"packed3", {CodeFormat::packed, 3}}, {"packed4", {CodeFormat::packed, 4}},
        {"fp4", {CodeFormat::fp4, 4}},        {"fp8", {CodeFormat::fp8, 8}}};
    const std::pair<const char*, FloatType> types[] = {
        {"f32", FloatType::f32}, {"f16", FloatType::f16}, {"bf16", FloatType::bf16}};
    for (const auto& [type_name, type] : types) {
        const Buffer items = make_weights(type, rows * row);
        const std::size_t itemsize = type == FloatType::f32 ? 4 : 2;
        for (const auto& [format_name, format] : formats) {
            const bool has_zeros = format.kind == CodeFormat::ints;
            test(std::string("quantize/") + type_name + "/" + format_name, [&, type = type, format = format] {
                const std::size_t blocks = rows * row / columns;
                Buffer low(blocks * itemsize), high(blocks * itemsize), scales(blocks * 4), zeros(blocks);
                quantize::find_ranges(items, type, row, columns, low, high);
                for (std::size_t i = 0; i < blocks; ++i) {
                    store(scales.data() + 4 * i, 0.0625f * static_cast<float>(1 + i));
                    zeros[i] = static_cast<std::uint8_t>(i % 5);
                }
                const quantize::Scales about{
                    scales, FloatType::f32, {row, columns, 1}, 1.0f, has_zeros ? Bytes(zeros) : Bytes{}};
                const std::size_t size = format.kind == CodeFormat::packed
                                             ? ceil_div(row * format.bits, 32) * 4
                                         : format.kind == CodeFormat::fp4 ? row / 2
                                                                          : row;
                Buffer codes(rows * size), dense(items.size()), out;
                require(quantize::quantize(items, type, FloatType::f32, about, format, codes), "quantize");
                quantize::dequantize(codes, format, about, type, dense);
                const quantize::RoundingLoss loss =
                    quantize::rounding_loss(items, type, codes, format, about);
                require(loss.distance == quantize::squared_distance(items, dense, type), "rounding_loss");
                append(out, loss.distance);
                append(out, quantize::sum_of_squares(items, type));
                return join({low, high, codes, dense, out});
            });
        }
    }
    for (unsigned bits = 1; bits <= 8; ++bits)
        test("pack/" + std::to_string(bits), [&] {
            Buffer codes = make_items(Content::noise, 5 * 77, 1), again(codes.size());
            const int least = -(1 << (bits - 1));
            for (auto& code : codes) code = static_cast<std::uint8_t>(code % (1 << bits) + least);
            Buffer words(5 * 4 * ceil_div(77 * bits, 32));
            quantize::pack_codes(codes, bits, 77, words);
            quantize::unpack_codes(words, bits, 77, again);
            require(again == codes, "pack_codes");
            return words;
        });
}

// Round, encode and decode a matrix; the columns do not fill whole vectors, and one weight needs an escape.
void test_trellis() {
    constexpr std::size_t rows = 50, columns = 75;
    const auto list = [](std::size_t count, int least, unsigned range) {
        Buffer values;
        for (std::size_t i = 0; i < count; ++i)
            append(values, static_cast<std::int16_t>(least + static_cast<int>(i * 7919 % range)));
        return values;
    };
    const Buffer parameters{12, 24, 3, 0xfe, 0, 1, 0, 0};
    const trellis::Matrix matrix(parameters, list(rows, -40, 20), list(columns, -8, 16), list(rows, 0, 12),
                                 list(columns, 8, 10));
    Buffer weights;
    for (std::size_t i = 0; i < rows * columns; ++i)
        append(weights, static_cast<float>(static_cast<int>(i * 2654435761u % 2001) - 1000) / 4000);
    store(weights.data() + 400, 300.0f);
    for (const FloatType type : {FloatType::f32, FloatType::f16, FloatType::bf16})
        test("trellis/" + std::to_string(static_cast<int>(type)), [&] {
            Buffer integers(weights.size());
            matrix.quantize(0, weights, {}, {}, 0.37f, false, integers);
            Buffer chunk(matrix.chunk_bound(rows));
            chunk.resize(matrix.encode(0, integers, chunk));
            Buffer items(rows * columns * (type == FloatType::f32 ? 4 : 2));
            matrix.decode(0, chunk, type, items);
            return join({integers, chunk, items});
        });
    test("trellis/list", [&] {
        std::vector<std::int16_t> values;
        for (std::size_t i = 0; i < 3000; ++i) values.push_back(static_cast<std::int16_t>(i * i % 97 - 50));
        const Buffer packed = trellis::pack_vector(values);
        std::vector<std::int16_t> again(values.size());
        require(trellis::unpack_vector(packed, again) == packed.size() && again == values, "trellis/list");
        return packed;
    });
}

// Sums depend on the width of vectors, so products are compared with those in double precision.
void test_linear() {
    constexpr std::size_t outputs = 5, row = 64, columns = 32, inputs = 3;
    const Buffer codes = make_items(Content::integers, outputs * row, 1);
    const Buffer x = make_items(Content::floats, inputs * row, 4);
    Buffer scales;
    for (std::size_t i = 0; i < outputs * row / columns; ++i)
        append(scales, 0.25f * static_cast<float>(1 + i));
    test("linear", [&] {
        Buffer products(outputs * inputs * 4);
        const quantize::Scales about{scales, FloatType::f32, {row, columns, 1}};
        linear::multiply_codes(codes, {quantize::CodeFormat::ints, 8}, about, x, products, 2);
        for (std::size_t i = 0; i < inputs; ++i)
            for (std::size_t o = 0; o < outputs; ++o) {
                double want = 0, size = 0;
                for (std::size_t c = 0; c < row; ++c) {
                    const double scale = load<float>(scales.data() + 4 * ((o * row + c) / columns));
                    const double term = load<float>(x.data() + 4 * (i * row + c)) * scale *
                                        static_cast<std::int8_t>(codes[o * row + c]);
                    want += term;
                    size += std::abs(term);
                }
                const float found = load<float>(products.data() + 4 * (i * outputs + o));
                require(std::abs(found - want) <= 1e-5 * size, "linear");
            }
        return Buffer{};
    });
}

}  // namespace

int main() {
    test_core();
    test_bitmask();
    test_masks();
    test_huffman();
    test_bins();
    test_residual();
    test_quantize();
    test_linear();
    test_trellis();
    test_changes();
}
