#include "product_loops.h"

namespace slimtensors {
namespace {

struct Plain {};
constexpr ProductKernels kernels = ProductLoops<Plain>::kernels();

}  // namespace

const ProductKernels& product_kernels_plain() { return kernels; }

}  // namespace slimtensors
