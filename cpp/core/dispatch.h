#pragma once
#include <cstdint>

namespace slimtensors {

// Instruction sets that kernels are compiled for. Each one includes those before it.
enum class Isa : std::uint8_t {
    plain,   // baseline x86-64 or ARM
    crc,     // CRC-32C instructions: SSE4.2, ARMv8 CRC
    avx2,    // AVX2, FMA, BMI1, BMI2 and POPCNT
    avx512,  // AVX-512 F
};

// The best instruction set of this machine, regardless of the environment.
Isa detect_isa();

// The instruction set in use, chosen once: the best one, unless SLIMTENSORS_CPU is "plain" or "avx2". Throws
// std::invalid_argument for any other value.
Isa active_isa();

// Override it. Only for tests that run several variants in one process.
void set_isa(Isa isa);

// The variants of one kernel table; null where there is none.
template <class Kernels>
struct KernelTable {
    const Kernels* plain;
    const Kernels* crc = nullptr;
    const Kernels* avx2 = nullptr;
    const Kernels* avx512 = nullptr;

    // The best variant that the active instruction set can run.
    const Kernels& active() const {
        const Isa isa = active_isa();
        if (avx512 && isa >= Isa::avx512) return *avx512;
        if (avx2 && isa >= Isa::avx2) return *avx2;
        if (crc && isa >= Isa::crc) return *crc;
        return *plain;
    }
};

// The address of a variant that exists on x86 only.
#if defined(SLIMTENSORS_X86)
#define SLIM_X86(variant) (variant)
#else
#define SLIM_X86(variant) nullptr
#endif

}  // namespace slimtensors
