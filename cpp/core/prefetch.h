#pragma once
#include "core/bytes.h"

namespace slimtensors {

// Memory that will be used after a loop that keeps the processor busy and the memory idle: the loop fetches
// it meanwhile, which makes coding of large tensors a third faster.
struct Soon {
    Bytes written, read;
};

// Fetches a few cache lines at a time, as many as the memory can deliver until the next call. `Unit` is a
// type in an unnamed namespace, which keeps the code there: the linker cannot mix it with code for other
// processors.
template <class Unit, bool for_writing, std::size_t lines>
class Ahead {
  public:
    explicit Ahead(Bytes bytes) : at_(bytes.data()), end_(at_ + bytes.size() / step * step) {}

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

}  // namespace slimtensors
