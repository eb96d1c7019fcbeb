#include "squares_loops.h"

namespace slimtensors {
namespace {

struct Avx2 {};

}  // namespace

double sum_of_squares_avx2(Bytes items, Number kind) { return sum_of_squares_by<Avx2>(items, kind); }

double squared_distance_avx2(Bytes items, Bytes others, Number kind) {
    return squared_distance_by<Avx2>(items, others, kind);
}

}  // namespace slimtensors
