#include "core/dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "core/check.h"

namespace slimtensors {
namespace {

Isa choose() {
    const char* value = std::getenv("SLIMTENSORS_CPU");
    const std::string_view name = value ? value : "";
    if (name == "plain") return Isa::plain;
    check(name.empty() || name == "avx2", "SLIMTENSORS_CPU must be 'plain', 'avx2' or not set");
    return name.empty() ? detect_isa() : std::min(detect_isa(), Isa::avx2);
}

Isa& current() {
    static Isa isa = choose();
    return isa;
}

}  // namespace

Isa detect_isa() {
#if defined(SLIMTENSORS_X86)
    if (!__builtin_cpu_supports("sse4.2")) return Isa::plain;
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") &&
                      __builtin_cpu_supports("fma");
    if (!avx2) return Isa::crc;
    return __builtin_cpu_supports("avx512f") ? Isa::avx512 : Isa::avx2;
#elif defined(__ARM_FEATURE_CRC32)
    return Isa::crc;
#else
    return Isa::plain;
#endif
}

Isa active_isa() { return current(); }
void set_isa(Isa isa) { current() = isa; }

}  // namespace slimtensors
