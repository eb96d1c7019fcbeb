// The only file that knows Python. It turns arrays into spans, drops the GIL, and calls the core.
// Signatures and docstrings for users are in src/slimtensors/_core.pyi.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bindings_bytes.h"
#include "bins.h"
#include "bitmask.h"
#include "counting.h"
#include "cpu.h"
#include "crc32c.h"
#include "density.h"
#include "difference.h"
#include "gaps.h"
#include "grouping.h"
#include "huffman.h"
#include "mask24.h"

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
}
