#include "quantize/squares_loops.h"

namespace slimtensors {
namespace {

struct Plain {};
constexpr SquaresKernels kernels = SquaresLoops<Plain>::kernels();

}  // namespace

const SquaresKernels& squares_kernels_plain() { return kernels; }

}  // namespace slimtensors
