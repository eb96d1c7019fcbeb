// Checks, rows and ends of the bit mask functions; the inner loops are in bitmask_kernels.h.
#include "bitmask/bitmask.h"

#include <stdexcept>

#include "bitmask/kernels.h"
#include "core/counting.h"
#include "core/dispatch.h"

namespace slimtensors {
namespace {

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }

const BitmaskKernels& kernels_for(std::size_t itemsize) {
#if defined(SLIMTENSORS_X86)
    if (cpu().avx2) return bitmask_kernels_avx2(itemsize);
#endif
    return bitmask_kernels_plain(itemsize);
}

// Where the rows lie. Made from checked sizes: nothing that uses it checks bounds again.
struct Layout {
    std::size_t rows, row, groups, itemsize;  // `groups` mask bytes per row

    Layout(std::size_t items_bytes, std::size_t itemsize_, std::size_t row_, std::size_t mask_bytes)
        : row(row_), itemsize(itemsize_) {
        if (!std::has_single_bit(itemsize) || itemsize > 16) refuse("itemsize must be 1, 2, 4, 8 or 16");
        if (row == 0) refuse("row must be at least 1");
        const std::size_t items = items_bytes / itemsize;
        if (items_bytes % itemsize != 0 || items % row != 0) refuse("items are not a whole number of rows");
        if (row % group_items == 0 && items != 0) row = items;  // no padding anywhere: one long row
        rows = items / row;
        groups = row / group_items + (row % group_items != 0);
        if (mask_bytes != rows * groups) refuse("mask must have ceil(row / 8) bytes for each row of items");
    }

    std::size_t mask_at(std::size_t r) const { return r * groups; }
    std::size_t item_at(std::size_t r) const { return r * row * itemsize; }
    std::size_t group_bytes() const { return group_items * itemsize; }
    std::size_t edge_items() const { return row - (groups - 1) * group_items; }  // in a row's last group

    // The last group of a padded row may run into the rows after it: reading there is harmless, and what is
    // written there is written again with the right bytes later. Only where `items` ends does it need care.
    bool has_edge(std::size_t r) const { return r * row + groups * group_items > rows * row; }
    std::size_t whole_groups(std::size_t r) const { return has_edge(r) ? groups - 1 : groups; }

    std::uint8_t row_end_bits() const {
        return static_cast<std::uint8_t>(0xff >> (group_items - edge_items()));
    }

    void check_padding(Bytes mask) const {
        if (row % group_items == 0) return;
        unsigned stray = 0;
        for (std::size_t r = 0; r < rows; ++r) stray |= mask[mask_at(r) + groups - 1] & ~row_end_bits();
        if (stray != 0) refuse("mask has ones in the bits that pad its rows");
    }

    void check_values(Bytes mask, std::size_t values_bytes) const {
        if (values_bytes % itemsize != 0 || popcount(mask) != values_bytes / itemsize)
            refuse("mask and values disagree: the mask must have a one for each value");
    }
};

constexpr std::size_t tail_items = 2 * packed_margin;

// Packed values on their way in. Kernels want `packed_margin` items ahead, so the last few are read from a
// copy with room behind it.
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
        if (done != groups) refuse("mask was changed while it was read");
    }

  private:
    void enter_tail() {
        std::memset(tail_, 0, tail_items * layout_.itemsize);
        if (next_ != end_) std::memcpy(tail_, next_, static_cast<std::size_t>(end_ - next_));
        next_ = tail_;
        end_ = tail_ + tail_items * layout_.itemsize;
        in_tail_ = true;
    }

    const BitmaskKernels& kernels_;
    const Layout& layout_;
    const std::uint8_t* next_;
    const std::uint8_t* end_;
    bool in_tail_ = false;
    alignas(64) std::uint8_t tail_[tail_items * 16];
};

// Packed values on their way out: the last few go through a buffer for the same reason.
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
        if (done != groups) refuse("mask was changed while it was read");
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

    const BitmaskKernels& kernels_;
    const Layout& layout_;
    std::uint8_t* next_;
    std::uint8_t* end_;
    bool in_tail_ = false;
    std::uint8_t* rest_ = nullptr;
    std::size_t rest_size_ = 0;
    alignas(64) std::uint8_t tail_[tail_items * 16];
};

}  // namespace

std::size_t bitmask_find(Bytes items, std::size_t itemsize, std::size_t row, MutableBytes mask) {
    const Layout layout(items.size(), itemsize, row, mask.size());
    const BitmaskKernels& kernels = kernels_for(itemsize);
    for (std::size_t r = 0; r < layout.rows; ++r) {
        const std::uint8_t* from = items.data() + layout.item_at(r);
        std::uint8_t* to = mask.data() + layout.mask_at(r);
        const std::size_t whole = layout.whole_groups(r);
        kernels.find(from, whole, to);
        if (layout.has_edge(r)) {
            std::uint8_t edge[group_items * 16] = {};
            std::memcpy(edge, from + whole * layout.group_bytes(), layout.edge_items() * itemsize);
            kernels.find(edge, 1, to + whole);
        }
        to[layout.groups - 1] &= layout.row_end_bits();
    }
    return popcount(mask);
}

void bitmask_gather(Bytes items, std::size_t itemsize, std::size_t row, Bytes mask, MutableBytes values) {
    const Layout layout(items.size(), itemsize, row, mask.size());
    layout.check_padding(mask);
    layout.check_values(mask, values.size());
    PackedSink sink(values, layout);
    for (std::size_t r = 0; r < layout.rows; ++r) {
        const std::uint8_t* from = items.data() + layout.item_at(r);
        const std::uint8_t* bits = mask.data() + layout.mask_at(r);
        const std::size_t whole = layout.whole_groups(r);
        sink.gather(from, bits, whole);
        if (layout.has_edge(r)) {
            std::uint8_t edge[group_items * 16] = {};
            std::memcpy(edge, from + whole * layout.group_bytes(), layout.edge_items() * itemsize);
            sink.gather(edge, bits + whole, 1);
        }
    }
    sink.finish();
}

void bitmask_scatter(Bytes mask, std::size_t row, Bytes values, std::size_t itemsize, MutableBytes items) {
    const Layout layout(items.size(), itemsize, row, mask.size());
    layout.check_padding(mask);
    layout.check_values(mask, values.size());
    PackedSource source(values, layout);
    for (std::size_t r = 0; r < layout.rows; ++r) {
        const std::uint8_t* bits = mask.data() + layout.mask_at(r);
        std::uint8_t* to = items.data() + layout.item_at(r);
        const std::size_t whole = layout.whole_groups(r);
        source.scatter(bits, whole, to);
        if (layout.has_edge(r)) {
            std::uint8_t edge[group_items * 16];
            source.scatter(bits + whole, 1, edge);
            std::memcpy(to + whole * layout.group_bytes(), edge, layout.edge_items() * itemsize);
        }
    }
}

}  // namespace slimtensors
