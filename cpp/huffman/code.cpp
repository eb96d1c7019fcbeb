#include "huffman/code.h"

#include <algorithm>

#include "core/check.h"

namespace slimtensors::huffman {
namespace {

constexpr std::uint8_t short_run = 13, long_run = 14;
constexpr std::size_t shortest_short = 2, shortest_long = 18;

class NibbleWriter {
  public:
    explicit NibbleWriter(std::uint8_t* to) : to_(to) {}
    void put(std::size_t nibble) {
        if (count_ % 2 == 0)
            to_[count_ / 2] = static_cast<std::uint8_t>(nibble);
        else
            to_[count_ / 2] = static_cast<std::uint8_t>(to_[count_ / 2] | nibble << 4);
        ++count_;
    }
    std::size_t bytes() const { return (count_ + 1) / 2; }

  private:
    std::uint8_t* to_;
    std::size_t count_ = 0;
};

class NibbleReader {
  public:
    explicit NibbleReader(Bytes from) : from_(from) {}
    std::size_t take() {
        check(count_ / 2 != from_.size(), "code table is truncated");
        const unsigned both = from_[count_ / 2];
        return count_++ % 2 == 0 ? both & 15u : both >> 4;
    }
    std::size_t bytes() const { return (count_ + 1) / 2; }
    bool ends_in_zero() const { return count_ % 2 == 0 || from_[count_ / 2] >> 4 == 0; }

  private:
    Bytes from_;
    std::size_t count_ = 0;
};

// The bytes that occur, rarest first. Count and byte are combined in one number to sort by both.
struct Leaves {
    std::array<std::uint64_t, 256> leaf;
    std::size_t count = 0;

    explicit Leaves(const ByteCounts& counts) {
        for (std::size_t byte = 0; byte < 256; ++byte)
            if (counts[byte] != 0) leaf[count++] = std::uint64_t{counts[byte]} << 8 | byte;
        std::sort(leaf.begin(), leaf.begin() + count);
    }
    std::uint64_t weight(std::size_t i) const { return leaf[i] >> 8; }
    std::size_t byte(std::size_t i) const { return leaf[i] & 255u; }
};

}  // namespace

// Huffman's algorithm with two queues, of bytes and of pairs, both by weight. Every pair adds one bit to all
// bytes below it.
std::uint64_t min_coded_bits(const ByteCounts& counts) {
    const Leaves leaves(counts);
    std::array<std::uint64_t, 256> pairs;
    std::size_t from_leaf = 0, from_pair = 0, pair_count = 0;
    const auto lightest = [&] {
        const bool take_leaf = from_pair == pair_count ||
                               (from_leaf < leaves.count && leaves.weight(from_leaf) <= pairs[from_pair]);
        return take_leaf ? leaves.weight(from_leaf++) : pairs[from_pair++];
    };
    std::uint64_t bits = 0;
    while (pair_count + 1 < leaves.count) {
        const std::uint64_t one = lightest();
        bits += pairs[pair_count] = one + lightest();
        ++pair_count;
    }
    return bits;
}

// Package-merge (Larmore and Hirschberg 1990). The list of a level contains the bytes and the pairs of the
// previous list, by weight. A byte's code length is the number of times it occurs, alone or within pairs, in
// the first 2 n - 2 entries of the last list. Only the number of bytes at the front of each list is needed.
CodeLengths best_code(const ByteCounts& counts, unsigned limit) {
    const Leaves leaves(counts);
    std::array<std::uint64_t, 512> list{}, pairs{};
    std::array<std::array<bool, 512>, max_length> is_leaf;
    std::size_t size = 0;
    for (unsigned level = 0; level < limit; ++level) {
        const std::size_t pair_count = size / 2;
        for (std::size_t i = 0; i < pair_count; ++i) pairs[i] = list[2 * i] + list[2 * i + 1];
        std::size_t from_leaf = 0, from_pair = 0;
        for (size = 0; size < leaves.count + pair_count; ++size) {
            const bool take_leaf = from_pair == pair_count ||
                                   (from_leaf < leaves.count && leaves.weight(from_leaf) <= pairs[from_pair]);
            is_leaf[level][size] = take_leaf;
            list[size] = take_leaf ? leaves.weight(from_leaf++) : pairs[from_pair++];
        }
    }

    CodeLengths lengths{};
    std::size_t taken = 2 * leaves.count - 2;
    for (unsigned level = limit; level-- > 0;) {
        std::size_t taken_leaves = 0;
        for (std::size_t i = 0; i < taken; ++i) taken_leaves += is_leaf[level][i];
        for (std::size_t i = 0; i < taken_leaves; ++i) ++lengths[leaves.byte(i)];
        taken = 2 * (taken - taken_leaves);
    }
    return lengths;
}

bool is_complete(const CodeLengths& lengths) {
    std::uint32_t used = 0;
    for (const std::uint8_t length : lengths) {
        if (length > max_length) return false;
        if (length != 0) used += 1u << (max_length - length);
    }
    return used == 1u << max_length;
}

std::uint64_t coded_bits(const ByteCounts& counts, const CodeLengths& lengths) {
    std::uint64_t bits = 0;
    for (std::size_t byte = 0; byte < 256; ++byte) bits += std::uint64_t{counts[byte]} * lengths[byte];
    return bits;
}

std::size_t pack_code(const CodeLengths& lengths, std::uint8_t* to) {
    NibbleWriter out(to);
    for (std::size_t i = 0; i < 256;) {
        std::size_t run = 0;
        while (i + run < 256 && lengths[i + run] == 0) ++run;
        if (run >= shortest_long) {
            out.put(long_run);
            out.put((run - shortest_long) % 16);
            out.put((run - shortest_long) / 16);
        } else if (run >= shortest_short) {
            out.put(short_run);
            out.put(run - shortest_short);
        } else {
            out.put(lengths[i]);
            run = 1;
        }
        i += run;
    }
    return out.bytes();
}

std::size_t unpack_code(Bytes from, CodeLengths& lengths) {
    NibbleReader in(from);
    lengths.fill(0);
    for (std::size_t i = 0; i < 256;) {
        const std::size_t nibble = in.take();
        if (nibble <= max_length) {
            lengths[i++] = static_cast<std::uint8_t>(nibble);
        } else if (nibble == short_run) {
            i += in.take() + shortest_short;
        } else if (nibble == long_run) {
            const std::size_t low = in.take();
            i += low + 16 * in.take() + shortest_long;
        } else {
            fail("code table has an invalid nibble");
        }
        check(i <= lengths.size(), "code table is too long");
    }
    check(in.ends_in_zero() && is_complete(lengths), "code table is not a complete code");
    return in.bytes();
}

std::array<std::uint16_t, 256> code_words(const CodeLengths& lengths) {
    std::array<unsigned, max_length + 2> next{};
    for (const std::uint8_t length : lengths) ++next[length + 1u];
    next[1] = 0;  // bytes without a code
    for (unsigned length = 1; length <= max_length; ++length)
        next[length + 1] = (next[length] + next[length + 1]) << 1;
    std::array<std::uint16_t, 256> words{};
    for (std::size_t byte = 0; byte < 256; ++byte)
        if (lengths[byte] != 0) words[byte] = static_cast<std::uint16_t>(next[lengths[byte]]++);
    return words;
}

}  // namespace slimtensors::huffman
