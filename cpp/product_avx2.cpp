#include "product_loops.h"

namespace slimtensors {
namespace {

struct Avx2 {};
constexpr ProductKernels kernels = ProductLoops<Avx2>::kernels();

}  // namespace

const ProductKernels& product_kernels_avx2() { return kernels; }

}  // namespace slimtensors
