#pragma once

namespace slimtensors {

// What the running processor offers beyond plain x86-64 or ARM code.
struct Cpu {
    bool avx2 = false;    // AVX2, FMA, BMI1, BMI2 and POPCNT together
    bool avx512 = false;  // AVX-512 F, and all of the above
    bool crc32c = false;  // an instruction for CRC-32C
};

// Found once. SLIMTENSORS_CPU=plain in the environment turns everything off, avx2 what is newer; an unknown
// value throws.
const Cpu& cpu();

// Replace what was found. Only for tests, which run both kinds of code in one process.
void use_cpu(const Cpu& chosen);

// The best of this machine, whatever the environment says.
Cpu detect_cpu();

}  // namespace slimtensors
