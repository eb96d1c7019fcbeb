#pragma once
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

#include "core/bytes.h"
#include "core/dispatch.h"

namespace slimtensors::fuzz {

// Derives choices from the bytes of the fuzzer; past their end everything is zero.
class Input {
  public:
    Input(const std::uint8_t* data, std::size_t size) : rest_(data, size) {}

    std::size_t number(std::size_t limit) {  // below `limit`
        std::size_t value = 0;
        for (std::size_t range = 1; range < limit; range <<= 8) value = value << 8 | byte();
        return limit == 0 ? 0 : value % limit;
    }

    // Return a copy of exactly this size, so that the sanitizer detects access beyond it.
    std::vector<std::uint8_t> bytes(std::size_t count) {
        std::vector<std::uint8_t> out;
        out.reserve(count);
        while (out.size() < count) out.push_back(byte());
        return out;
    }

    std::size_t left() const { return rest_.size(); }

  private:
    std::uint8_t byte() {
        if (rest_.empty()) return 0;
        const std::uint8_t first = rest_.front();
        rest_ = rest_.subspan(1);
        return first;
    }

    Bytes rest_;
};

inline void require(bool condition) {
    if (!condition) std::abort();
}

// Return whether `run` accepts its input. Only std::invalid_argument is a valid rejection.
template <class Run>
bool accepts(Run run) {
    try {
        run();
        return true;
    } catch (const std::invalid_argument&) {
        return false;
    }
}

// Run the check with the best kernels of this machine, then with the plain ones.
template <class Check>
void on_best_and_plain(Check check) {
    for (const Isa isa : {detect_isa(), Isa::plain}) {
        set_isa(isa);
        check();
    }
}

// Run the check with the kernels of every instruction set of this machine.
template <class Check>
void on_all_variants(Check check) {
    for (const Isa isa : {Isa::avx512, Isa::avx2, Isa::plain}) {
        if (isa > detect_isa()) continue;
        set_isa(isa);
        check();
    }
}

}  // namespace slimtensors::fuzz
