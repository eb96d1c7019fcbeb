#pragma once
#include "core/bytes.h"

namespace slimtensors {

// Memory that is accessed after a loop that is bound by computation. Prefetching it inside the loop makes
// coding of large tensors a third faster.
struct PrefetchRanges {
    Bytes written, read;
};

inline namespace SLIM_TARGET {

// Prefetches a range step by step, `lines` cache lines per call.
template <bool for_writing, std::size_t lines>
class Prefetcher {
  public:
    explicit Prefetcher(Bytes bytes) : at_(bytes.data()), end_(at_ + bytes.size() / step * step) {}

    void fetch() {
        if (at_ == end_) return;
        for (std::size_t k = 0; k < lines; ++k) __builtin_prefetch(at_ + k * line, for_writing, 2);
        at_ += step;
    }

  private:
    static constexpr std::size_t line = 64, step = lines * line;
    const std::uint8_t* at_;
    const std::uint8_t* end_;
};

}  // namespace SLIM_TARGET
}  // namespace slimtensors
