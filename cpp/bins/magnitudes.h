#pragma once
#include "bins/bins.h"
#include "bins/model.h"

namespace slimtensors {

// Logarithms (base 2) of how large the items of each row and of each column are.
struct Scales {
    std::size_t width;
    std::vector<float> rows, columns;
};
Scales measure_scales(Bytes items, const BinsKind& kind, std::size_t width);

// Labels 0 to 15 for rows and columns; those of items of one scale have one sum.
struct Labels {
    std::vector<std::uint8_t> rows, columns;
};
// Which of the two differ; the others get label 0.
struct Use {
    bool rows, columns;
};
Labels label_scales(const Scales& scales, Use use);

// Bits that it takes to say them.
double label_bits(const std::vector<std::uint8_t>& labels);

}  // namespace slimtensors
