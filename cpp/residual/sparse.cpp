#include "residual/sparse.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "core/check.h"
#include "residual/expected_model.h"
#include "residual/ordered.h"
#include "residual/sparse_kernels.h"

namespace slimtensors::residual {
namespace {

constexpr std::size_t pieces = 16, min_sample = std::size_t{1} << 12;
constexpr unsigned default_classes = 11, max_code = 34, max_width = 32;

const SparseKernels& active_kernels() {
    static constexpr KernelTable<SparseKernels> table{.plain = &plain::sparse_kernels,
                                                      .avx2 = SLIM_X86(&avx2::sparse_kernels)};
    return table.active();
}

FloatLayout check_arrays(Bytes items, Bytes base, FloatType type) {
    check(type == FloatType::f32 || type == FloatType::f16 || type == FloatType::bf16,
          "unsupported float type");
    const FloatLayout layout = layout_of(type);
    check(items.size() == base.size() && items.size() % layout.itemsize == 0, "arrays differ in size");
    return layout;
}

// Call `visit(offset in bytes)` for an eighth of the items, in evenly spaced pieces, or for all of few.
template <class Visit>
std::size_t sample(std::size_t count, std::size_t itemsize, Visit visit) {
    std::size_t length = std::max(count / 8 / pieces, min_sample), starts = pieces;
    if (length * pieces >= count) length = count, starts = 1;
    for (std::size_t p = 0; p < starts; ++p) {
        const std::size_t begin = starts == 1 ? 0 : (count - length) / (pieces - 1) * p;
        for (std::size_t i = begin; i < begin + length; ++i) visit(i * itemsize);
    }
    return length * starts;
}

// Numbers 2, 3, 4, 6, 8, 12, … times 16: the state of a running mean of 1, 1.5, 2, 3, ….
std::uint32_t expand(unsigned code) { return (2 + (code & 1)) << (code >> 1) << 4; }

std::uint8_t compress(std::uint64_t sum, std::uint64_t count) {
    const std::uint64_t mean = count == 0 ? std::uint64_t{1} << 17 : sum / count;
    std::uint8_t code = 0;
    while (code < max_code && expand(code) < 32 * mean) ++code;
    return code;
}

struct Counts {
    std::uint64_t members = 0, changes = 0, larger = 0, width = 0;
    void add(const Counts& other) {
        members += other.members;
        changes += other.changes;
        larger += other.larger;
        width += other.width;
    }
};

template <class Word>
std::vector<Counts> count(Bytes items, Bytes base, unsigned mantissa) {
    std::vector<Counts> counts(std::size_t{1} << (8 * sizeof(Word) - 1 - mantissa));
    sample(items.size() / sizeof(Word), sizeof(Word), [&](std::size_t at) {
        const Word from = load<Word>(base.data() + at), to = load<Word>(items.data() + at);
        Counts& found = counts[std::size_t(from & Word(~sign_bit<Word>)) >> mantissa];
        ++found.members;
        if (from == to) return;
        ++found.changes;
        const std::int64_t steps = steps_outward(from, to);
        const auto size = static_cast<std::uint64_t>(steps < 0 ? -steps : steps);
        if (size < 2) return;
        ++found.larger;
        found.width += static_cast<unsigned>(std::bit_width(size - 2));
    });
    return counts;
}

SparseModel read_model(Bytes bytes, FloatLayout layout) {
    const auto [itemsize, mantissa] = layout;
    check(bytes.size() >= 2, "model of changes is truncated");
    SparseModel model{bytes[1], bytes[0], mantissa, {}};
    check(model.classes >= 1 && model.classes <= max_sparse_classes &&
              bytes.size() == 2 + 3 * std::size_t{model.classes} &&
              model.top < 1u << (8 * itemsize - 1 - mantissa),
          "model of changes is malformed");
    for (unsigned c = 0; c < model.classes; ++c) {
        const std::uint8_t* codes = bytes.data() + 2 + 3 * c;
        check(codes[0] <= max_code && codes[1] <= max_code && codes[2] <= max_width,
              "model of changes is out of range");
        model.start[c] = {expand(codes[0]), expand(codes[1]), codes[2] * 16u};
    }
    return model;
}

}  // namespace

std::size_t sample_changes(Bytes items, Bytes base, FloatType type) {
    const std::size_t itemsize = check_arrays(items, base, type).itemsize;
    std::size_t changes = 0;
    const std::size_t total = sample(items.size() / itemsize, itemsize, [&](std::size_t at) {
        changes += itemsize == 2
                       ? load<std::uint16_t>(items.data() + at) != load<std::uint16_t>(base.data() + at)
                       : load<std::uint32_t>(items.data() + at) != load<std::uint32_t>(base.data() + at);
    });
    return total == 0 ? 0 : changes * 65536 / total;
}

std::size_t sparse_fit(Bytes items, Bytes base, FloatType type, MutableBytes model) {
    const auto [itemsize, mantissa] = check_arrays(items, base, type);
    check(model.size() >= max_sparse_model, "model is too small");
    const std::vector<Counts> counts = itemsize == 2 ? count<std::uint16_t>(items, base, mantissa)
                                                     : count<std::uint32_t>(items, base, mantissa);
    Counts all;
    for (const Counts& c : counts) all.add(c);
    // The first class has at least a 32nd of the items.
    std::size_t top = counts.size() - 1;
    for (std::uint64_t seen = counts[top].members; top > 0 && seen * 32 < all.members;)
        seen += counts[--top].members;
    std::size_t bottom = 0;
    while (bottom < top && counts[bottom].members == 0) ++bottom;
    const auto classes = static_cast<unsigned>(std::min<std::size_t>(default_classes, top - bottom + 1));
    model[0] = static_cast<std::uint8_t>(top);
    model[1] = static_cast<std::uint8_t>(classes);
    for (unsigned c = 0; c < classes; ++c) {
        const std::size_t first = c + 1 == classes ? 0 : top - c;
        const std::size_t last = c == 0 ? counts.size() - 1 : top - c;
        Counts sum;
        for (std::size_t e = first; e <= last; ++e) sum.add(counts[e]);
        std::uint8_t* codes = model.data() + 2 + 3 * c;
        codes[0] = compress(sum.members - sum.changes, sum.changes);
        codes[1] = compress(sum.changes - sum.larger, sum.larger);
        codes[2] = static_cast<std::uint8_t>(sum.larger == 0 ? 0 : sum.width / sum.larger);
    }
    return 2 + 3 * std::size_t{classes};
}

std::size_t sparse_encode(Bytes items, Bytes base, FloatType type, Bytes model, MutableBytes chunk) {
    const FloatLayout layout = check_arrays(items, base, type);
    const std::size_t count = items.size() / layout.itemsize;
    check(count > 0 && count <= sparse_chunk, "invalid number of items in a chunk");
    check(chunk.size() >= sparse_bound(count), "chunk is too small");
    return active_kernels().encode(read_model(model, layout), items, base, layout.itemsize, chunk);
}

void sparse_decode(Bytes chunk, Bytes base, FloatType type, Bytes model, MutableBytes items) {
    const FloatLayout layout = check_arrays(items, base, type);
    const std::size_t count = items.size() / layout.itemsize;
    check(count > 0 && count <= sparse_chunk, "invalid number of items in a chunk");
    active_kernels().decode(read_model(model, layout), chunk, base, layout.itemsize, items);
}

}  // namespace slimtensors::residual
