#pragma once

namespace slimtensors {

// What the running processor offers beyond plain x86-64 or ARM code.
struct Cpu {
    bool avx2 = false;    // AVX2, FMA, BMI1, BMI2 and POPCNT together
    bool crc32c = false;  // an instruction for CRC-32C
};

// Found once. SLIMTENSORS_CPU=plain in the environment turns everything off; an unknown value throws.
const Cpu& cpu();

// Replace what was found. Only for tests, which run both kinds of code in one process.
void use_cpu(const Cpu& chosen);

// The best of this machine, whatever the environment says.
Cpu detect_cpu();

}  // namespace slimtensors
