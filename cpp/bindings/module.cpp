// The only file that knows Python. It turns arrays into spans, drops the GIL, and calls the core.
// Signatures and docstrings for users are in src/slimtensors/_core.pyi.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/array.h"
#include "bins/bins.h"
#include "bitmask/bitmask.h"
#include "core/counting.h"
#include "core/group_peaks.h"
#include "core/dispatch.h"
#include "core/crc32c.h"
#include "masks/density.h"
#include "residual/difference.h"
#include "masks/gaps.h"
#include "residual/grouping.h"
#include "huffman/huffman.h"
#include "masks/mask24.h"
#include "linear/linear.h"
#include "quantize/quantize.h"
#include "quantize/squares.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace slimtensors;

using In = bindings::Array<const std::uint8_t>;
using Out = bindings::Array<std::uint8_t>;

NB_MODULE(_core, m) {
    const auto no_gil = nb::call_guard<nb::gil_scoped_release>();

    cpu();  // so that a misspelt SLIMTENSORS_CPU stops the import, not a call far away
    m.def("cpu", [] { return cpu().avx2 ? "avx2" : "plain"; });

    m.def(
        "bitmask_find",
        [](const In& items, std::size_t itemsize, std::size_t row, const Out& mask) {
            return bitmask_find(items.bytes, itemsize, row, mask.bytes);
        },
        "items"_a, "itemsize"_a, "row"_a, "mask"_a, no_gil);
    m.def(
        "bitmask_gather",
        [](const In& items, std::size_t itemsize, std::size_t row, const In& mask, const Out& values) {
            bitmask_gather(items.bytes, itemsize, row, mask.bytes, values.bytes);
        },
        "items"_a, "itemsize"_a, "row"_a, "mask"_a, "values"_a, no_gil);
    m.def(
        "bitmask_scatter",
        [](const In& mask, std::size_t row, const In& values, std::size_t itemsize, const Out& items) {
            bitmask_scatter(mask.bytes, row, values.bytes, itemsize, items.bytes);
        },
        "mask"_a, "row"_a, "values"_a, "itemsize"_a, "items"_a, no_gil);

    m.def(
        "popcount", [](const In& mask) { return popcount(mask.bytes); }, "mask"_a, no_gil);
    m.def(
        "count_zeros",
        [](const In& items, std::size_t itemsize) {
            const ZeroCounts counts = count_zeros(items.bytes, itemsize);
            return std::pair(counts.zero, counts.negative_zero);
        },
        "items"_a, "itemsize"_a, no_gil);
    m.def(
        "group_peaks",
        [](const In& items, std::size_t itemsize, bool signed_zero) {
            return std::tuple_cat(group_peaks(items.bytes, itemsize, signed_zero));
        },
        "items"_a, "itemsize"_a, "signed_zero"_a, no_gil);

    m.def(
        "count_bytes",
        [](const In& items, std::size_t itemsize, bool rotated, const Out& counts) {
            count_bytes(items.bytes, {itemsize, rotated}, counts.bytes);
        },
        "items"_a, "itemsize"_a, "rotated"_a, "counts"_a, no_gil);

    m.def(
        "mask24_fill", [](const Out& mask) { return mask24_fill(mask.bytes); }, "mask"_a, no_gil);
    m.def(
        "mask24_pack", [](const In& mask, const Out& codes) { mask24_pack(mask.bytes, codes.bytes); },
        "mask"_a, "codes"_a, no_gil);
    m.def(
        "mask24_unpack", [](const In& codes, const Out& mask) { mask24_unpack(codes.bytes, mask.bytes); },
        "codes"_a, "mask"_a, no_gil);

    m.attr("HUFFMAN_CHUNK") = huffman_chunk;
    m.def(
        "huffman_survey",
        [](const In& items, std::size_t itemsize, bool rotated, const Out& codes, const Out& rows) {
            huffman_survey(items.bytes, {itemsize, rotated}, codes.bytes, rows.bytes);
        },
        "items"_a, "itemsize"_a, "rotated"_a, "codes"_a, "rows"_a, no_gil);
    m.def(
        "huffman_encode",
        [](const In& items, std::size_t itemsize, bool rotated, const In& codes, const Out& rows,
           const Out& data) {
            huffman_encode(items.bytes, {itemsize, rotated}, codes.bytes, rows.bytes, data.bytes);
        },
        "items"_a, "itemsize"_a, "rotated"_a, "codes"_a, "rows"_a, "data"_a, no_gil);
    m.def(
        "huffman_decode",
        [](const In& rows, const In& data, std::size_t itemsize, bool rotated, const Out& items) {
            huffman_decode(rows.bytes, data.bytes, {itemsize, rotated}, items.bytes);
        },
        "rows"_a, "data"_a, "itemsize"_a, "rotated"_a, "items"_a, no_gil);
    m.def(
        "huffman_decode_again",
        [](const In& rows, const In& data, std::size_t itemsize, bool rotated, const Out& items,
           unsigned threads) {
            huffman_decode_again(rows.bytes, data.bytes, {itemsize, rotated}, items.bytes, threads);
        },
        "rows"_a, "data"_a, "itemsize"_a, "rotated"_a, "items"_a, "threads"_a, no_gil);

    m.attr("BINS_CHUNK") = bins_chunk;
    m.def(
        "bins_model_bound", [](const std::vector<std::size_t>& widths) { return bins_model_bound(widths); },
        "widths"_a);
    m.def(
        "bins_fit",
        [](const In& items, std::size_t itemsize, unsigned exponent_bits, bool is_signed,
           const std::vector<std::size_t>& widths, const Out& labels, const Out& model) {
            return bins_fit(items.bytes, {itemsize, exponent_bits, is_signed}, widths, labels.bytes,
                            model.bytes);
        },
        "items"_a, "itemsize"_a, "exponent_bits"_a, "is_signed"_a, "widths"_a, "labels"_a, "model"_a, no_gil);
    m.def(
        "bins_encode",
        [](const In& items, std::size_t itemsize, unsigned exponent_bits, bool is_signed, std::size_t first,
           const In& labels, const In& model, const Out& rows, const Out& data) {
            return bins_encode(items.bytes, {itemsize, exponent_bits, is_signed}, first, labels.bytes,
                               model.bytes, rows.bytes, data.bytes);
        },
        "items"_a, "itemsize"_a, "exponent_bits"_a, "is_signed"_a, "first"_a, "labels"_a, "model"_a, "rows"_a,
        "data"_a, no_gil);
    m.def(
        "bins_decode",
        [](const In& rows, const In& data, std::size_t itemsize, std::size_t first, const In& model,
           const Out& items) {
            bins_decode(rows.bytes, data.bytes, itemsize, first, model.bytes, items.bytes);
        },
        "rows"_a, "data"_a, "itemsize"_a, "first"_a, "model"_a, "items"_a, no_gil);

    nb::enum_<Order>(m, "Order")
        .value("INTEGERS", Order::integers)
        .value("FLOATS", Order::floats)
        .value("OUTWARD", Order::outward);

    m.def(
        "difference",
        [](const In& items, const In& base, std::size_t itemsize, Order order, const Out& out) {
            difference(items.bytes, base.bytes, itemsize, order, out.bytes);
        },
        "items"_a, "base"_a, "itemsize"_a, "order"_a, "out"_a, no_gil);
    m.def(
        "add_difference",
        [](const In& diff, const In& base, std::size_t itemsize, Order order, const Out& items) {
            add_difference(diff.bytes, base.bytes, itemsize, order, items.bytes);
        },
        "difference"_a, "base"_a, "itemsize"_a, "order"_a, "items"_a, no_gil);

    m.def(
        "group",
        [](const In& items, const In& by, std::size_t itemsize, unsigned mantissa, const Out& out) {
            group(items.bytes, by.bytes, itemsize, mantissa, out.bytes);
        },
        "items"_a, "by"_a, "itemsize"_a, "mantissa"_a, "out"_a, no_gil);
    m.def(
        "ungroup",
        [](const In& grouped, const In& by, std::size_t itemsize, unsigned mantissa, const Out& items) {
            ungroup(grouped.bytes, by.bytes, itemsize, mantissa, items.bytes);
        },
        "grouped"_a, "by"_a, "itemsize"_a, "mantissa"_a, "items"_a, no_gil);

    m.def(
        "crc32c", [](const In& data, std::uint32_t seed) { return crc32c(data.bytes, seed); }, "data"_a,
        "seed"_a = 0, no_gil);
    m.def("crc32c_join", &crc32c_join, "a"_a, "b"_a, "length_b"_a);

    m.def(
        "gaps_bound", [](const In& mask) { return gaps_bound(mask.bytes); }, "mask"_a, no_gil);
    m.def(
        "gaps_encode",
        [](const In& mask, const Out& tokens) { return gaps_encode(mask.bytes, tokens.bytes); }, "mask"_a,
        "tokens"_a, no_gil);
    m.def(
        "gaps_decode", [](const In& tokens, const Out& mask) { gaps_decode(tokens.bytes, mask.bytes); },
        "tokens"_a, "mask"_a, no_gil);

    m.def("density_model_bound", &density_model_bound, "rows_and_columns"_a);
    m.def(
        "density_fit",
        [](const In& mask, const Out& rows, const Out& columns, const Out& chances) {
            density_fit(mask.bytes, rows.bytes, columns.bytes, chances.bytes);
        },
        "mask"_a, "rows"_a, "columns"_a, "chances"_a, no_gil);
    m.def(
        "density_pack",
        [](const In& rows, const In& columns, const In& chances, const Out& model) {
            return density_pack(rows.bytes, columns.bytes, chances.bytes, model.bytes);
        },
        "rows"_a, "columns"_a, "chances"_a, "model"_a, no_gil);
    m.def(
        "density_unpack",
        [](const In& model, const Out& rows, const Out& columns, const Out& chances) {
            density_unpack(model.bytes, rows.bytes, columns.bytes, chances.bytes);
        },
        "model"_a, "rows"_a, "columns"_a, "chances"_a, no_gil);
    m.def(
        "density_encode",
        [](const In& mask, const In& rows, const In& columns, const In& chances, const Out& coded) {
            return density_encode(mask.bytes, rows.bytes, columns.bytes, chances.bytes, coded.bytes);
        },
        "mask"_a, "rows"_a, "columns"_a, "chances"_a, "coded"_a, no_gil);
    m.def(
        "density_decode",
        [](const In& coded, const In& rows, const In& columns, const In& chances, const Out& mask) {
            density_decode(coded.bytes, rows.bytes, columns.bytes, chances.bytes, mask.bytes);
        },
        "coded"_a, "rows"_a, "columns"_a, "chances"_a, "mask"_a, no_gil);

    m.def(
        "find_ranges",
        [](const In& items, std::string_view kind, std::size_t row, std::size_t columns, const Out& low,
           const Out& high) {
            find_ranges(items.bytes, number_named(kind), row, columns, low.bytes, high.bytes);
        },
        "items"_a, "kind"_a, "row"_a, "columns"_a, "low"_a, "high"_a, no_gil);
    m.def(
        "quantize",
        [](const In& items, std::string_view kind, std::string_view steps, const In& scales,
           std::string_view scale_kind, float divisor, const In& zero_points,
           std::tuple<std::size_t, std::size_t, std::size_t> blocks, std::string_view codes_kind,
           unsigned bits, const Out& codes) {
            const auto [row, columns, rows] = blocks;
            return quantize(items.bytes, number_named(kind), number_named(steps),
                            {scales.bytes, number_named(scale_kind), divisor, zero_points.bytes},
                            {row, columns, rows}, codes_named(codes_kind, bits), codes.bytes);
        },
        "items"_a, "kind"_a, "steps"_a, "scales"_a, "scale_kind"_a, "divisor"_a, "zero_points"_a, "blocks"_a,
        "codes_kind"_a, "bits"_a, "codes"_a, no_gil);
    m.def(
        "dequantize",
        [](const In& codes, std::string_view codes_kind, unsigned bits, const In& scales,
           std::string_view scale_kind, float divisor, const In& zero_points,
           std::tuple<std::size_t, std::size_t, std::size_t> blocks, std::string_view kind,
           const Out& items) {
            const auto [row, columns, rows] = blocks;
            dequantize(codes.bytes, codes_named(codes_kind, bits),
                       {scales.bytes, number_named(scale_kind), divisor, zero_points.bytes},
                       {row, columns, rows}, number_named(kind), items.bytes);
        },
        "codes"_a, "codes_kind"_a, "bits"_a, "scales"_a, "scale_kind"_a, "divisor"_a, "zero_points"_a,
        "blocks"_a, "kind"_a, "items"_a, no_gil);
    m.def(
        "rounding_loss",
        [](const In& items, std::string_view kind, const In& codes, std::string_view codes_kind,
           unsigned bits, const In& scales, std::string_view scale_kind, float divisor, const In& zero_points,
           std::tuple<std::size_t, std::size_t, std::size_t> blocks) {
            const auto [row, columns, rows] = blocks;
            const Loss loss = rounding_loss(
                items.bytes, number_named(kind), codes.bytes, codes_named(codes_kind, bits),
                {scales.bytes, number_named(scale_kind), divisor, zero_points.bytes}, {row, columns, rows});
            return std::pair(loss.distance, loss.items);
        },
        "items"_a, "kind"_a, "codes"_a, "codes_kind"_a, "bits"_a, "scales"_a, "scale_kind"_a, "divisor"_a,
        "zero_points"_a, "blocks"_a, no_gil);
    m.def(
        "pack_codes",
        [](const In& codes, unsigned bits, std::size_t row, const Out& words) {
            pack_codes(codes.bytes, bits, row, words.bytes);
        },
        "codes"_a, "bits"_a, "row"_a, "words"_a, no_gil);
    m.def(
        "unpack_codes",
        [](const In& words, unsigned bits, std::size_t row, const Out& codes) {
            unpack_codes(words.bytes, bits, row, codes.bytes);
        },
        "words"_a, "bits"_a, "row"_a, "codes"_a, no_gil);

    m.def(
        "sum_of_squares",
        [](const In& items, std::string_view kind) {
            return sum_of_squares(items.bytes, number_named(kind));
        },
        "items"_a, "kind"_a, no_gil);
    m.def(
        "squared_distance",
        [](const In& items, const In& others, std::string_view kind) {
            return squared_distance(items.bytes, others.bytes, number_named(kind));
        },
        "items"_a, "others"_a, "kind"_a, no_gil);

    m.def(
        "multiply_codes",
        [](const In& codes, std::string_view codes_kind, unsigned bits, const In& scales,
           std::string_view scale_kind, float divisor, const In& zero_points,
           std::tuple<std::size_t, std::size_t, std::size_t> blocks, const In& inputs, const Out& products,
           unsigned threads) {
            const auto [row, columns, rows] = blocks;
            multiply_codes(codes.bytes, codes_named(codes_kind, bits),
                           {scales.bytes, number_named(scale_kind), divisor, zero_points.bytes},
                           {row, columns, rows}, inputs.bytes, products.bytes, threads);
        },
        "codes"_a, "codes_kind"_a, "bits"_a, "scales"_a, "scale_kind"_a, "divisor"_a, "zero_points"_a,
        "blocks"_a, "inputs"_a, "products"_a, "threads"_a, no_gil);
}
