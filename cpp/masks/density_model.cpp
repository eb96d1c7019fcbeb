// Layout of a stored density model:
//   row classes R, column classes C               2 bytes
//   frequency of each class, in units of 1/256    R bytes, or none if R is 1; then C likewise
//   probabilities, [row class][column class]      R * C bytes
//   labels, rANS with these frequencies           4 bytes of state, then its input; nothing if R and C are 1
#include <algorithm>
#include <array>
#include <vector>

#include "core/check.h"
#include "core/histogram.h"
#include "masks/density.h"
#include "masks/density_kernels.h"

namespace slimtensors::masks {
namespace {

constexpr unsigned count_bits = 8;
constexpr std::uint32_t count_unit = 1u << count_bits;
constexpr std::uint32_t min_model_state = 1u << 23;  // refilled with bytes

struct Symbols {
    std::size_t classes = 1;
    std::array<std::uint32_t, density_classes> count{count_unit}, start{};

    void set_starts() {
        for (std::size_t k = 1; k < classes; ++k) start[k] = start[k - 1] + count[k - 1];
    }
};

// Every class that occurs gets a count; the largest one absorbs the rounding error.
Symbols count_labels(Bytes labels) {
    Symbols symbols;
    const ByteCounts seen = histogram(labels);
    check(std::all_of(seen.begin() + density_classes, seen.end(), [](auto n) { return n == 0; }),
          "classes must be below 16");
    for (std::size_t k = 0; k < density_classes; ++k)
        if (seen[k] != 0) symbols.classes = k + 1;
    if (symbols.classes == 1) return symbols;
    std::uint32_t sum = 0;
    for (std::size_t k = 0; k < symbols.classes; ++k) {
        // classes that do not occur waste a count but are valid
        symbols.count[k] = static_cast<std::uint32_t>(
            std::clamp<std::size_t>(std::size_t{count_unit} * seen[k] / labels.size(), 1, count_unit - 1));
        sum += symbols.count[k];
    }
    auto* const last = symbols.count.data() + symbols.classes;
    for (; sum < count_unit; ++sum) ++*std::max_element(symbols.count.data(), last);
    for (; sum > count_unit; --sum) --*std::max_element(symbols.count.data(), last);
    symbols.set_starts();
    return symbols;
}

void encode(Bytes labels, const Symbols& symbols, std::uint32_t& state, std::vector<std::uint8_t>& out) {
    if (symbols.classes == 1) return;
    for (std::size_t i = labels.size(); i-- > 0;) {
        const std::uint32_t count = symbols.count[labels[i]];
        for (; state >= (min_model_state >> count_bits << 8) * count; state >>= 8)
            out.push_back(static_cast<std::uint8_t>(state));
        state = (state / count << count_bits) + state % count + symbols.start[labels[i]];
    }
}

void decode(Bytes& in, const Symbols& symbols, std::uint32_t& state, MutableBytes labels) {
    if (symbols.classes == 1) {
        std::ranges::fill(labels, std::uint8_t{0});
        return;
    }
    std::array<std::uint8_t, count_unit> label_at{};
    for (std::size_t k = 0; k < symbols.classes; ++k)
        std::fill_n(label_at.begin() + symbols.start[k], symbols.count[k], static_cast<std::uint8_t>(k));
    for (std::uint8_t& label : labels) {
        const std::uint32_t rest = state % count_unit;
        label = label_at[rest];
        state = symbols.count[label] * (state / count_unit) + rest - symbols.start[label];
        for (; state < min_model_state; in = in.subspan(1)) {
            check(!in.empty(), "density model is truncated");
            state = state << 8 | in.front();
        }
    }
}

Bytes take(Bytes& in, std::size_t size) {
    check(in.size() >= size, "density model is truncated");
    const Bytes front = in.first(size);
    in = in.subspan(size);
    return front;
}

Symbols read_counts(Bytes& in, std::size_t classes) {
    Symbols symbols;
    symbols.classes = classes;
    if (classes == 1) return symbols;
    std::uint32_t sum = 0;
    const Bytes counts = take(in, classes);
    for (std::size_t k = 0; k < classes; ++k) {
        symbols.count[k] = counts[k];
        sum += counts[k];
    }
    check(sum == count_unit && std::ranges::count(counts, 0) == 0,
          "class frequencies must be positive and sum to 256");
    symbols.set_starts();
    return symbols;
}

}  // namespace

std::size_t density_model_bound(std::size_t labels) {
    return 2 + 2 * density_classes + density_pairs + 4 + labels + 1;
}

std::size_t density_pack(Bytes rows, Bytes columns, Bytes chances, MutableBytes model) {
    check(chances.size() == density_pairs, "chances must have one entry for each pair of 16 classes");
    check(model.size() >= density_model_bound(rows.size() + columns.size()),
          "model must have at least density_model_bound() bytes");
    const Symbols row = count_labels(rows), column = count_labels(columns);
    std::vector<std::uint8_t> out{static_cast<std::uint8_t>(row.classes),
                                  static_cast<std::uint8_t>(column.classes)};
    for (const Symbols* symbols : {&row, &column})
        for (std::size_t k = 0; k < symbols->classes && symbols->classes > 1; ++k)
            out.push_back(static_cast<std::uint8_t>(symbols->count[k]));
    for (std::size_t k = 0; k < row.classes; ++k)
        for (std::size_t l = 0; l < column.classes; ++l) out.push_back(chances[k * density_classes + l]);

    if (row.classes > 1 || column.classes > 1) {
        std::uint32_t state = min_model_state;
        std::vector<std::uint8_t> reversed;
        encode(columns, column, state, reversed);
        encode(rows, row, state, reversed);
        for (unsigned k = 0; k < 4; ++k) out.push_back(static_cast<std::uint8_t>(state >> 8 * k));
        out.insert(out.end(), reversed.rbegin(), reversed.rend());
    }
    std::memcpy(model.data(), out.data(), out.size());
    return out.size();
}

void density_unpack(Bytes model, MutableBytes rows, MutableBytes columns, MutableBytes chances) {
    check(chances.size() == density_pairs, "chances must have one entry for each pair of 16 classes");
    Bytes in = model;
    const Bytes sizes = take(in, 2);
    check(!(std::ranges::any_of(sizes, [](std::size_t n) { return n == 0 || n > density_classes; })),
          "density model must have 1 to 16 classes");
    const Symbols row = read_counts(in, sizes[0]), column = read_counts(in, sizes[1]);
    std::ranges::fill(chances, std::uint8_t{0});
    for (std::size_t k = 0; k < row.classes; ++k) {
        const Bytes from = take(in, column.classes);
        check(std::ranges::all_of(from, is_chance), "invalid probability code");
        std::ranges::copy(from, chances.begin() + static_cast<std::ptrdiff_t>(k * density_classes));
    }
    std::uint32_t state = min_model_state;
    if (row.classes > 1 || column.classes > 1) state = load<std::uint32_t>(take(in, 4).data());
    decode(in, row, state, rows);
    decode(in, column, state, columns);
    check(state == min_model_state && in.empty(), "density model has trailing or missing data");
}

}  // namespace slimtensors::masks
