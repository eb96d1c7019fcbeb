#include "trellis/matrix.h"

#include "core/check.h"

namespace slimtensors::trellis {
namespace {

// Copy bytes of any alignment.
template <class T>
std::vector<T> read(Bytes bytes) {
    check(bytes.size() % sizeof(T) == 0, "size is not a multiple of the item size");
    std::vector<T> items(bytes.size() / sizeof(T));
    if (!items.empty()) std::memcpy(items.data(), bytes.data(), bytes.size());
    return items;
}

}  // namespace

Matrix::Matrix(Bytes parameters, Bytes row_steps, Bytes column_steps, Bytes row_classes, Bytes column_classes)
    : parameters_(read_parameters(parameters)),
      row_steps_(read<std::int16_t>(row_steps)),
      column_steps_(read<std::int16_t>(column_steps)),
      row_classes_(read<std::int16_t>(row_classes)),
      column_classes_(read<std::int16_t>(column_classes)),
      tables_(parameters_, find_classes(row_classes_, column_classes_)),
      decoder_({parameters_, row_steps_, column_steps_, row_classes_, column_classes_}, tables_) {}

Layout Matrix::rows_from(std::size_t first, std::size_t items) const {
    const std::size_t rows = columns() == 0 ? 0 : items / columns();
    check(rows * columns() == items, "items are not whole rows");
    check(first <= row_steps_.size() && rows <= row_steps_.size() - first, "rows are out of range");
    const auto part = [&](const std::vector<std::int16_t>& all) {
        return std::span(all).subspan(first, rows);
    };
    return {parameters_, part(row_steps_), column_steps_, part(row_classes_), column_classes_};
}

void Matrix::quantize(std::size_t first, Bytes weights, Bytes factor, Bytes order, float price_of_bit,
                      bool keep_zeros, MutableBytes integers) const {
    const std::vector<float> values = read<float>(weights), factors = read<float>(factor);
    const std::vector<std::uint32_t> positions = read<std::uint32_t>(order);
    check(integers.size() == weights.size(), "integers and weights differ in number");
    std::vector<std::int32_t> chosen(values.size());
    quantize_chunk(tables_, rows_from(first, values.size()), values, {factors, positions}, price_of_bit,
                   keep_zeros, chosen);
    if (!chosen.empty()) std::memcpy(integers.data(), chosen.data(), integers.size());
}

void Matrix::count(std::size_t first, Bytes integers, Counts& counts) const {
    const std::vector<std::int32_t> values = read<std::int32_t>(integers);
    counts.add(rows_from(first, values.size()), values);
}

std::size_t Matrix::encode(std::size_t first, Bytes integers, MutableBytes chunk) const {
    const std::vector<std::int32_t> values = read<std::int32_t>(integers);
    return encode_chunk(tables_, rows_from(first, values.size()), values, chunk);
}

void Matrix::decode(std::size_t first, Bytes chunk, FloatType type, MutableBytes items) const {
    const std::size_t row = columns() * (type == FloatType::f32 ? 4 : 2);
    const std::size_t rows = row == 0 ? 0 : items.size() / row;
    decoder_.decode(chunk, first, rows, type, items);
}

}  // namespace slimtensors::trellis
