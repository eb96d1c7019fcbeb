#include "core/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string_view>

namespace slimtensors {
namespace {

Cpu choose() {
    const char* wish = std::getenv("SLIMTENSORS_CPU");
    const std::string_view name = wish ? wish : "";
    if (name == "plain") return {};
    Cpu found = detect_cpu();
    if (name == "avx2") found.avx512 = false;
    if (name.empty() || name == "avx2") return found;
    throw std::invalid_argument("SLIMTENSORS_CPU must be 'plain', 'avx2' or not set");
}

Cpu& current() {
    static Cpu chosen = choose();
    return chosen;
}

}  // namespace

Cpu detect_cpu() {
    Cpu found;
#if defined(SLIMTENSORS_X86)
    found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                 __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") &&
                 __builtin_cpu_supports("fma");
    found.avx512 = found.avx2 && __builtin_cpu_supports("avx512f");
    found.crc32c = __builtin_cpu_supports("sse4.2");
#elif defined(__ARM_FEATURE_CRC32)
    found.crc32c = true;
#endif
    return found;
}

const Cpu& cpu() { return current(); }
void use_cpu(const Cpu& chosen) { current() = chosen; }

}  // namespace slimtensors
