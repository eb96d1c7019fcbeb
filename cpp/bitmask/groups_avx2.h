// Groups of items for AVX2: a mask byte selects the shuffle of the eight items of its group.
#pragma once
#include <immintrin.h>

#include "bitmask/kernels.h"

namespace slimtensors::bitmask::SLIM_TARGET {
namespace {

// `rank` expands packed values: entry k is the number of ones below bit k, or has its top bit set if bit k is
// zero, for which shuffles produce zero. `place` is the inverse: entry r is the position of the r-th one. The
// `2` tables are the same for items of two units: (2r, 2r + 1).
struct Tables {
    alignas(64) std::uint8_t rank[256][8];
    alignas(64) std::uint8_t place[256][8];
    alignas(64) std::uint8_t rank2[256][16];
    alignas(64) std::uint8_t place2[256][16];

    constexpr Tables() : rank{}, place{}, rank2{}, place2{} {
        constexpr std::uint8_t none = 0x80;
        for (int mask = 0; mask < 256; ++mask) {
            int ones = 0;
            for (int k = 0; k < 8; ++k) place[mask][k] = place2[mask][2 * k] = place2[mask][2 * k + 1] = none;
            for (int k = 0; k < 8; ++k) {
                const bool kept = mask >> k & 1;
                rank[mask][k] = kept ? ones : none;
                rank2[mask][2 * k] = kept ? 2 * ones : none;
                rank2[mask][2 * k + 1] = kept ? 2 * ones + 1 : none;
                if (!kept) continue;
                place[mask][ones] = k;
                place2[mask][2 * ones] = 2 * k;
                place2[mask][2 * ones + 1] = 2 * k + 1;
                ++ones;
            }
        }
    }
};

constexpr Tables tables;

__m128i load8(const std::uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
__m128i load16(const std::uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
__m256i load32(const std::uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
void store8(std::uint8_t* to, __m128i v) { _mm_storel_epi64(reinterpret_cast<__m128i*>(to), v); }
void store16(std::uint8_t* to, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), v); }
void store32(std::uint8_t* to, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); }

std::size_t ones(unsigned mask) { return static_cast<std::size_t>(_mm_popcnt_u32(mask)); }

// Permute eight 32-bit units by eight byte indices; an index with its top bit set gives zero.
__m256i pick(__m256i units, const std::uint8_t* order) {
    const __m256i index = _mm256_cvtepi8_epi32(load8(order));
    return _mm256_andnot_si256(_mm256_srai_epi32(index, 31), _mm256_permutevar8x32_epi32(units, index));
}

struct Group1 {
    static constexpr std::size_t itemsize = 1;

    static std::uint32_t find4(const std::uint8_t* items) {
        return ~static_cast<std::uint32_t>(
            _mm256_movemask_epi8(_mm256_cmpeq_epi8(load32(items), _mm256_setzero_si256())));
    }
    static std::uint8_t find(const std::uint8_t* items) {
        return static_cast<std::uint8_t>(
            ~_mm_movemask_epi8(_mm_cmpeq_epi8(load8(items), _mm_setzero_si128())));
    }
    static std::uint8_t* gather(const std::uint8_t* items, std::uint8_t mask, std::uint8_t* to) {
        store8(to, _mm_shuffle_epi8(load8(items), load8(tables.place[mask])));
        return to + ones(mask);
    }
    static const std::uint8_t* scatter(std::uint8_t mask, const std::uint8_t* from, std::uint8_t* items) {
        store8(items, _mm_shuffle_epi8(load8(from), load8(tables.rank[mask])));
        return from + ones(mask);
    }
};

struct Group2 {
    static constexpr std::size_t itemsize = 2;

    static std::uint32_t find4(const std::uint8_t* items) {
        const __m256i zero = _mm256_setzero_si256();
        const __m256i low = _mm256_cmpeq_epi16(load32(items), zero);
        const __m256i high = _mm256_cmpeq_epi16(load32(items + 32), zero);
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
        return ~static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
    }
    static std::uint8_t find(const std::uint8_t* items) {
        const __m128i zero = _mm_setzero_si128();
        const __m128i equal = _mm_cmpeq_epi16(load16(items), zero);
        return static_cast<std::uint8_t>(~_mm_movemask_epi8(_mm_packs_epi16(equal, zero)));
    }
    static std::uint8_t* gather(const std::uint8_t* items, std::uint8_t mask, std::uint8_t* to) {
        store16(to, _mm_shuffle_epi8(load16(items), load16(tables.place2[mask])));
        return to + ones(mask) * itemsize;
    }
    static const std::uint8_t* scatter(std::uint8_t mask, const std::uint8_t* from, std::uint8_t* items) {
        store16(items, _mm_shuffle_epi8(load16(from), load16(tables.rank2[mask])));
        return from + ones(mask) * itemsize;
    }
};

struct Group4 {
    static constexpr std::size_t itemsize = 4;

    static std::uint8_t find(const std::uint8_t* items) {
        const __m256i equal = _mm256_cmpeq_epi32(load32(items), _mm256_setzero_si256());
        return static_cast<std::uint8_t>(~_mm256_movemask_ps(_mm256_castsi256_ps(equal)));
    }
    static std::uint8_t* gather(const std::uint8_t* items, std::uint8_t mask, std::uint8_t* to) {
        store32(to,
                _mm256_permutevar8x32_epi32(load32(items), _mm256_cvtepu8_epi32(load8(tables.place[mask]))));
        return to + ones(mask) * itemsize;
    }
    static const std::uint8_t* scatter(std::uint8_t mask, const std::uint8_t* from, std::uint8_t* items) {
        store32(items, pick(load32(from), tables.rank[mask]));
        return from + ones(mask) * itemsize;
    }
};

// Four items of two 32-bit units each fill a vector: a group is processed in two halves.
struct Group8 {
    static constexpr std::size_t itemsize = 8;

    static unsigned find_half(const std::uint8_t* items) {
        const __m256i equal = _mm256_cmpeq_epi64(load32(items), _mm256_setzero_si256());
        return ~static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(equal))) & 15u;
    }
    static std::uint8_t* gather_half(const std::uint8_t* items, unsigned mask, std::uint8_t* to) {
        store32(to,
                _mm256_permutevar8x32_epi32(load32(items), _mm256_cvtepu8_epi32(load8(tables.place2[mask]))));
        return to + ones(mask) * itemsize;
    }
    static const std::uint8_t* scatter_half(unsigned mask, const std::uint8_t* from, std::uint8_t* items) {
        store32(items, pick(load32(from), tables.rank2[mask]));
        return from + ones(mask) * itemsize;
    }

    static std::uint8_t find(const std::uint8_t* items) {
        return static_cast<std::uint8_t>(find_half(items) | find_half(items + 32) << 4);
    }
    static std::uint8_t* gather(const std::uint8_t* items, std::uint8_t mask, std::uint8_t* to) {
        return gather_half(items + 32, mask >> 4, gather_half(items, mask & 15u, to));
    }
    static const std::uint8_t* scatter(std::uint8_t mask, const std::uint8_t* from, std::uint8_t* items) {
        return scatter_half(mask >> 4, scatter_half(mask & 15u, from, items), items + 32);
    }
};

// Each item fills a vector, so there is nothing to shuffle.
struct Group16 {
    static constexpr std::size_t itemsize = 16;

    static std::uint8_t find(const std::uint8_t* items) {
        unsigned mask = 0;
        for (unsigned k = 0; k < group_items; ++k) {
            const __m128i item = load16(items + k * itemsize);
            mask |= unsigned{!_mm_testz_si128(item, item)} << k;
        }
        return static_cast<std::uint8_t>(mask);
    }
    static std::uint8_t* gather(const std::uint8_t* items, std::uint8_t mask, std::uint8_t* to) {
        for (unsigned k = 0; k < group_items; ++k) {
            store16(to, load16(items + k * itemsize));  // overwritten by the next item unless marked
            to += (mask >> k & 1u) * itemsize;
        }
        return to;
    }
    static const std::uint8_t* scatter(std::uint8_t mask, const std::uint8_t* from, std::uint8_t* items) {
        for (unsigned k = 0; k < group_items; ++k) {
            const unsigned bit = mask >> k & 1u;
            store16(items + k * itemsize,
                    _mm_and_si128(load16(from), _mm_set1_epi32(-static_cast<int>(bit))));
            from += bit * itemsize;
        }
        return from;
    }
};

}  // namespace
}  // namespace slimtensors::bitmask::SLIM_TARGET
