#include "quantize/squares_loops.h"

namespace slimtensors {
namespace {

struct Avx2 {};
constexpr SquaresKernels kernels = SquaresLoops<Avx2>::kernels();

}  // namespace

const SquaresKernels& squares_kernels_avx2() { return kernels; }

}  // namespace slimtensors
