#pragma once
#include "quantize/quantize.h"

namespace slimtensors::linear {

// Multiply inputs by a quantized weight, one row of codes per output, without dequantizing it into memory.
// Inputs and products are float32: `inputs` are rows of `scales.blocks.row` items, and `products` has one
// item per input and row of codes. Codes are 8-bit integers, 8-bit floats, or 4-bit integers packed; a block
// is one row high, and for packed codes an even number of columns wide. A product depends neither on the
// number of threads nor on the other inputs. Throws std::invalid_argument for inconsistent sizes, before
// anything is written.
void multiply_codes(Bytes codes, quantize::CodeFormat format, const quantize::Scales& scales, Bytes inputs,
                    MutableBytes products, unsigned threads);

}  // namespace slimtensors::linear
