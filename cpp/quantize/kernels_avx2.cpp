#include "quantize/kernels.cpp"

namespace slimtensors {
namespace {

struct Avx2 {};
constexpr QuantizeKernels kernels = QuantizeLoops<Avx2>::kernels();

}  // namespace

const QuantizeKernels& quantize_kernels_avx2() { return kernels; }

}  // namespace slimtensors
