// Checks, rows and tails of the bit mask functions; the inner loops are in kernels.cpp.
#include "bitmask/bitmask.h"

#include "bitmask/kernels.h"
#include "core/check.h"
#include "core/counting.h"
#include "core/dispatch.h"

namespace slimtensors::bitmask {
namespace {

constexpr KernelTable<Kernels> table{.plain = &plain::kernels, .avx2 = SLIM_X86(&avx2::kernels)};

const ItemKernels& kernels_for(std::size_t itemsize) {
    return table.active().by_log2_itemsize[std::countr_zero(itemsize)];
}

// Offsets of rows. The constructor checks all sizes; nothing that uses it checks bounds again.
struct Layout {
    std::size_t rows, row, groups, itemsize;  // `groups` mask bytes per row

    Layout(std::size_t items_bytes, std::size_t itemsize_, std::size_t row_, std::size_t mask_bytes)
        : row(row_), itemsize(itemsize_) {
        check(std::has_single_bit(itemsize) && itemsize <= 16, "itemsize must be 1, 2, 4, 8 or 16");
        check(row != 0, "row must be at least 1");
        const std::size_t items = items_bytes / itemsize;
        check(items_bytes % itemsize == 0 && items % row == 0, "items are not a whole number of rows");
        if (row % group_items == 0 && items != 0) row = items;  // no padding: a single row
        rows = items / row;
        groups = ceil_div(row, group_items);
        check(mask_bytes == rows * groups, "mask must have ceil(row / 8) bytes for each row of items");
    }

    std::size_t mask_at(std::size_t r) const { return r * groups; }
    std::size_t item_at(std::size_t r) const { return r * row * itemsize; }
    std::size_t group_bytes() const { return group_items * itemsize; }
    std::size_t edge_items() const { return row - (groups - 1) * group_items; }  // in a row's last group

    // The last group of a padded row may extend into the next rows: reading there is harmless, and bytes
    // written there are overwritten later. Only the end of `items` needs a separate buffer.
    bool has_edge(std::size_t r) const { return r * row + groups * group_items > rows * row; }
    std::size_t full_groups(std::size_t r) const { return has_edge(r) ? groups - 1 : groups; }

    std::uint8_t row_end_bits() const {
        return static_cast<std::uint8_t>(0xff >> (group_items - edge_items()));
    }

    void check_padding(Bytes mask) const {
        if (row % group_items == 0) return;
        unsigned stray = 0;
        for (std::size_t r = 0; r < rows; ++r) stray |= mask[mask_at(r) + groups - 1] & ~row_end_bits();
        check(stray == 0, "mask has ones in the bits that pad its rows");
    }

    void check_values(Bytes mask, std::size_t values_bytes) const {
        check(values_bytes % itemsize == 0 && popcount(mask) == values_bytes / itemsize,
              "mask must have exactly one bit set for each value");
    }
};

constexpr std::size_t tail_items = 2 * packed_margin;

// Reads packed values. Kernels need `packed_margin` items of lookahead, so the last few values are read from
// a padded copy.
class PackedSource {
  public:
    PackedSource(Bytes values, const Layout& layout)
        : kernels_(kernels_for(layout.itemsize)),
          layout_(layout),
          next_(values.data()),
          end_(next_ + values.size()) {}

    void scatter(const std::uint8_t* mask, std::size_t groups, std::uint8_t* items) {
        std::size_t done = kernels_.scatter(mask, groups, next_, end_, items);
        if (done == groups) return;
        if (!in_tail_) {
            enter_tail();
            done += kernels_.scatter(mask + done, groups - done, next_, end_,
                                     items + done * layout_.group_bytes());
        }
        check(done == groups, "mask was modified during the call");
    }

  private:
    void enter_tail() {
        std::memset(tail_, 0, tail_items * layout_.itemsize);
        if (next_ != end_) std::memcpy(tail_, next_, static_cast<std::size_t>(end_ - next_));
        next_ = tail_;
        end_ = tail_ + tail_items * layout_.itemsize;
        in_tail_ = true;
    }

    const ItemKernels& kernels_;
    const Layout& layout_;
    const std::uint8_t* next_;
    const std::uint8_t* end_;
    bool in_tail_ = false;
    alignas(64) std::uint8_t tail_[tail_items * 16];
};

// Writes packed values; the last few go through a buffer for the same reason.
class PackedSink {
  public:
    PackedSink(MutableBytes values, const Layout& layout)
        : kernels_(kernels_for(layout.itemsize)),
          layout_(layout),
          next_(values.data()),
          end_(next_ + values.size()) {}

    void gather(const std::uint8_t* items, const std::uint8_t* mask, std::size_t groups) {
        std::size_t done = kernels_.gather(items, mask, groups, next_, end_);
        if (done == groups) return;
        if (!in_tail_) {
            enter_tail();
            done += kernels_.gather(items + done * layout_.group_bytes(), mask + done, groups - done, next_,
                                    end_);
        }
        check(done == groups, "mask was modified during the call");
    }

    void finish() {
        if (rest_size_ != 0) std::memcpy(rest_, tail_, rest_size_);
    }

  private:
    void enter_tail() {
        rest_ = next_;
        rest_size_ = static_cast<std::size_t>(end_ - next_);
        next_ = tail_;
        end_ = tail_ + tail_items * layout_.itemsize;
        in_tail_ = true;
    }

    const ItemKernels& kernels_;
    const Layout& layout_;
    std::uint8_t* next_;
    std::uint8_t* end_;
    bool in_tail_ = false;
    std::uint8_t* rest_ = nullptr;
    std::size_t rest_size_ = 0;
    alignas(64) std::uint8_t tail_[tail_items * 16];
};

}  // namespace

std::size_t find(Bytes items, std::size_t itemsize, std::size_t row, MutableBytes mask) {
    const Layout layout(items.size(), itemsize, row, mask.size());
    const ItemKernels& kernels = kernels_for(itemsize);
    for (std::size_t r = 0; r < layout.rows; ++r) {
        const std::uint8_t* from = items.data() + layout.item_at(r);
        std::uint8_t* to = mask.data() + layout.mask_at(r);
        const std::size_t full = layout.full_groups(r);
        kernels.find(from, full, to);
        if (layout.has_edge(r)) {
            std::uint8_t edge[group_items * 16] = {};
            std::memcpy(edge, from + full * layout.group_bytes(), layout.edge_items() * itemsize);
            kernels.find(edge, 1, to + full);
        }
        to[layout.groups - 1] &= layout.row_end_bits();
    }
    return popcount(mask);
}

void gather(Bytes items, std::size_t itemsize, std::size_t row, Bytes mask, MutableBytes values) {
    const Layout layout(items.size(), itemsize, row, mask.size());
    layout.check_padding(mask);
    layout.check_values(mask, values.size());
    PackedSink sink(values, layout);
    for (std::size_t r = 0; r < layout.rows; ++r) {
        const std::uint8_t* from = items.data() + layout.item_at(r);
        const std::uint8_t* bits = mask.data() + layout.mask_at(r);
        const std::size_t full = layout.full_groups(r);
        sink.gather(from, bits, full);
        if (layout.has_edge(r)) {
            std::uint8_t edge[group_items * 16] = {};
            std::memcpy(edge, from + full * layout.group_bytes(), layout.edge_items() * itemsize);
            sink.gather(edge, bits + full, 1);
        }
    }
    sink.finish();
}

void scatter(Bytes mask, std::size_t row, Bytes values, std::size_t itemsize, MutableBytes items) {
    const Layout layout(items.size(), itemsize, row, mask.size());
    layout.check_padding(mask);
    layout.check_values(mask, values.size());
    PackedSource source(values, layout);
    for (std::size_t r = 0; r < layout.rows; ++r) {
        const std::uint8_t* bits = mask.data() + layout.mask_at(r);
        std::uint8_t* to = items.data() + layout.item_at(r);
        const std::size_t full = layout.full_groups(r);
        source.scatter(bits, full, to);
        if (layout.has_edge(r)) {
            std::uint8_t edge[group_items * 16];
            source.scatter(bits + full, 1, edge);
            std::memcpy(to + full * layout.group_bytes(), edge, layout.edge_items() * itemsize);
        }
    }
}

}  // namespace slimtensors::bitmask
