// Kernel sources are compiled once per instruction set. The build passes SLIM_TARGET, the namespace of the
// copy being compiled; it keeps the linker from merging code for different processors.
#pragma once

#ifndef SLIM_TARGET
#define SLIM_TARGET plain
#endif
