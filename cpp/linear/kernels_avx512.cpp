#include "linear/vector_avx512.h"
