#pragma once
#include "core/dispatch.h"
#include "core/floats.h"
#include "trellis/model.h"

namespace slimtensors::trellis {

// The coder is rANS. States are in [2^16, 2^32) and are refilled with 16-bit words. The columns of a matrix
// are coded in groups of 32, one state each; a group is coded row by row. All states share one stream of
// words, in the order in which they need them.
inline constexpr std::size_t lanes = 32;
inline constexpr std::uint32_t min_state = 1u << 16;
inline constexpr std::size_t max_row_words = lanes * sizeof(std::uint16_t);  // bytes

// A slot of a decoding table: the symbol in bits 0 to 5, the number of low bits in bits 6 to 8, the frequency
// minus one in bits 9 to 19, and the offset from the symbol's first slot in bits 20 to 30.
using Slots = std::vector<std::uint32_t>;
Slots make_slots(const Tables& tables);

// The rows of one chunk, and a group of columns.
struct Group {
    const std::uint32_t* slots;
    int first_class;  // whose tables are the first ones
    const std::int16_t* row_classes;
    const float* row_steps;
    const std::int16_t* column_classes;  // of the group
    const float* column_steps;           // of the group
    std::size_t columns;                 // of the group, at most 32
    std::size_t rows;
    std::uint8_t* out;   // first item of the group
    std::size_t stride;  // bytes from row to row
    FloatType type;      // f32, f16 or bf16
};

// Where decoding has arrived.
struct Cursor {
    std::array<std::uint32_t, lanes> states;      // of rANS
    std::array<std::uint32_t, lanes> quantizers;  // state of each column
    const std::uint8_t *next, *end;               // words
    const std::uint8_t *escape, *escapes_end;     // integers of four bytes
};

struct Kernels {
    // Decode a group from row `first`; return the number of rows done, less than all if the words may not
    // suffice for another row. The vector kernels accept groups of 32 columns only.
    std::size_t (*decode)(const Group& group, std::size_t first, Cursor& cursor);
};

namespace plain {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}

const Kernels& active_kernels();

// Return the next escaped integer; throw if there is none.
std::int32_t take_escape(Cursor& cursor);

}  // namespace slimtensors::trellis
