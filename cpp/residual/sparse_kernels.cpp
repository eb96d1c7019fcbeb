// Coding of few changes: positions among the items of a class, then signs and sizes.
#include "residual/sparse_kernels.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <vector>

#include "core/check.h"
#include "residual/ordered.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace slimtensors::residual::SLIM_TARGET {
namespace {

constexpr std::size_t group = 64;  // items per word of a mask
constexpr std::size_t max_groups = sparse_chunk / group;
constexpr unsigned max_quotient = 24, gap_bits = 18;

template <class Word>
Word magnitude_limit(const SparseModel& model, unsigned c) {
    return model.top > c ? Word(Word(model.top - c) << model.mantissa) : Word(0);
}

// Return a mask of the items among 64 that differ.
template <class Word>
std::uint64_t compare_group(const std::uint8_t* items, const std::uint8_t* base) {
    std::uint64_t mask = 0;
#if defined(__AVX2__)
    constexpr std::size_t vectors = group * sizeof(Word) / 32;
    for (std::size_t v = 0; v < vectors; v += 2) {
        const auto equal = [&](std::size_t i) {
            const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(items + 32 * i));
            const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base + 32 * i));
            return sizeof(Word) == 2 ? _mm256_cmpeq_epi16(a, b) : _mm256_cmpeq_epi32(a, b);
        };
        if constexpr (sizeof(Word) == 2) {
            const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(equal(v), equal(v + 1)), 0xd8);
            mask |= std::uint64_t{~static_cast<unsigned>(_mm256_movemask_epi8(packed))} << 16 * v;
        } else {
            const auto bits = [](__m256i x) {
                return ~static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(x))) & 255u;
            };
            mask |= std::uint64_t{bits(equal(v)) | bits(equal(v + 1)) << 8} << 8 * v;
        }
    }
#else
    for (std::size_t i = 0; i < group; ++i)
        mask |= std::uint64_t{load<Word>(items + i * sizeof(Word)) != load<Word>(base + i * sizeof(Word))}
                << i;
#endif
    return mask;
}

// Write, for each limit, a mask of the items among 64 with magnitudes below it.
template <class Word>
void find_below(const std::uint8_t* base, const Word* limits, unsigned count, std::uint64_t* masks,
                std::size_t stride) {
#if defined(__AVX2__)
    constexpr std::size_t vectors = group * sizeof(Word) / 32;
    __m256i magnitudes[vectors];
    const __m256i no_sign = sizeof(Word) == 2 ? _mm256_set1_epi16(0x7fff) : _mm256_set1_epi32(0x7fffffff);
    for (std::size_t v = 0; v < vectors; ++v)
        magnitudes[v] =
            _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(base + 32 * v)), no_sign);
    if constexpr (sizeof(Word) == 2)  // packing works within halves
        for (std::size_t v = 0; v < vectors; v += 2) {
            const __m256i first = magnitudes[v], second = magnitudes[v + 1];
            magnitudes[v] = _mm256_permute2x128_si256(first, second, 0x20);
            magnitudes[v + 1] = _mm256_permute2x128_si256(first, second, 0x31);
        }
    for (unsigned c = 0; c < count; ++c) {
        std::uint64_t mask = 0;
        if constexpr (sizeof(Word) == 2) {
            const __m256i limit = _mm256_set1_epi16(static_cast<short>(limits[c]));
            for (std::size_t v = 0; v < vectors; v += 2) {
                const __m256i packed = _mm256_packs_epi16(_mm256_cmpgt_epi16(limit, magnitudes[v]),
                                                          _mm256_cmpgt_epi16(limit, magnitudes[v + 1]));
                mask |= std::uint64_t{static_cast<unsigned>(_mm256_movemask_epi8(packed))} << 16 * v;
            }
        } else {
            const __m256i limit = _mm256_set1_epi32(static_cast<int>(limits[c]));
            for (std::size_t v = 0; v < vectors; ++v) {
                const __m256 below = _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, magnitudes[v]));
                mask |= std::uint64_t{static_cast<unsigned>(_mm256_movemask_ps(below))} << 8 * v;
            }
        }
        masks[c * stride] = mask;
    }
#else
    for (unsigned c = 0; c < count; ++c) masks[c * stride] = 0;
    for (std::size_t i = 0; i < group; ++i) {
        const Word magnitude = load<Word>(base + i * sizeof(Word)) & Word(~sign_bit<Word>);
        for (unsigned c = 0; c < count; ++c) masks[c * stride] |= std::uint64_t{magnitude < limits[c]} << i;
    }
#endif
}

// Move bit r to the place of the one in `members` that has r ones below it.
std::uint64_t deposit(std::uint64_t bits, std::uint64_t members) {
#if defined(__BMI2__)
    return _pdep_u64(bits, members);
#else
    std::uint64_t found = 0;
    for (; members != 0 && bits != 0; members &= members - 1, bits >>= 1)
        if (bits & 1) found |= members & (~members + 1);
    return found;
#endif
}

// The items of a chunk by class, as masks of 64 items.
template <class Word>
class Classes {
  public:
    Classes(const SparseModel& model, Bytes base)
        : items_(base.size() / sizeof(Word)),
          groups_(ceil_div(items_, group)),
          classes_(model.classes),
          stride_(groups_ + 8),
          below_(new std::uint64_t[stride_ * (model.classes + 1)]) {
        std::array<Word, max_sparse_classes> limits;
        for (unsigned c = 0; c + 1 < classes_; ++c) limits[c] = magnitude_limit<Word>(model, c);
        const std::size_t full = items_ / group;
        for (std::size_t g = 0; g < full; ++g)
            find_below(base.data() + g * group * sizeof(Word), limits.data(), classes_ - 1,
                       &below_[stride_ + g], stride_);
        std::fill_n(&below_[0], groups_, ~std::uint64_t{0});
        std::fill_n(&below_[classes_ * stride_], groups_, std::uint64_t{0});
        if (full < groups_) {
            std::array<std::uint8_t, group * sizeof(Word)> last{};
            std::memcpy(last.data(), base.data() + full * last.size(), base.size() - full * last.size());
            find_below(last.data(), limits.data(), classes_ - 1, &below_[stride_ + full], stride_);
            for (unsigned c = 0; c <= classes_; ++c)
                below_[c * stride_ + full] &= (std::uint64_t{1} << items_ % group) - 1;
        }
    }

    std::size_t items() const { return items_; }
    std::size_t groups() const { return groups_; }
    std::uint64_t members(unsigned c, std::size_t g) const {
        return below_[c * stride_ + g] & ~below_[(c + 1) * stride_ + g];
    }
    std::uint32_t count(unsigned c) const {
        std::size_t found = 0;
        for (std::size_t g = 0; g < groups_; ++g)
            found += static_cast<std::size_t>(std::popcount(members(c, g)));
        return static_cast<std::uint32_t>(found);
    }

  private:
    std::size_t items_, groups_;
    unsigned classes_;
    std::size_t stride_;  // not a multiple of the page size, to spread masks over the cache
    std::unique_ptr<std::uint64_t[]> below_;
};

// Running mean of numbers, which selects their Golomb-Rice code.
struct Mean {
    std::uint32_t sum;  // 32 times the mean

    unsigned low_bits() const {
        const auto width = static_cast<unsigned>(std::bit_width(sum >> 5));
        return width > 1 ? width - 1 : 0;
    }
    void add(std::uint32_t value) { sum += value - (sum >> 5); }
};

// Running mean of the number of bits of numbers, which selects their exponential Golomb code.
struct Width {
    std::uint32_t sum;  // 16 times the mean

    unsigned low_bits() const { return sum >= 32 ? (sum >> 4) - 1 : 0; }
    void add(std::uint32_t value) { sum += static_cast<unsigned>(std::bit_width(value)) - (sum >> 4); }
};

// Writes up to 7 bytes beyond the last bit; sparse_bound() includes them.
class BitWriter {
  public:
    explicit BitWriter(MutableBytes out) : start_(out.data()), at_(out.data()) {}

    void put(std::uint64_t value, unsigned bits) {  // at most 56
        word_ |= value << used_;
        store(at_, word_);
        used_ += bits;
        at_ += used_ / 8;
        word_ = used_ / 8 < 8 ? word_ >> (used_ & ~7u) : 0;
        used_ %= 8;
    }
    void put_ones(unsigned count) { put((std::uint64_t{1} << count) - 1, count); }
    std::size_t finish() const { return static_cast<std::size_t>(at_ - start_) + (used_ > 0); }

  private:
    std::uint8_t *start_, *at_;
    std::uint64_t word_ = 0;
    unsigned used_ = 0;
};

// Reads zeros beyond the end; finish() reports them.
class BitReader {
  public:
    explicit BitReader(Bytes bytes) : bytes_(bytes) {}

    std::uint64_t peek() const {  // at least 57 bits
        const std::size_t at = bit_ / 8;
        std::uint64_t word = 0;
        if (at + 8 <= bytes_.size())
            word = load<std::uint64_t>(bytes_.data() + at);
        else if (at < bytes_.size())
            std::memcpy(&word, bytes_.data() + at, bytes_.size() - at);
        return word >> bit_ % 8;
    }
    void skip(unsigned bits) { bit_ += bits; }
    std::uint64_t get(unsigned bits) {  // at most 32
        const std::uint64_t value = peek() & ((std::uint64_t{1} << bits) - 1);
        skip(bits);
        return value;
    }
    void finish() const {
        check(ceil_div(bit_, 8) == bytes_.size() && (bit_ % 8 == 0 || bytes_.back() >> bit_ % 8 == 0),
              "chunk of changes has trailing or missing bits");
    }

  private:
    Bytes bytes_;
    std::size_t bit_ = 0;
};

void put_number(BitWriter& out, Mean& mean, std::uint32_t value) {
    const unsigned low = mean.low_bits(), quotient = value >> low;
    if (quotient < max_quotient) {
        const std::uint64_t rest = std::uint64_t{value & ((1u << low) - 1)} << 1;
        out.put(((std::uint64_t{1} << quotient) - 1) | rest << quotient, quotient + low + 1);
    } else {
        out.put_ones(max_quotient);
        out.put(value, gap_bits);
    }
    mean.add(value);
}

// Extract a number from the next bits; return how many it takes, at most 51.
unsigned take_number(std::uint64_t word, Mean& mean, std::uint32_t& value) {
    const unsigned low = mean.low_bits();
    const auto quotient = static_cast<unsigned>(std::countr_one(word));
    unsigned bits = quotient + 1 + low;
    value = quotient << low | (static_cast<std::uint32_t>(word >> (quotient + 1)) & ((1u << low) - 1));
    if (quotient >= max_quotient) [[unlikely]] {
        value = static_cast<std::uint32_t>(word >> max_quotient) & ((1u << gap_bits) - 1);
        bits = max_quotient + gap_bits;
    }
    mean.add(value);
    return bits;
}

void put_size(BitWriter& out, Width& width, std::uint32_t value) {
    const unsigned low = width.low_bits();
    const std::uint64_t high = (value >> low) + std::uint64_t{1};
    const auto more = static_cast<unsigned>(std::bit_width(high)) - 1;
    out.put_ones(more);
    out.put(0, 1);
    out.put(high - (std::uint64_t{1} << more), more);
    out.put(value & ((std::uint64_t{1} << low) - 1), low);
    width.add(value);
}

std::uint32_t get_size(BitReader& in, Width& width) {
    const unsigned low = width.low_bits();
    const auto more = static_cast<unsigned>(std::countr_one(in.peek()));
    check(more + low <= 32, "size of a change is out of range");
    in.skip(more + 1);
    const std::uint64_t high = in.get(more) + (std::uint64_t{1} << more) - 1;
    const auto value = static_cast<std::uint32_t>(high << low | in.get(low));
    width.add(value);
    return value;
}

struct Change {
    std::uint32_t gap, size;  // size: number of steps minus one
    bool inward;
};

void put_class(BitWriter& out, const SparseStart& start, const std::vector<Change>& changes,
               std::uint32_t rest) {
    Mean gaps{start.gap}, runs{start.run};
    Width widths{start.width};
    std::size_t run_end = 0;  // the next change of several steps
    bool has_run = false;
    for (std::size_t i = 0; i < changes.size(); ++i) {
        put_number(out, gaps, changes[i].gap);
        out.put(changes[i].inward, 1);
        if (!has_run) {
            for (run_end = i; run_end < changes.size() && changes[run_end].size == 0;) ++run_end;
            put_number(out, runs, static_cast<std::uint32_t>(run_end - i));
        }
        has_run = i < run_end;
        if (!has_run) put_size(out, widths, changes[i].size - 1);
    }
    put_number(out, gaps, rest);
}

// Write the positions of ones in ascending order, beginning at `at`; return the end. Also writes one beyond.
std::uint32_t* list_ones(std::uint64_t mask, std::uint32_t first, std::uint32_t* at) {
    std::uint32_t* const end = at + std::popcount(mask);
    *at = first + static_cast<std::uint32_t>(std::countr_zero(mask));  // without a branch: few have more
    for (++at; at < end; ++at) {
        mask &= mask - 1;
        *at = first + static_cast<std::uint32_t>(std::countr_zero(mask));
    }
    return end;
}

template <class Word>
std::size_t encode_words(const SparseModel& model, Bytes items, Bytes base, MutableBytes chunk) {
    const std::size_t count = items.size() / sizeof(Word), groups = ceil_div(count, group);
    const std::unique_ptr<std::uint64_t[]> changed(new std::uint64_t[groups]);
    std::uint64_t any = 0;
    for (std::size_t g = 0; g < count / group; ++g) {
        const std::size_t at = g * group * sizeof(Word);
        any |= changed[g] = compare_group<Word>(items.data() + at, base.data() + at);
    }
    if (count % group != 0) {
        std::uint64_t mask = 0;
        for (std::size_t i = count / group * group; i < count; ++i)
            mask |= std::uint64_t{load<Word>(items.data() + i * sizeof(Word)) !=
                                  load<Word>(base.data() + i * sizeof(Word))}
                    << i % group;
        any |= changed[groups - 1] = mask;
    }
    if (any == 0) return 0;
    const Classes<Word> classes(model, base);
    const std::unique_ptr<std::uint32_t[]> places(new std::uint32_t[count + 1]);
    BitWriter out(chunk);
    std::vector<Change> changes;
    for (unsigned c = 0; c < model.classes; ++c) {
        std::uint32_t* end = places.get();
        for (std::size_t g = 0; g < groups; ++g)
            end = list_ones(classes.members(c, g) & changed[g], static_cast<std::uint32_t>(g * group), end);
        changes.clear();
        std::uint32_t seen = 0, next = 0;  // members before the group, and members coded so far
        std::size_t g = 0;
        for (const std::uint32_t* place = places.get(); place < end; ++place) {
            for (; g < *place / group; ++g)
                seen += static_cast<std::uint32_t>(std::popcount(classes.members(c, g)));
            const std::uint64_t before = classes.members(c, g) & ((std::uint64_t{1} << *place % group) - 1);
            const std::uint32_t rank = seen + static_cast<std::uint32_t>(std::popcount(before));
            const std::size_t at = *place * sizeof(Word);
            const std::int64_t steps =
                steps_outward(load<Word>(base.data() + at), load<Word>(items.data() + at));
            const auto size = static_cast<std::uint32_t>((steps < 0 ? -steps : steps) - 1);
            changes.push_back({rank - next, size, steps < 0});
            next = rank + 1;
        }
        for (; g < groups; ++g) seen += static_cast<std::uint32_t>(std::popcount(classes.members(c, g)));
        if (seen != 0) put_class(out, model.start[c], changes, seen - next);
    }
    return out.finish();
}

template <class Word>
void decode_words(const SparseModel& model, Bytes chunk, Bytes base, MutableBytes items) {
    std::memcpy(items.data(), base.data(), base.size());
    if (chunk.empty()) return;
    const Classes<Word> classes(model, base);
    BitReader in(chunk);
    const std::size_t groups = classes.groups();
    // Changes of a class: a bit for each member, their steps, and where they are.
    const std::unique_ptr<std::uint64_t[]> ranks(new std::uint64_t[groups + 1]);
    const std::unique_ptr<std::int64_t[]> steps(new std::int64_t[classes.items() + 1]);
    const std::unique_ptr<std::uint32_t[]> places(new std::uint32_t[classes.items() + 1]);
    for (unsigned c = 0; c < model.classes; ++c) {
        const std::uint32_t count = classes.count(c);
        if (count == 0) continue;
        std::fill_n(ranks.get(), count / group + 2 < groups + 1 ? count / group + 2 : groups + 1,
                    std::uint64_t{0});
        const SparseStart& start = model.start[c];
        Mean gaps{start.gap}, runs{start.run};
        Width widths{start.width};
        bool has_run = false;
        std::uint32_t run = 0, rank = 0, gap;
        std::size_t changes = 0;
        while (true) {
            const std::uint64_t word = in.peek();
            const unsigned bits = take_number(word, gaps, gap);
            rank += gap;
            if (rank >= count) {
                in.skip(bits);
                break;
            }
            const bool inward = word >> bits & 1;
            in.skip(bits + 1);
            if (!has_run) in.skip(take_number(in.peek(), runs, run));
            has_run = run > 0;
            std::int64_t size = 1;
            if (!has_run) size = std::int64_t{get_size(in, widths)} + 2;
            run -= has_run;
            ranks[rank / group] |= std::uint64_t{1} << rank % group;
            steps[changes++] = inward ? -size : size;
            ++rank;
        }
        check(rank == count, "chunk of changes is longer than its items");
        if (changes == 0) continue;
        std::uint32_t* end = places.get();
        std::uint32_t seen = 0;
        for (std::size_t g = 0; g < groups; ++g) {
            const std::uint64_t members = classes.members(c, g);
            const std::uint64_t low = ranks[seen / group] >> seen % group;
            const std::uint64_t high = ranks[seen / group + 1] << 1 << (group - 1 - seen % group);
            end = list_ones(deposit(low | high, members), static_cast<std::uint32_t>(g * group), end);
            seen += static_cast<std::uint32_t>(std::popcount(members));
            if (seen == count) break;
        }
        for (std::size_t i = 0; i < changes; ++i) {
            const std::size_t at = places[i] * sizeof(Word);
            store(items.data() + at, walk_outward(load<Word>(base.data() + at), steps[i]));
        }
    }
    in.finish();
}

std::size_t encode(const SparseModel& model, Bytes items, Bytes base, std::size_t itemsize,
                   MutableBytes chunk) {
    return itemsize == 2 ? encode_words<std::uint16_t>(model, items, base, chunk)
                         : encode_words<std::uint32_t>(model, items, base, chunk);
}

void decode(const SparseModel& model, Bytes chunk, Bytes base, std::size_t itemsize, MutableBytes items) {
    itemsize == 2 ? decode_words<std::uint16_t>(model, chunk, base, items)
                  : decode_words<std::uint32_t>(model, chunk, base, items);
}

}  // namespace

constinit const SparseKernels sparse_kernels{encode, decode};

}  // namespace slimtensors::residual::SLIM_TARGET
