#include "quantize/kernels.cpp"

namespace slimtensors {
namespace {

struct Plain {};
constexpr QuantizeKernels kernels = QuantizeLoops<Plain>::kernels();

}  // namespace

const QuantizeKernels& quantize_kernels_plain() { return kernels; }

}  // namespace slimtensors
