// Splitting items into byte planes and joining them: whole vectors first where there are vector loops, then
// item by item.
#include "core/planes.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace slimtensors::core::SLIM_TARGET {
namespace {

#if defined(__AVX2__)
constexpr std::size_t step = 32;  // items per iteration: one vector of each plane

__m256i load32(const std::uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
void store32(std::uint8_t* to, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); }

// Items of two, four and eight bytes. `part` isolates one byte of each and shifts it to the lowest position.
struct Items2 {
    static __m256i left(__m256i v) {
        return _mm256_or_si256(_mm256_slli_epi16(v, 1), _mm256_srli_epi16(v, 15));
    }
    static __m256i right(__m256i v) {
        return _mm256_or_si256(_mm256_srli_epi16(v, 1), _mm256_slli_epi16(v, 15));
    }
    static __m256i part(__m256i v, __m128i shift) {
        return _mm256_and_si256(_mm256_srl_epi16(v, shift), _mm256_set1_epi16(255));
    }
};
struct Items4 {
    static __m256i left(__m256i v) {
        return _mm256_or_si256(_mm256_slli_epi32(v, 1), _mm256_srli_epi32(v, 31));
    }
    static __m256i right(__m256i v) {
        return _mm256_or_si256(_mm256_srli_epi32(v, 1), _mm256_slli_epi32(v, 31));
    }
    static __m256i part(__m256i v, __m128i shift) {
        return _mm256_and_si256(_mm256_srl_epi32(v, shift), _mm256_set1_epi32(255));
    }
};
struct Items8 {
    static __m256i left(__m256i v) {
        return _mm256_or_si256(_mm256_slli_epi64(v, 1), _mm256_srli_epi64(v, 63));
    }
    static __m256i right(__m256i v) {
        return _mm256_or_si256(_mm256_srli_epi64(v, 1), _mm256_slli_epi64(v, 63));
    }
    static __m256i part(__m256i v, __m128i shift) {
        return _mm256_and_si256(_mm256_srl_epi64(v, shift), _mm256_set1_epi64x(255));
    }
};

// Packing works within 128-bit halves; these restore the order of 64-bit or 32-bit units.
__m256i order64(__m256i v) { return _mm256_permute4x64_epi64(v, 0xd8); }
__m256i order32(__m256i v) {
    return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

template <class Items, bool rotated>
__m256i part(const std::uint8_t* from, __m128i shift) {
    const __m256i v = load32(from);
    return Items::part(rotated ? Items::left(v) : v, shift);
}

template <bool rotated>
void take_vectors2(const std::uint8_t* items, std::size_t steps, __m128i shift, std::uint8_t* to) {
    for (std::size_t s = 0; s < steps; ++s, items += 2 * step, to += step)
        store32(to, order64(_mm256_packus_epi16(part<Items2, rotated>(items, shift),
                                                part<Items2, rotated>(items + 32, shift))));
}

template <bool rotated>
void take_vectors4(const std::uint8_t* items, std::size_t steps, __m128i shift, std::uint8_t* to) {
    for (std::size_t s = 0; s < steps; ++s, items += 4 * step, to += step) {
        const __m256i a = _mm256_packus_epi32(part<Items4, rotated>(items, shift),
                                              part<Items4, rotated>(items + 32, shift));
        const __m256i b = _mm256_packus_epi32(part<Items4, rotated>(items + 64, shift),
                                              part<Items4, rotated>(items + 96, shift));
        store32(to, order32(_mm256_packus_epi16(a, b)));
    }
}

template <bool rotated>
void take_vectors8(const std::uint8_t* items, std::size_t steps, __m128i shift, std::uint8_t* to) {
    // Eight vectors of four items, each shifted to its own byte of the 64-bit units: item 4 v + u becomes
    // byte v of unit u. Transposing the 4 x 8 bytes restores the order.
    const __m256i in_half = _mm256_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15, 0, 8, 1, 9,
                                             2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    for (std::size_t s = 0; s < steps; ++s, items += 8 * step, to += step) {
        __m256i all = part<Items8, rotated>(items, shift);
        for (int v = 1; v < 8; ++v)
            all =
                _mm256_or_si256(all, _mm256_slli_epi64(part<Items8, rotated>(items + 32 * v, shift), 8 * v));
        const __m256i pairs = _mm256_shuffle_epi8(all, in_half);
        const __m128i low = _mm256_castsi256_si128(pairs), high = _mm256_extracti128_si256(pairs, 1);
        store32(to, _mm256_set_m128i(_mm_unpackhi_epi16(low, high), _mm_unpacklo_epi16(low, high)));
    }
}

// Store two vectors whose halves contain alternating runs of items.
void store_halves(std::uint8_t* to, __m256i a, __m256i b) {
    __builtin_prefetch(to + 1024, 1);  // 10 % faster into uncached memory
    store32(to, _mm256_permute2x128_si256(a, b, 0x20));
    store32(to + 32, _mm256_permute2x128_si256(a, b, 0x31));
}

template <bool rotated>
void join_vectors2(const std::uint8_t* const* planes, std::size_t steps, std::uint8_t* items) {
    for (std::size_t s = 0; s < steps; ++s, items += 2 * step) {
        const __m256i low = load32(planes[0] + s * step), high = load32(planes[1] + s * step);
        __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
        if constexpr (rotated) a = Items2::right(a), b = Items2::right(b);
        store_halves(items, a, b);
    }
}

template <bool rotated>
void join_vectors4(const std::uint8_t* const* planes, std::size_t steps, std::uint8_t* items) {
    for (std::size_t s = 0; s < steps; ++s, items += 4 * step) {
        __m256i p[4];
        for (int j = 0; j < 4; ++j) p[j] = order64(load32(planes[j] + s * step));
        for (int half = 0; half < 2; ++half) {
            const __m256i low = half ? _mm256_unpackhi_epi8(p[0], p[1]) : _mm256_unpacklo_epi8(p[0], p[1]);
            const __m256i high = half ? _mm256_unpackhi_epi8(p[2], p[3]) : _mm256_unpacklo_epi8(p[2], p[3]);
            __m256i a = _mm256_unpacklo_epi16(low, high), b = _mm256_unpackhi_epi16(low, high);
            if constexpr (rotated) a = Items4::right(a), b = Items4::right(b);
            store_halves(items + 64 * half, a, b);
        }
    }
}

template <bool rotated>
void join_vectors8(const std::uint8_t* const* planes, std::size_t steps, std::uint8_t* items) {
    for (std::size_t s = 0; s < 2 * steps;
         ++s, items += 4 * step) {  // half a vector of each plane per iteration
        __m128i p[8];
        for (int j = 0; j < 8; ++j)
            p[j] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(planes[j] + s * step / 2));
        for (int half = 0; half < 2; ++half) {
            __m128i pair[4];
            for (int j = 0; j < 4; ++j)
                pair[j] = half ? _mm_unpackhi_epi8(p[2 * j], p[2 * j + 1])
                               : _mm_unpacklo_epi8(p[2 * j], p[2 * j + 1]);
            for (int quarter = 0; quarter < 2; ++quarter) {
                const __m128i low =
                    quarter ? _mm_unpackhi_epi16(pair[0], pair[1]) : _mm_unpacklo_epi16(pair[0], pair[1]);
                const __m128i high =
                    quarter ? _mm_unpackhi_epi16(pair[2], pair[3]) : _mm_unpacklo_epi16(pair[2], pair[3]);
                __m256i four = _mm256_set_m128i(_mm_unpackhi_epi32(low, high), _mm_unpacklo_epi32(low, high));
                if constexpr (rotated) four = Items8::right(four);
                store32(items + 64 * half + 32 * quarter, four);
            }
        }
    }
}

// Both return the number of items processed.
std::size_t take_vectors(const std::uint8_t* items, std::size_t count, ItemFormat format, std::size_t plane,
                         std::uint8_t* to) {
    const std::size_t steps = count / step;
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(8 * plane));
    switch (format.itemsize) {
        case 2:
            (format.rotated ? take_vectors2<true> : take_vectors2<false>)(items, steps, shift, to);
            break;
        case 4:
            (format.rotated ? take_vectors4<true> : take_vectors4<false>)(items, steps, shift, to);
            break;
        default:
            (format.rotated ? take_vectors8<true> : take_vectors8<false>)(items, steps, shift, to);
    }
    return steps * step;
}

std::size_t join_vectors(const std::uint8_t* const* planes, std::size_t count, ItemFormat format,
                         std::uint8_t* items) {
    const std::size_t steps = count / step;
    switch (format.itemsize) {
        case 2:
            (format.rotated ? join_vectors2<true> : join_vectors2<false>)(planes, steps, items);
            break;
        case 4:
            (format.rotated ? join_vectors4<true> : join_vectors4<false>)(planes, steps, items);
            break;
        default:
            (format.rotated ? join_vectors8<true> : join_vectors8<false>)(planes, steps, items);
    }
    return steps * step;
}
#else
std::size_t take_vectors(const std::uint8_t*, std::size_t, ItemFormat, std::size_t, std::uint8_t*) {
    return 0;
}
std::size_t join_vectors(const std::uint8_t* const*, std::size_t, ItemFormat, std::uint8_t*) { return 0; }
#endif

template <class Item>
void take_items(const std::uint8_t* items, std::size_t begin, std::size_t count, bool rotated,
                std::size_t plane, std::uint8_t* to) {
    for (std::size_t i = begin; i < count; ++i) {
        const Item item = load<Item>(items + i * sizeof(Item));
        to[i] = static_cast<std::uint8_t>(std::rotl(item, rotated) >> 8 * plane);
    }
}

template <class Item>
void join_items(const std::uint8_t* const* planes, std::size_t begin, std::size_t count, bool rotated,
                std::uint8_t* items) {
    for (std::size_t i = begin; i < count; ++i) {
        Item item = 0;
        for (std::size_t j = 0; j < sizeof(Item); ++j)
            item = static_cast<Item>(item | Item{planes[j][i]} << 8 * j);
        store(items + i * sizeof(Item), std::rotr(item, rotated));
    }
}

void take(const std::uint8_t* items, std::size_t count, ItemFormat format, std::size_t plane,
          std::uint8_t* to) {
    const std::size_t done = take_vectors(items, count, format, plane, to);
    switch (format.itemsize) {
        case 2:
            return take_items<std::uint16_t>(items, done, count, format.rotated, plane, to);
        case 4:
            return take_items<std::uint32_t>(items, done, count, format.rotated, plane, to);
        default:
            return take_items<std::uint64_t>(items, done, count, format.rotated, plane, to);
    }
}

void join(const std::uint8_t* const* planes, std::size_t count, ItemFormat format, std::uint8_t* items) {
    const std::size_t done = join_vectors(planes, count, format, items);
    switch (format.itemsize) {
        case 2:
            return join_items<std::uint16_t>(planes, done, count, format.rotated, items);
        case 4:
            return join_items<std::uint32_t>(planes, done, count, format.rotated, items);
        default:
            return join_items<std::uint64_t>(planes, done, count, format.rotated, items);
    }
}

}  // namespace

constinit const PlaneKernels plane_kernels{take, join};

}  // namespace slimtensors::core::SLIM_TARGET
