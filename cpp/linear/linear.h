#pragma once
#include "quantize/quantize.h"

namespace slimtensors {

// Multiply quantized weights, a row of codes for each output, by inputs, without dequantizing them into
// memory. Inputs and products are float32: `inputs` are rows of `blocks.row` items, and `products` has, for
// each of them, one item per row of codes. Codes are integers of 8 bits, or of 4 bits packed; a block is one
// row high, and of packed codes an even number wide. Each product is the same on any number of threads, and
// whatever other inputs there are.
// Throws std::invalid_argument, before anything is written, when sizes do not fit each other.
void multiply_codes(Bytes codes, Codes from, const Scales& scales, const Blocks& blocks, Bytes inputs,
                    MutableBytes products, unsigned threads);

}  // namespace slimtensors
