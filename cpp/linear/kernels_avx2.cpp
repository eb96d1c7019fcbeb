#include "linear/vector_avx2.h"
