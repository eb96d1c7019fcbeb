// The Python module. Functions convert arrays to spans, release the GIL and call the core. Signatures and
// docstrings for users are in src/slimtensors/_core.pyi.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/array.h"
#include "bins/bins.h"
#include "bitmask/bitmask.h"
#include "core/check.h"
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

namespace nb = nanobind;
using namespace nb::literals;
using namespace slimtensors;

namespace {

using In = bindings::Array<const std::uint8_t>;
using Out = bindings::Array<std::uint8_t>;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

// Scales together with the arrays that they refer to.
struct ScalesArgument {
    In values;
    std::optional<In> zero_points;
    quantize::Scales scales;
};

const char* cpu_name() {
    switch (active_isa()) {
        case Isa::avx512:
            return "avx512";
        case Isa::avx2:
            return "avx2";
        default:
            return "plain";
    }
}

void bind_core(nb::module_& m) {
    active_isa();  // an invalid SLIMTENSORS_CPU fails the import instead of a later call
    m.def("cpu", cpu_name);
    m.def("popcount", [](const In& mask) { return popcount(mask.bytes); }, "mask"_a, NoGil());
    m.def(
        "count_zeros",
        [](const In& items, std::size_t itemsize) {
            const ZeroCounts counts = count_zeros(items.bytes, itemsize);
            return std::pair(counts.zero, counts.negative_zero);
        },
        "items"_a, "itemsize"_a, NoGil());
    m.def(
        "group_peaks",
        [](const In& items, std::size_t itemsize, bool signed_zero) {
            return std::tuple_cat(group_peaks(items.bytes, itemsize, signed_zero));
        },
        "items"_a, "itemsize"_a, "signed_zero"_a, NoGil());
    m.def(
        "count_bytes",
        [](const In& items, std::size_t itemsize, bool rotated, const Out& counts) {
            count_bytes(items.bytes, {itemsize, rotated}, counts.bytes);
        },
        "items"_a, "itemsize"_a, "rotated"_a, "counts"_a, NoGil());
    m.def(
        "crc32c", [](const In& data, std::uint32_t seed) { return crc32c(data.bytes, seed); }, "data"_a,
        "seed"_a = 0, NoGil());
    m.def("crc32c_join", &crc32c_join, "a"_a, "b"_a, "length_b"_a);
}

void bind_bitmask(nb::module_& m) {
    m.def(
        "bitmask_find",
        [](const In& items, std::size_t itemsize, std::size_t row, const Out& mask) {
            return bitmask::find(items.bytes, itemsize, row, mask.bytes);
        },
        "items"_a, "itemsize"_a, "row"_a, "mask"_a, NoGil());
    m.def(
        "bitmask_gather",
        [](const In& items, std::size_t itemsize, std::size_t row, const In& mask, const Out& values) {
            bitmask::gather(items.bytes, itemsize, row, mask.bytes, values.bytes);
        },
        "items"_a, "itemsize"_a, "row"_a, "mask"_a, "values"_a, NoGil());
    m.def(
        "bitmask_scatter",
        [](const In& mask, std::size_t row, const In& values, std::size_t itemsize, const Out& items) {
            bitmask::scatter(mask.bytes, row, values.bytes, itemsize, items.bytes);
        },
        "mask"_a, "row"_a, "values"_a, "itemsize"_a, "items"_a, NoGil());
}

void bind_masks(nb::module_& m) {
    m.def("mask24_fill", [](const Out& mask) { return masks::mask24_fill(mask.bytes); }, "mask"_a, NoGil());
    m.def(
        "mask24_pack", [](const In& mask, const Out& codes) { masks::mask24_pack(mask.bytes, codes.bytes); },
        "mask"_a, "codes"_a, NoGil());
    m.def(
        "mask24_unpack",
        [](const In& codes, const Out& mask) { masks::mask24_unpack(codes.bytes, mask.bytes); }, "codes"_a,
        "mask"_a, NoGil());

    m.def("gaps_bound", [](const In& mask) { return masks::gaps_bound(mask.bytes); }, "mask"_a, NoGil());
    m.def(
        "gaps_encode",
        [](const In& mask, const Out& tokens) { return masks::gaps_encode(mask.bytes, tokens.bytes); },
        "mask"_a, "tokens"_a, NoGil());
    m.def(
        "gaps_decode",
        [](const In& tokens, const Out& mask) { masks::gaps_decode(tokens.bytes, mask.bytes); }, "tokens"_a,
        "mask"_a, NoGil());

    m.def("density_model_bound", &masks::density_model_bound, "rows_and_columns"_a);
    m.def(
        "density_fit",
        [](const In& mask, const Out& rows, const Out& columns, const Out& chances) {
            masks::density_fit(mask.bytes, rows.bytes, columns.bytes, chances.bytes);
        },
        "mask"_a, "rows"_a, "columns"_a, "chances"_a, NoGil());
    m.def(
        "density_pack",
        [](const In& rows, const In& columns, const In& chances, const Out& model) {
            return masks::density_pack(rows.bytes, columns.bytes, chances.bytes, model.bytes);
        },
        "rows"_a, "columns"_a, "chances"_a, "model"_a, NoGil());
    m.def(
        "density_unpack",
        [](const In& model, const Out& rows, const Out& columns, const Out& chances) {
            masks::density_unpack(model.bytes, rows.bytes, columns.bytes, chances.bytes);
        },
        "model"_a, "rows"_a, "columns"_a, "chances"_a, NoGil());
    m.def(
        "density_encode",
        [](const In& mask, const In& rows, const In& columns, const In& chances, const Out& coded) {
            return masks::density_encode(mask.bytes, rows.bytes, columns.bytes, chances.bytes, coded.bytes);
        },
        "mask"_a, "rows"_a, "columns"_a, "chances"_a, "coded"_a, NoGil());
    m.def(
        "density_decode",
        [](const In& coded, const In& rows, const In& columns, const In& chances, const Out& mask) {
            masks::density_decode(coded.bytes, rows.bytes, columns.bytes, chances.bytes, mask.bytes);
        },
        "coded"_a, "rows"_a, "columns"_a, "chances"_a, "mask"_a, NoGil());
}

void bind_huffman(nb::module_& m) {
    m.attr("HUFFMAN_CHUNK") = huffman::chunk_items;
    m.def(
        "huffman_survey",
        [](const In& items, std::size_t itemsize, bool rotated, const Out& codes, const Out& rows) {
            huffman::survey(items.bytes, {itemsize, rotated}, codes.bytes, rows.bytes);
        },
        "items"_a, "itemsize"_a, "rotated"_a, "codes"_a, "rows"_a, NoGil());
    m.def(
        "huffman_encode",
        [](const In& items, std::size_t itemsize, bool rotated, const In& codes, const Out& rows,
           const Out& data) {
            huffman::encode(items.bytes, {itemsize, rotated}, codes.bytes, rows.bytes, data.bytes);
        },
        "items"_a, "itemsize"_a, "rotated"_a, "codes"_a, "rows"_a, "data"_a, NoGil());
    m.def(
        "huffman_decode",
        [](const In& rows, const In& data, std::size_t itemsize, bool rotated, const Out& items) {
            huffman::decode(rows.bytes, data.bytes, {itemsize, rotated}, items.bytes);
        },
        "rows"_a, "data"_a, "itemsize"_a, "rotated"_a, "items"_a, NoGil());
    m.def(
        "huffman_decode_again",
        [](const In& rows, const In& data, std::size_t itemsize, bool rotated, const Out& items,
           unsigned threads) {
            huffman::decode_unverified(rows.bytes, data.bytes, {itemsize, rotated}, items.bytes, threads);
        },
        "rows"_a, "data"_a, "itemsize"_a, "rotated"_a, "items"_a, "threads"_a, NoGil());
}

void bind_bins(nb::module_& m) {
    m.attr("BINS_CHUNK") = bins::chunk_items;
    nb::class_<bins::ItemType>(m, "ItemType")
        .def(
            "__init__",
            [](bins::ItemType* self, std::size_t itemsize, unsigned exponent_bits, bool is_signed) {
                new (self) bins::ItemType{itemsize, exponent_bits, is_signed};
            },
            nb::kw_only(), "itemsize"_a, "exponent_bits"_a, "is_signed"_a);
    m.def(
        "bins_model_bound", [](const std::vector<std::size_t>& widths) { return bins::model_bound(widths); },
        "widths"_a);
    m.def(
        "bins_fit",
        [](const In& items, const bins::ItemType& type, const std::vector<std::size_t>& widths,
           const Out& labels,
           const Out& model) { return bins::fit(items.bytes, type, widths, labels.bytes, model.bytes); },
        "items"_a, "type"_a, "widths"_a, "labels"_a, "model"_a, NoGil());
    m.def(
        "bins_encode",
        [](const In& items, const bins::ItemType& type, std::size_t first, const In& labels, const In& model,
           const Out& rows, const Out& data) {
            return bins::encode(items.bytes, type, first, labels.bytes, model.bytes, rows.bytes, data.bytes);
        },
        "items"_a, "type"_a, "first"_a, "labels"_a, "model"_a, "rows"_a, "data"_a, NoGil());
    m.def(
        "bins_decode",
        [](const In& rows, const In& data, std::size_t itemsize, std::size_t first, const In& model,
           const Out& items) {
            bins::decode(rows.bytes, data.bytes, itemsize, first, model.bytes, items.bytes);
        },
        "rows"_a, "data"_a, "itemsize"_a, "first"_a, "model"_a, "items"_a, NoGil());
}

// The code of a torch dtype for weights.
FloatType float_type(std::string_view name) {
    if (name == "float32") return FloatType::f32;
    if (name == "float16") return FloatType::f16;
    if (name == "bfloat16") return FloatType::bf16;
    throw std::invalid_argument("expected float32, float16 or bfloat16");
}

void bind_trellis(nb::module_& m) {
    using trellis::Matrix;
    m.attr("TRELLIS_STEPS_PER_OCTAVE") = trellis::step_unit;
    nb::class_<trellis::Counts>(m, "TrellisCounts").def(nb::init<>());
    m.def(
        "trellis_fit",
        [](const trellis::Counts& counts, const In& start, const Out& parameters) {
            const trellis::Parameters found = trellis::fit(counts, trellis::read_parameters(start.bytes));
            check(parameters.bytes.size() == trellis::parameter_bytes, "parameters have 8 bytes");
            std::memcpy(parameters.bytes.data(), &found, trellis::parameter_bytes);
        },
        "counts"_a, "start"_a, "parameters"_a, NoGil());
    m.def(
        "trellis_measure",
        [](const trellis::Counts& counts, const In& parameters) {
            return trellis::measure_bits(counts, trellis::read_parameters(parameters.bytes));
        },
        "counts"_a, "parameters"_a, NoGil());
    m.def(
        "trellis_pack",
        [](const In& values) {
            std::vector<std::int16_t> copy(values.bytes.size() / 2);
            check(copy.size() * 2 == values.bytes.size(), "values have 2 bytes each");
            if (!copy.empty()) std::memcpy(copy.data(), values.bytes.data(), values.bytes.size());
            const std::vector<std::uint8_t> packed = trellis::pack_vector(copy);
            return nb::bytes(packed.data(), packed.size());
        },
        "values"_a);
    m.def(
        "trellis_unpack",
        [](const In& packed, const Out& values) {
            std::vector<std::int16_t> copy(values.bytes.size() / 2);
            const std::size_t used = trellis::unpack_vector(packed.bytes, copy);
            if (!copy.empty()) std::memcpy(values.bytes.data(), copy.data(), copy.size() * 2);
            return used;
        },
        "packed"_a, "values"_a, NoGil());
    nb::class_<Matrix>(m, "TrellisMatrix")
        .def(
            "__init__",
            [](Matrix* self, const In& parameters, const In& row_steps, const In& column_steps,
               const In& row_classes, const In& column_classes) {
                new (self) Matrix(parameters.bytes, row_steps.bytes, column_steps.bytes, row_classes.bytes,
                                  column_classes.bytes);
            },
            "parameters"_a, "row_steps"_a, "column_steps"_a, "row_classes"_a, "column_classes"_a, NoGil())
        .def("chunk_bound", &Matrix::chunk_bound, "rows"_a)
        .def(
            "quantize",
            [](const Matrix& self, std::size_t first, const In& weights, const In& factor, const In& order,
               float price_of_bit, bool keep_zeros, const Out& integers) {
                self.quantize(first, weights.bytes, factor.bytes, order.bytes, price_of_bit, keep_zeros,
                              integers.bytes);
            },
            "first"_a, "weights"_a, "factor"_a, "order"_a, "price_of_bit"_a, "keep_zeros"_a, "integers"_a,
            NoGil())
        .def(
            "count",
            [](const Matrix& self, std::size_t first, const In& integers, trellis::Counts& counts) {
                self.count(first, integers.bytes, counts);
            },
            "first"_a, "integers"_a, "counts"_a, NoGil())
        .def(
            "encode",
            [](const Matrix& self, std::size_t first, const In& integers, const Out& chunk) {
                return self.encode(first, integers.bytes, chunk.bytes);
            },
            "first"_a, "integers"_a, "chunk"_a, NoGil())
        .def(
            "decode",
            [](const Matrix& self, std::size_t first, const In& chunk, std::string_view dtype,
               const Out& items) { self.decode(first, chunk.bytes, float_type(dtype), items.bytes); },
            "first"_a, "chunk"_a, "dtype"_a, "items"_a, NoGil());
}

void bind_residual(nb::module_& m) {
    nb::enum_<residual::Order>(m, "Order")
        .value("INTEGERS", residual::Order::integers)
        .value("FLOATS", residual::Order::floats)
        .value("OUTWARD", residual::Order::outward);
    m.def(
        "difference",
        [](const In& items, const In& base, std::size_t itemsize, residual::Order order, const Out& out) {
            residual::difference(items.bytes, base.bytes, itemsize, order, out.bytes);
        },
        "items"_a, "base"_a, "itemsize"_a, "order"_a, "out"_a, NoGil());
    m.def(
        "add_difference",
        [](const In& diff, const In& base, std::size_t itemsize, residual::Order order, const Out& items) {
            residual::add_difference(diff.bytes, base.bytes, itemsize, order, items.bytes);
        },
        "difference"_a, "base"_a, "itemsize"_a, "order"_a, "items"_a, NoGil());
    m.def(
        "group",
        [](const In& items, const In& by, std::size_t itemsize, unsigned mantissa, const Out& out) {
            residual::group(items.bytes, by.bytes, itemsize, mantissa, out.bytes);
        },
        "items"_a, "by"_a, "itemsize"_a, "mantissa"_a, "out"_a, NoGil());
    m.def(
        "ungroup",
        [](const In& grouped, const In& by, std::size_t itemsize, unsigned mantissa, const Out& items) {
            residual::ungroup(grouped.bytes, by.bytes, itemsize, mantissa, items.bytes);
        },
        "grouped"_a, "by"_a, "itemsize"_a, "mantissa"_a, "items"_a, NoGil());
}

void bind_changes(nb::module_& m) {
    using residual::ExpectedModel;
    m.attr("SPARSE_CHUNK") = residual::sparse_chunk;
    m.def("sparse_bound", &residual::sparse_bound, "items"_a);
    m.def(
        "sample_changes",
        [](const In& items, const In& base, std::string_view dtype) {
            return residual::sample_changes(items.bytes, base.bytes, float_type(dtype));
        },
        "items"_a, "base"_a, "dtype"_a, NoGil());
    m.def(
        "sparse_fit",
        [](const In& items, const In& base, std::string_view dtype) {
            std::array<std::uint8_t, residual::max_sparse_model> model;
            const std::size_t size = residual::sparse_fit(items.bytes, base.bytes, float_type(dtype), model);
            return nb::bytes(model.data(), size);
        },
        "items"_a, "base"_a, "dtype"_a);
    m.def(
        "sparse_encode",
        [](const In& items, const In& base, std::string_view dtype, const In& model, const Out& chunk) {
            return residual::sparse_encode(items.bytes, base.bytes, float_type(dtype), model.bytes,
                                           chunk.bytes);
        },
        "items"_a, "base"_a, "dtype"_a, "model"_a, "chunk"_a, NoGil());
    m.def(
        "sparse_decode",
        [](const In& chunk, const In& base, std::string_view dtype, const In& model, const Out& items) {
            residual::sparse_decode(chunk.bytes, base.bytes, float_type(dtype), model.bytes, items.bytes);
        },
        "chunk"_a, "base"_a, "dtype"_a, "model"_a, "items"_a, NoGil());

    m.attr("EXPECTED_CHUNK") = residual::expected_chunk;
    m.def(
        "expected_fit",
        [](const In& items, const In& base, std::string_view dtype, std::size_t width) {
            std::vector<std::uint8_t> model;
            {
                nb::gil_scoped_release release;
                model = residual::expected_fit(items.bytes, base.bytes, float_type(dtype), width);
            }
            return nb::bytes(model.data(), model.size());
        },
        "items"_a, "base"_a, "dtype"_a, "width"_a);
    nb::class_<ExpectedModel>(m, "ExpectedModel")
        .def(
            "__init__",
            [](ExpectedModel* self, const In& model, std::string_view dtype, std::size_t items) {
                new (self) ExpectedModel(model.bytes, float_type(dtype), items);
            },
            "model"_a, "dtype"_a, "items"_a, NoGil())
        .def("chunk_bound", &ExpectedModel::chunk_bound, "items"_a)
        .def(
            "encode",
            [](const ExpectedModel& self, std::size_t first, const In& items, const In& base,
               const Out& chunk) { return self.encode(first, items.bytes, base.bytes, chunk.bytes); },
            "first"_a, "items"_a, "base"_a, "chunk"_a, NoGil())
        .def(
            "decode",
            [](const ExpectedModel& self, std::size_t first, const In& chunk, const In& base,
               const Out& items) { self.decode(first, chunk.bytes, base.bytes, items.bytes); },
            "first"_a, "chunk"_a, "base"_a, "items"_a, NoGil());
}

void bind_quantize(nb::module_& m) {
    using quantize::CodeFormat;
    using quantize::parse_float_type;
    nb::class_<CodeFormat>(m, "CodeFormat")
        .def(
            "__init__",
            [](CodeFormat* self, std::string_view kind, unsigned bits) {
                new (self) CodeFormat(quantize::parse_code_format(kind, bits));
            },
            "kind"_a, "bits"_a);
    nb::class_<ScalesArgument>(m, "Scales")
        .def(
            "__init__",
            [](ScalesArgument* self, const In& values, std::string_view dtype,
               std::tuple<std::size_t, std::size_t, std::size_t> blocks, float divisor,
               const std::optional<In>& zero_points) {
                const auto [row, columns, rows] = blocks;
                const Bytes zeros = zero_points ? zero_points->bytes : Bytes{};
                new (self) ScalesArgument{
                    values,
                    zero_points,
                    {values.bytes, parse_float_type(dtype), {row, columns, rows}, divisor, zeros}};
            },
            "values"_a, "dtype"_a, "blocks"_a, nb::kw_only(), "divisor"_a = 1.0f,
            "zero_points"_a = nb::none());

    m.def(
        "find_ranges",
        [](const In& items, std::string_view dtype, std::size_t row, std::size_t columns, const Out& low,
           const Out& high) {
            quantize::find_ranges(items.bytes, parse_float_type(dtype), row, columns, low.bytes, high.bytes);
        },
        "items"_a, "dtype"_a, "row"_a, "columns"_a, "low"_a, "high"_a, NoGil());
    m.def(
        "quantize",
        [](const In& items, const Out& codes, std::string_view dtype, std::string_view compute_dtype,
           const ScalesArgument& scales, const CodeFormat& format) {
            return quantize::quantize(items.bytes, parse_float_type(dtype), parse_float_type(compute_dtype),
                                      scales.scales, format, codes.bytes);
        },
        "items"_a, "codes"_a, nb::kw_only(), "dtype"_a, "compute_dtype"_a, "scales"_a, "format"_a, NoGil());
    m.def(
        "dequantize",
        [](const In& codes, const Out& items, std::string_view dtype, const ScalesArgument& scales,
           const CodeFormat& format) {
            quantize::dequantize(codes.bytes, format, scales.scales, parse_float_type(dtype), items.bytes);
        },
        "codes"_a, "items"_a, nb::kw_only(), "dtype"_a, "scales"_a, "format"_a, NoGil());
    m.def(
        "rounding_loss",
        [](const In& items, const In& codes, std::string_view dtype, const ScalesArgument& scales,
           const CodeFormat& format) {
            const quantize::RoundingLoss loss = quantize::rounding_loss(items.bytes, parse_float_type(dtype),
                                                                        codes.bytes, format, scales.scales);
            return std::pair(loss.distance, loss.items);
        },
        "items"_a, "codes"_a, nb::kw_only(), "dtype"_a, "scales"_a, "format"_a, NoGil());
    m.def(
        "multiply_codes",
        [](const In& inputs, const In& codes, const Out& products, const ScalesArgument& scales,
           const CodeFormat& format, unsigned threads) {
            linear::multiply_codes(codes.bytes, format, scales.scales, inputs.bytes, products.bytes, threads);
        },
        "inputs"_a, "codes"_a, "products"_a, nb::kw_only(), "scales"_a, "format"_a, "threads"_a, NoGil());
    m.def(
        "pack_codes",
        [](const In& codes, unsigned bits, std::size_t row, const Out& words) {
            quantize::pack_codes(codes.bytes, bits, row, words.bytes);
        },
        "codes"_a, "bits"_a, "row"_a, "words"_a, NoGil());
    m.def(
        "unpack_codes",
        [](const In& words, unsigned bits, std::size_t row, const Out& codes) {
            quantize::unpack_codes(words.bytes, bits, row, codes.bytes);
        },
        "words"_a, "bits"_a, "row"_a, "codes"_a, NoGil());
    m.def(
        "sum_of_squares",
        [](const In& items, std::string_view dtype) {
            return quantize::sum_of_squares(items.bytes, parse_float_type(dtype));
        },
        "items"_a, "dtype"_a, NoGil());
    m.def(
        "squared_distance",
        [](const In& items, const In& others, std::string_view dtype) {
            return quantize::squared_distance(items.bytes, others.bytes, parse_float_type(dtype));
        },
        "items"_a, "others"_a, "dtype"_a, NoGil());
}

}  // namespace

NB_MODULE(_core, m) {
    nb::set_leak_warnings(false);  // modules keep CodeFormat constants until the process exits
    bind_core(m);
    bind_bitmask(m);
    bind_masks(m);
    bind_huffman(m);
    bind_bins(m);
    bind_residual(m);
    bind_changes(m);
    bind_quantize(m);
    bind_trellis(m);
}
