// Checks and tails of the density coder, and its encoder; the inner loops of the decoder are kernels.
#include "masks/density.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/check.h"
#include "masks/density_kernels.h"

namespace slimtensors::masks {
namespace {

// The constructor checks all sizes; nothing that uses it checks bounds again.
struct Matrix {
    std::size_t bytes, width, rows;
    Bytes row_class, column_class, chances;

    Matrix(std::size_t bytes_, Bytes rows_, Bytes columns, Bytes chances_)
        : bytes(bytes_),
          width(columns.size() / 8),
          rows(rows_.size()),
          row_class(rows_),
          column_class(columns),
          chances(chances_) {
        check_density_sizes(bytes, rows, columns.size(), chances.size());
        for (const Bytes labels : {row_class, column_class})
            check(!(std::ranges::any_of(labels, [](std::uint8_t label) { return label >= density_classes; })),
                  "classes must be below 16");
        check(std::ranges::all_of(chances, is_chance), "invalid probability code");
    }

    std::size_t row_bytes(std::size_t r) const { return std::min(width, bytes - r * width); }
    std::uint8_t chance(std::size_t row_label, std::size_t column) const {
        return chances[row_label * density_classes + column_class[column]];
    }
};

// The state update for one bit, with the division of rANS replaced by a multiplication.
struct Step {
    std::uint64_t inverse;  // ceil(2^64 / chance): exact for 32-bit states because chance >= 2
    std::uint32_t limit, others, start;

    Step(std::uint32_t chance, std::uint32_t start_)
        : inverse(~std::uint64_t{0} / chance + 1),
          limit(chance << (32 - chance_bits)),
          others(chance_unit - chance),
          start(start_) {}

    std::uint32_t apply(std::uint32_t state) const {
        const auto quotient = static_cast<std::uint32_t>(Uint128{inverse} * state >> 64);
        return state + quotient * others + start;
    }
};

// Steps for a zero and a one, by the code of the probability.
std::vector<Step> make_steps() {
    std::vector<Step> steps;
    for (unsigned code = 0; code < 256; ++code) {
        const std::uint32_t one = is_chance(code) ? chance_of_one(code) : chance_unit / 2;
        steps.emplace_back(chance_unit - one, one);
        steps.emplace_back(one, 0);
    }
    return steps;
}

// Code the bits of a byte, last one first. Words are written before `at`; returns the new position.
inline std::uint8_t* encode_byte(unsigned byte, const Step* steps, const std::uint8_t* chance_row,
                                 const std::uint8_t* columns, std::uint32_t* states, std::uint8_t* at) {
    std::array<std::uint32_t, vector_lanes> lanes;  // a local copy: stores of words cannot alias it
    std::memcpy(lanes.data(), states, sizeof lanes);
#pragma GCC unroll 8
    for (std::size_t lane = vector_lanes; lane-- > 0;) {
        const Step& step = steps[2 * chance_row[columns[lane]] + (byte >> lane & 1u)];
        std::uint32_t state = lanes[lane];
        if (state >= step.limit) {
            at -= 2;
            store(at, static_cast<std::uint16_t>(state));
            state >>= 16;
        }
        lanes[lane] = step.apply(state);
    }
    std::memcpy(states, lanes.data(), sizeof lanes);
    return at;
}

constexpr std::size_t state_bytes(std::size_t vectors) { return vectors * vector_lanes * 4; }

// Probabilities of a one for each column, for the row classes that occur.
class Chances {
  public:
    explicit Chances(const Matrix& matrix) : columns_(8 * matrix.width), table_(density_classes) {
        for (const std::uint8_t label : matrix.row_class) {
            std::vector<std::uint16_t>& row = table_[label];
            if (!row.empty()) continue;
            row.resize(columns_);
            for (std::size_t c = 0; c < columns_; ++c)
                row[c] = static_cast<std::uint16_t>(chance_of_one(matrix.chance(label, c)));
        }
    }

    const std::uint16_t* row(std::uint8_t label) const { return table_[label].data(); }

  private:
    std::size_t columns_;
    std::vector<std::vector<std::uint16_t>> table_;
};

constexpr KernelTable<DensityKernels> kernels{.plain = &plain::density_kernels,
                                              .avx2 = SLIM_X86(&avx2::density_kernels)};

void copy(Bytes from, MutableBytes to) {
    if (!from.empty()) std::memcpy(to.data(), from.data(), from.size());
}

}  // namespace

void check_density_sizes(std::size_t mask_bytes, std::size_t rows, std::size_t columns, std::size_t chances) {
    const std::size_t width = columns / 8;
    check(columns % 8 == 0 && width != 0 && width <= density_max_width, "a row must have 1 to 32768 bytes");
    check(rows == ceil_div(mask_bytes, width), "rows must have one class for each row of the mask");
    check(chances == density_pairs, "chances must have one entry for each pair of 16 classes");
}

std::size_t density_encode(Bytes mask, Bytes rows, Bytes columns, Bytes chances, MutableBytes coded) {
    const Matrix matrix(mask.size(), rows, columns, chances);
    check(coded.size() >= mask.size(), "coded must be at least as large as the mask");
    static const std::vector<Step> all_steps = make_steps();
    const std::size_t vectors = vectors_for(mask.size());
    std::array<std::uint32_t, max_vectors * vector_lanes> states;
    states.fill(min_state);

    // rANS decodes in the opposite order, so encode backwards and write words from the end of the buffer.
    std::uint8_t* const start = coded.data();
    std::uint8_t* at = start + mask.size();
    const Step* const steps = all_steps.data();
    for (std::size_t r = matrix.rows; r-- > 0;) {
        const std::uint8_t* chance_row = chances.data() + matrix.row_class[r] * density_classes;
        for (std::size_t j = matrix.row_bytes(r); j-- > 0;) {
            if (static_cast<std::size_t>(at - start) < state_bytes(vectors) + vector_words) {
                copy(mask, coded);
                return mask.size();
            }
            at = encode_byte(mask[r * matrix.width + j], steps, chance_row, &matrix.column_class[8 * j],
                             states.data() + j % vectors * vector_lanes, at);
        }
    }
    const auto words = static_cast<std::size_t>(start + mask.size() - at);
    if (words + state_bytes(vectors) >= mask.size()) {
        copy(mask, coded);
        return mask.size();
    }
    std::memmove(start + state_bytes(vectors), at, words);
    std::memcpy(start, states.data(), state_bytes(vectors));
    return state_bytes(vectors) + words;
}

void density_decode(Bytes coded, Bytes rows, Bytes columns, Bytes chances, MutableBytes mask) {
    const Matrix matrix(mask.size(), rows, columns, chances);
    if (coded.size() == mask.size()) return copy(coded, mask);
    const std::size_t vectors = vectors_for(mask.size());
    const std::size_t margin = vectors * vector_words;
    check(coded.size() >= state_bytes(vectors), "coded mask is too short");
    std::array<std::uint32_t, max_vectors * vector_lanes> states;
    std::memcpy(states.data(), coded.data(), state_bytes(vectors));
    const Chances ones(matrix);
    const DecodeRow decode = kernels.active().decode_row[vectors];

    const std::uint8_t* next = coded.data() + state_bytes(vectors);
    const std::uint8_t* end = coded.data() + coded.size();
    std::array<std::uint8_t, 2 * max_vectors * vector_words> tail{};
    bool in_tail = false;
    for (std::size_t r = 0; r < matrix.rows; ++r) {
        const std::uint16_t* chance_row = ones.row(matrix.row_class[r]);
        const std::size_t bytes = matrix.row_bytes(r);
        std::uint8_t* const row = mask.data() + r * matrix.width;
        std::size_t done = decode(chance_row, 0, bytes, states.data(), next, end, row);
        if (done == bytes) continue;
        if (!in_tail) {
            // Read the last few words from a padded copy; the kernel stops inside the padding.
            const std::size_t left = static_cast<std::size_t>(end - next);
            std::memcpy(tail.data(), next, left);
            next = tail.data();
            end = next + left + margin;
            in_tail = true;
            done = decode(chance_row, done, bytes, states.data(), next, end, row);
        }
        check(done == bytes, "coded mask is too short");
    }
    const std::size_t left = static_cast<std::size_t>(end - next) - (in_tail ? margin : 0);
    const bool states_reset = std::all_of(states.begin(), states.begin() + vectors * vector_lanes,
                                          [](std::uint32_t state) { return state == min_state; });
    check(left == 0 && states_reset, "coded mask has trailing or missing data");
}

}  // namespace slimtensors::masks
