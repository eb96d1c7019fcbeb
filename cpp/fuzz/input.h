#pragma once
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <vector>

#include "core/bytes.h"
#include "core/dispatch.h"

namespace slimtensors::fuzz {

// Takes choices off the front of what the fuzzer made; past the end everything is zero.
class Input {
  public:
    Input(const std::uint8_t* data, std::size_t size) : rest_(data, size) {}

    std::size_t number(std::size_t limit) {  // below `limit`
        std::size_t value = 0;
        for (std::size_t range = 1; range < limit; range <<= 8) value = value << 8 | byte();
        return limit == 0 ? 0 : value % limit;
    }

    // A copy of exactly this size, so that the sanitizer sees the first byte beyond it.
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

inline void require(bool holds) {
    if (!holds) std::abort();
}

// Whether `run` accepts its input. A refusal is fine, anything else that goes wrong is not.
template <class Run>
bool accepts(Run run) {
    try {
        run();
        return true;
    } catch (const std::invalid_argument&) {
        return false;
    }
}

// Run the check with the code of each of some processors.
template <class Check>
void on_paths(std::initializer_list<Cpu> processors, Check check) {
    for (const Cpu& chosen : processors) {
        use_cpu(chosen);
        check();
    }
}

// Run the check with the machine's best code and with plain code.
template <class Check>
void on_both_paths(Check check) {
    on_paths({detect_cpu(), Cpu{}}, check);
}

}  // namespace slimtensors::fuzz
