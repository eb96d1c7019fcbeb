#include "bitmask/groups_plain.h"
