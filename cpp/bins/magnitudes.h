#pragma once
#include "bins/bins.h"
#include "bins/model.h"

namespace slimtensors::bins {

// log2 of the mean magnitude of the items of each row and each column.
struct Magnitudes {
    std::size_t width;
    std::vector<float> rows, columns;
};
Magnitudes measure_magnitudes(Bytes items, const ItemType& type, std::size_t width);

// Labels 0 to 15 of rows and columns; items of the same magnitude have the same sum of labels.
struct Labels {
    std::vector<std::uint8_t> rows, columns;
};
// The sides that are labelled; the other one gets label 0.
struct Sides {
    bool rows, columns;
};
Labels label_magnitudes(const Magnitudes& magnitudes, Sides sides);

// Entropy of the labels in bits.
double label_bits(const std::vector<std::uint8_t>& labels);

}  // namespace slimtensors::bins
