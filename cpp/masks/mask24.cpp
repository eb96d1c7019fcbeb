#include "masks/mask24.h"

#include <array>

#include "core/check.h"

namespace slimtensors::masks {
namespace {

constexpr unsigned patterns[6] = {0b0011, 0b0101, 0b0110, 0b1001, 0b1010, 0b1100};
constexpr std::uint8_t bad_code = 0xff;       // base 6 ends at 215
constexpr std::uint16_t bad_groups = 0xffff;  // three nibbles end at 0xfff

struct Filled {
    std::array<std::uint8_t, 256> byte{};
    std::array<bool, 256> overfull{};  // some nibble has three or four ones
};

consteval Filled make_filled() {
    Filled filled;
    for (unsigned byte = 0; byte < 256; ++byte) {
        unsigned out = byte;
        for (unsigned nibble = 0; nibble < 8; nibble += 4) {
            filled.overfull[byte] |= std::popcount(byte >> nibble & 15u) > 2;
            for (unsigned k = 0; k < 4 && std::popcount(out >> nibble & 15u) < 2; ++k)
                out |= 1u << (nibble + k);
        }
        filled.byte[byte] = static_cast<std::uint8_t>(out);
    }
    return filled;
}

consteval std::array<std::uint16_t, 256> make_groups() {
    std::array<std::uint16_t, 256> groups{};
    groups.fill(bad_groups);
    for (unsigned code = 0; code < 216; ++code)
        groups[code] = static_cast<std::uint16_t>(patterns[code % 6] | patterns[code / 6 % 6] << 4 |
                                                  patterns[code / 36] << 8);
    return groups;
}

constexpr Filled filled = make_filled();
constexpr std::array<std::uint16_t, 256> groups_of = make_groups();

consteval std::array<std::uint8_t, 4096> make_codes() {
    std::array<std::uint8_t, 4096> codes{};
    codes.fill(bad_code);
    for (unsigned code = 0; code < 216; ++code) codes[groups_of[code]] = static_cast<std::uint8_t>(code);
    return codes;
}

constexpr std::array<std::uint8_t, 4096> code_of = make_codes();
constexpr unsigned zero_digit = patterns[0];

// Checks sixteen groups at once; most 2:4 sparse weights need no filling.
bool has_two_everywhere(std::uint64_t word) {
    constexpr std::uint64_t pairs = 0x5555555555555555, nibbles = 0x3333333333333333,
                            two = 0x2222222222222222;
    word -= word >> 1 & pairs;
    return (word & nibbles) + (word >> 2 & nibbles) == two;
}

void check_sizes(std::size_t mask, std::size_t codes) {
    // 2 * mask could overflow
    check(codes == mask / 3 * 2 + mask % 3, "codes must have ceil(2 * mask bytes / 3) bytes");
}

}  // namespace

std::ptrdiff_t mask24_fill(MutableBytes mask) {
    for (std::size_t i = 0; i < mask.size(); ++i) {
        while (i + 8 <= mask.size() && has_two_everywhere(load<std::uint64_t>(mask.data() + i))) i += 8;
        if (i == mask.size()) break;
        const std::uint8_t byte = mask[i];
        if (filled.overfull[byte])
            return static_cast<std::ptrdiff_t>(2 * i + (std::popcount(byte & 15u) > 2 ? 0 : 1));
        mask[i] = filled.byte[byte];
    }
    return -1;
}

void mask24_pack(Bytes mask, MutableBytes codes) {
    check_sizes(mask.size(), codes.size());
    bool good = true;
    const auto put = [&](std::size_t at, unsigned groups) {
        codes[at] = code_of[groups];
        good &= codes[at] != bad_code;
    };
    std::size_t i = 0, c = 0;
    for (; i + 3 <= mask.size(); i += 3, c += 2) {
        put(c, mask[i] | (mask[i + 1] & 15u) << 8);
        put(c + 1, mask[i + 1] >> 4 | unsigned{mask[i + 2]} << 4);
    }
    if (mask.size() - i == 1) put(c, mask[i] | zero_digit << 8);
    if (mask.size() - i == 2) {
        put(c, mask[i] | (mask[i + 1] & 15u) << 8);
        put(c + 1, mask[i + 1] >> 4 | zero_digit << 4 | zero_digit << 8);
    }
    check(good, "mask has a group of four without exactly two ones");
}

void mask24_unpack(Bytes codes, MutableBytes mask) {
    check_sizes(mask.size(), codes.size());
    bool good = true;
    const auto get = [&](std::size_t at) {
        const unsigned groups = groups_of[codes[at]];
        good &= groups != bad_groups;
        return groups;
    };
    std::size_t i = 0, c = 0;
    for (; i + 3 <= mask.size(); i += 3, c += 2) {
        const unsigned low = get(c), high = get(c + 1);
        mask[i] = static_cast<std::uint8_t>(low);
        mask[i + 1] = static_cast<std::uint8_t>((low >> 8 & 15u) | high << 4);
        mask[i + 2] = static_cast<std::uint8_t>(high >> 4);
    }
    if (mask.size() - i == 1) {
        const unsigned low = get(c);
        mask[i] = static_cast<std::uint8_t>(low);
        good &= low >> 8 == zero_digit;
    }
    if (mask.size() - i == 2) {
        const unsigned low = get(c), high = get(c + 1);
        mask[i] = static_cast<std::uint8_t>(low);
        mask[i + 1] = static_cast<std::uint8_t>((low >> 8 & 15u) | high << 4);
        good &= high >> 4 == (zero_digit | zero_digit << 4);
    }
    check(good, "codes are not valid 2:4 masks");
}

}  // namespace slimtensors::masks
