#include "bitmask/groups_avx2.h"
