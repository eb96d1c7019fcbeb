#include "squares.h"

#include <stdexcept>

#include "cpu.h"
#include "squares_loops.h"

namespace slimtensors {
namespace {

struct Plain {};

void check(Bytes items, Number kind) {
    if (kind != Number::f32 && kind != Number::f16 && kind != Number::bf16)
        throw std::invalid_argument("items must be float32, float16 or bfloat16");
    if (items.size() % (kind == Number::f32 ? 4 : 2) != 0)
        throw std::invalid_argument("items are not a whole number of items");
}

}  // namespace

double sum_of_squares(Bytes items, Number kind) {
    check(items, kind);
#if defined(SLIMTENSORS_X86)
    if (cpu().avx2) return sum_of_squares_avx2(items, kind);
#endif
    return sum_of_squares_by<Plain>(items, kind);
}

double squared_distance(Bytes items, Bytes others, Number kind) {
    check(items, kind);
    if (items.size() != others.size()) throw std::invalid_argument("there must be as many others as items");
#if defined(SLIMTENSORS_X86)
    if (cpu().avx2) return squared_distance_avx2(items, others, kind);
#endif
    return squared_distance_by<Plain>(items, others, kind);
}

}  // namespace slimtensors
