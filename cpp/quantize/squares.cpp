#include "quantize/squares.h"

#include "core/check.h"

namespace slimtensors::quantize {
namespace {

void check_floats(Bytes items, FloatType type) {
    check(type == FloatType::f32 || type == FloatType::f16 || type == FloatType::bf16,
          "items must be float32, float16 or bfloat16");
    check_items(items.size(), type == FloatType::f32 ? 4 : 2);
}

}  // namespace

void SquareSums::add(Bytes items, FloatType type) { active_kernels().add_squares(items, type, lanes_); }

void SquareSums::add_differences(Bytes items, Bytes others, FloatType type) {
    active_kernels().add_squared_differences(items, others, type, lanes_);
}

double SquareSums::total() const {
    SquareLanes sums = lanes_;
    for (std::size_t half = sums.size() / 2; half > 0; half /= 2)
        for (std::size_t k = 0; k < half; ++k) sums[k] += sums[k + half];
    return sums[0];
}

double sum_of_squares(Bytes items, FloatType type) {
    check_floats(items, type);
    SquareSums sums;
    sums.add(items, type);
    return sums.total();
}

double squared_distance(Bytes items, Bytes others, FloatType type) {
    check_floats(items, type);
    check(items.size() == others.size(), "others must have as many items");
    SquareSums sums;
    sums.add_differences(items, others, type);
    return sums.total();
}

}  // namespace slimtensors::quantize
