// The same loops with shifts that leave the flags alone (BMI2) and wider vectors for building tables.
#include "huffman/kernels.cpp"

namespace slimtensors {
namespace {

struct Avx2 {};
constexpr StreamKernels kernels = StreamLoops<Avx2>::kernels();

}  // namespace

const StreamKernels& stream_kernels_avx2() { return kernels; }

}  // namespace slimtensors
