#pragma once
#include <array>

#include "core/bytes.h"
#include "core/dispatch.h"
#include "residual/sparse.h"

namespace slimtensors::residual {

// Initial states of the adaptive codes of a class.
struct SparseStart {
    std::uint32_t gap, run, width;
};

// Division of items into classes by the exponent of the base: class c has exponent top - c; the first class
// also has those above, the last one those below.
struct SparseModel {
    unsigned classes, top, mantissa;
    std::array<SparseStart, max_sparse_classes> start;
};

struct SparseKernels {
    std::size_t (*encode)(const SparseModel& model, Bytes items, Bytes base, std::size_t itemsize,
                          MutableBytes chunk);
    void (*decode)(const SparseModel& model, Bytes chunk, Bytes base, std::size_t itemsize,
                   MutableBytes items);
};

namespace plain {
extern const SparseKernels sparse_kernels;
}
namespace avx2 {
extern const SparseKernels sparse_kernels;
}

}  // namespace slimtensors::residual
