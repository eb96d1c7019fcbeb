#include "huffman/streams.h"

namespace slimtensors::huffman {
namespace {

constexpr KernelTable<Kernels> table{.plain = &plain::kernels, .avx2 = SLIM_X86(&avx2::kernels)};

constexpr std::size_t max_bytes_in_pairs = 64;

}  // namespace

const Kernels& active_kernels() { return table.active(); }

void build_encode_table(const CodeLengths& lengths, EncodeTable& table) {
    const std::array<std::uint16_t, 256> words = code_words(lengths);
    std::array<std::uint8_t, 256> used;
    std::size_t count = 0;
    for (std::size_t byte = 0; byte < 256; ++byte) {
        table.singles[byte] = 0;
        if (lengths[byte] == 0) continue;
        table.singles[byte] = std::uint64_t{words[byte]} << (64 - lengths[byte]) | lengths[byte];
        used[count++] = static_cast<std::uint8_t>(byte);
    }
    table.has_pairs = count <= max_bytes_in_pairs;
    if (!table.has_pairs) return;
    for (std::size_t j = 0; j < count; ++j)
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t first = used[i], second = used[j];
            const unsigned length = lengths[first] + lengths[second];
            table.pairs[first | second << 8] = std::uint64_t{words[first]} << (64 - length) |
                                               std::uint64_t{words[second]} << (64 - lengths[second]) |
                                               length;
        }
}

}  // namespace slimtensors::huffman
