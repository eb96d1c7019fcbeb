#include "linear/vector_plain.h"
