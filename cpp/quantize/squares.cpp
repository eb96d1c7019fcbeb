#include "quantize/squares.h"

#include <stdexcept>

#include "core/dispatch.h"

namespace slimtensors {
namespace {

const SquaresKernels& kernels() {
#if defined(SLIMTENSORS_X86)
    if (cpu().avx2) return squares_kernels_avx2();
#endif
    return squares_kernels_plain();
}

void check(Bytes items, Number kind) {
    if (kind != Number::f32 && kind != Number::f16 && kind != Number::bf16)
        throw std::invalid_argument("items must be float32, float16 or bfloat16");
    if (items.size() % (kind == Number::f32 ? 4 : 2) != 0)
        throw std::invalid_argument("items are not a whole number of items");
}

}  // namespace

void SquareSums::add(Bytes items, Number kind) { kernels().add(items, kind, lanes_); }

void SquareSums::add_differences(Bytes items, Bytes others, Number kind) {
    kernels().add_differences(items, others, kind, lanes_);
}

double SquareSums::total() const {
    Lanes sums = lanes_;
    for (std::size_t half = sums.size() / 2; half > 0; half /= 2)
        for (std::size_t k = 0; k < half; ++k) sums[k] += sums[k + half];
    return sums[0];
}

double sum_of_squares(Bytes items, Number kind) {
    check(items, kind);
    SquareSums sums;
    sums.add(items, kind);
    return sums.total();
}

double squared_distance(Bytes items, Bytes others, Number kind) {
    check(items, kind);
    if (items.size() != others.size()) throw std::invalid_argument("there must be as many others as items");
    SquareSums sums;
    sums.add_differences(items, others, kind);
    return sums.total();
}

}  // namespace slimtensors
