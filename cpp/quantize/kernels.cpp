// The inner loops of quantization, the same source for every instruction set.
#include "quantize/kernels.h"

#include <limits>
#include <type_traits>

#if defined(__BMI2__)
#include <immintrin.h>
#endif

namespace slimtensors::quantize::SLIM_TARGET {
namespace {

template <class Float>
bool load_all(const std::uint8_t* items, std::size_t count, float* to) {
    using Bits = typename Float::Bits;
    Bits not_finite = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const Bits bits = load<Bits>(items + i * sizeof(Bits));
        not_finite |= static_cast<Bits>((bits & Float::infinity) == Float::infinity);
        to[i] = Float::value(bits);
    }
    return not_finite == 0;
}

template <class Float>
void store_all(const float* from, std::size_t count, std::uint8_t* items) {
    using Bits = typename Float::Bits;
    for (std::size_t i = 0; i < count; ++i) store(items + i * sizeof(Bits), Float::nearest(from[i]));
}

template <class Float>
void divide(float* x, std::size_t count, float scale, float zero) {
    const float minus = 0.0f - zero;  // 0.0 for 0.0, so that zeros keep their sign
    for (std::size_t i = 0; i < count; ++i) x[i] = Float::round(Float::round(x[i] / scale) - minus);
}

void multiply(float* x, std::size_t count, float scale, float zero) {
    for (std::size_t i = 0; i < count; ++i) x[i] = (x[i] - zero) * scale;
}

template <class Float>
void tabulate(const float* numbers, float scale, float zero, std::uint16_t* table) {
    for (std::size_t i = 0; i < 16; ++i) table[i] = Float::nearest((numbers[i] - zero) * scale);
}

void to_ints(const float* x, std::size_t count, float min, float max, std::uint8_t* codes) {
    constexpr float magic = 0x1.8p23f;  // adding it rounds to an integer in the low bits
    for (std::size_t i = 0; i < count; ++i) {
        const float above = x[i] > min ? x[i] : min;  // in this order, NaN becomes `min`
        codes[i] = static_cast<std::uint8_t>(to_bits((above < max ? above : max) + magic));
    }
}

void to_fp4(const float* x, std::size_t count, std::uint8_t* codes) {
    for (std::size_t i = 0; i < count; ++i) codes[i] = E2M1::nearest(x[i]);
}

void to_fp8(const float* x, std::size_t count, std::uint8_t* codes) {
    for (std::size_t i = 0; i < count; ++i) {
        const float above = x[i] > -448.0f ? x[i] : -448.0f;
        codes[i] = E4M3::nearest(above < 448.0f ? above : 448.0f);
    }
}

void from_ints(const std::uint8_t* codes, std::size_t count, float* x) {
    for (std::size_t i = 0; i < count; ++i) x[i] = static_cast<float>(static_cast<std::int8_t>(codes[i]));
}

void from_fp4(const std::uint8_t* codes, std::size_t count, float* x) {
    for (std::size_t i = 0; i < count; ++i) x[i] = E2M1::value(codes[i]);
}

void from_fp8(const std::uint8_t* codes, std::size_t count, float* x) {
    for (std::size_t i = 0; i < count; ++i) x[i] = E4M3::value(codes[i]);
}

// Floats compare as integers once the magnitude bits of negative ones are inverted.
template <class Float>
void range(const std::uint8_t* items, std::size_t count, std::uint8_t* low, std::uint8_t* high) {
    using Bits = typename Float::Bits;
    using Order = std::make_signed_t<Bits>;
    constexpr Order top = std::numeric_limits<Order>::max();
    const auto ordered = [](Order bits) { return static_cast<Order>(bits ^ (bits < 0 ? top : 0)); };
    Order min = top, max = static_cast<Order>(~top);
    for (std::size_t i = 0; i < count; ++i) {
        const Order item = ordered(load<Order>(items + i * sizeof(Order)));
        min = item < min ? item : min;
        max = item > max ? item : max;
    }
    store(low, ordered(min));
    store(high, ordered(max));
}

// Eight codes are packed into `bits` bytes.

constexpr std::uint64_t repeat_byte(std::uint8_t byte) { return 0x0101010101010101u * byte; }

template <unsigned bits>
std::uint64_t pack_word(std::uint64_t codes) {
    constexpr std::uint8_t mask = (1u << bits) - 1;
#if defined(__BMI2__)
    return _pext_u64(codes, repeat_byte(mask));
#else
    std::uint64_t stream = 0;
    for (unsigned k = 0; k < 8; ++k) stream |= (codes >> 8 * k & mask) << bits * k;
    return stream;
#endif
}

template <unsigned bits>
std::uint64_t unpack_word(std::uint64_t stream) {
    constexpr std::uint8_t mask = (1u << bits) - 1;
#if defined(__BMI2__)
    return _pdep_u64(stream, repeat_byte(mask));
#else
    std::uint64_t codes = 0;
    for (unsigned k = 0; k < 8; ++k) codes |= (stream >> bits * k & mask) << 8 * k;
    return codes;
#endif
}

// Vector loops for codes of four bits, the most common size. They return the number of codes done.

#if defined(__AVX2__)
std::size_t pack_nibbles(const std::uint8_t* codes, std::size_t count, std::uint8_t offset,
                         std::uint8_t* to) {
    const __m256i offsets = _mm256_set1_epi8(static_cast<char>(offset)), low = _mm256_set1_epi8(15);
    const __m256i weights = _mm256_set1_epi16(0x1001);
    const auto pairs = [&](const std::uint8_t* at) {
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        return _mm256_maddubs_epi16(_mm256_and_si256(_mm256_xor_si256(raw, offsets), low), weights);
    };
    std::size_t i = 0;
    for (; i + 64 <= count; i += 64) {
        const __m256i both = _mm256_packus_epi16(pairs(codes + i), pairs(codes + i + 32));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i / 2), _mm256_permute4x64_epi64(both, 0xd8));
    }
    return i;
}

std::size_t unpack_nibbles(const std::uint8_t* from, std::size_t count, std::uint8_t offset,
                           std::uint8_t* codes) {
    const __m256i offsets = _mm256_set1_epi8(static_cast<char>(offset)), low = _mm256_set1_epi8(15);
    std::size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i / 2));
        const __m256i wide = _mm256_cvtepu8_epi16(raw);
        const __m256i nibbles = _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), _mm256_sub_epi8(nibbles, offsets));
    }
    return i;
}

template <class Write>
std::size_t look_up_with(Write write, const std::uint8_t* from, std::size_t count, const std::uint16_t* table,
                         std::uint8_t* items) {
    const auto both_halves = [](__m128i v) { return _mm256_broadcastsi128_si256(v); };
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 8));
    const __m128i byte = _mm_set1_epi16(255);
    const __m256i lows =
        both_halves(_mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte)));
    const __m256i highs = both_halves(_mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8)));
    const __m256i low = _mm256_set1_epi8(15);
    std::size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i / 2));
        const __m256i wide = _mm256_cvtepu8_epi16(raw);
        const __m256i nibbles = _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), low);
        const __m256i l = _mm256_shuffle_epi8(lows, nibbles), h = _mm256_shuffle_epi8(highs, nibbles);
        const __m256i a = _mm256_unpacklo_epi8(l, h), b = _mm256_unpackhi_epi8(l, h);
        write(items + 2 * i, _mm256_permute2x128_si256(a, b, 0x20));
        write(items + 2 * i + 32, _mm256_permute2x128_si256(a, b, 0x31));
    }
    return i;
}

std::size_t look_up_vectors(const std::uint8_t* from, std::size_t count, const std::uint16_t* table,
                            std::uint8_t* items, bool non_temporal) {
    if (!non_temporal || reinterpret_cast<std::uintptr_t>(items) % 32 != 0) {
        const auto write = [](std::uint8_t* to, __m256i v) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v);
        };
        return look_up_with(write, from, count, table, items);
    }
    const auto write = [](std::uint8_t* to, __m256i v) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), v);
    };
    return look_up_with(write, from, count, table, items);
}

void fence() { _mm_sfence(); }
#else
void fence() {}
std::size_t pack_nibbles(const std::uint8_t*, std::size_t, std::uint8_t, std::uint8_t*) { return 0; }
std::size_t unpack_nibbles(const std::uint8_t*, std::size_t, std::uint8_t, std::uint8_t*) { return 0; }
std::size_t look_up_vectors(const std::uint8_t*, std::size_t, const std::uint16_t*, std::uint8_t*, bool) {
    return 0;
}
#endif

template <unsigned bits>
void pack(const std::uint8_t* codes, std::size_t count, std::uint8_t offset, std::uint8_t* to) {
    const std::uint64_t offsets = repeat_byte(offset);
    std::size_t i = 0;
    if constexpr (bits == 4) i = pack_nibbles(codes, count, offset, to);
    for (to += i / 8 * bits; i + 8 <= count; i += 8, to += bits) {
        const std::uint64_t stream = pack_word<bits>(load<std::uint64_t>(codes + i) ^ offsets);
        std::memcpy(to, &stream, bits);
    }
    if (i == count) return;
    std::uint64_t last = offsets;  // padding becomes zero
    std::memcpy(&last, codes + i, count - i);
    const std::uint64_t stream = pack_word<bits>(last ^ offsets);
    std::memcpy(to, &stream, ((count - i) * bits + 7) / 8);
}

// Subtract `by` from each byte, without borrowing across bytes.
std::uint64_t subtract_bytes(std::uint64_t bytes, std::uint8_t by) {
    constexpr std::uint64_t tops = repeat_byte(0x80);
    const std::uint64_t other = repeat_byte(by);
    return ((bytes | tops) - (other & ~tops)) ^ ((bytes ^ ~other) & tops);
}

template <unsigned bits>
void unpack(const std::uint8_t* from, std::size_t count, std::uint8_t offset, std::uint8_t* codes) {
    std::size_t i = 0;
    if constexpr (bits == 4) i = unpack_nibbles(from, count, offset, codes);
    from += i / 8 * bits;
    for (; i + 8 <= count && (count - i) * bits >= 64; i += 8, from += bits)  // a full word is readable
        store(codes + i, subtract_bytes(unpack_word<bits>(load<std::uint64_t>(from)), offset));
    for (; i + 8 <= count; i += 8, from += bits) {
        std::uint64_t stream = 0;
        std::memcpy(&stream, from, bits);
        store(codes + i, subtract_bytes(unpack_word<bits>(stream), offset));
    }
    if (i == count) return;
    std::uint64_t stream = 0;
    std::memcpy(&stream, from, ((count - i) * bits + 7) / 8);
    const std::uint64_t last = subtract_bytes(unpack_word<bits>(stream), offset);
    std::memcpy(codes + i, &last, count - i);
}

void look_up(const std::uint8_t* from, std::size_t count, const std::uint16_t* table, std::uint8_t* items,
             bool non_temporal) {
    for (std::size_t i = look_up_vectors(from, count, table, items, non_temporal); i < count; ++i)
        store(items + 2 * i, table[from[i / 2] >> 4 * (i % 2) & 15]);
}

template <class Float>
constexpr std::size_t float_size = sizeof(typename Float::Bits);

template <class Float>
double item_value(const std::uint8_t* items, std::size_t i) {
    return Float::value(load<typename Float::Bits>(items + i * float_size<Float>));
}

double square(double x) { return x * x; }

template <class Work>
void with_float_type(FloatType type, Work work) {
    if (type == FloatType::f32)
        work(F32{});
    else if (type == FloatType::f16)
        work(F16{});
    else
        work(BF16{});
}

template <class Item>
void sum_squares(std::size_t count, SquareLanes& sums, Item item) {
    constexpr std::size_t lanes = std::tuple_size_v<SquareLanes>;
    SquareLanes own = sums;  // a local copy, so that it stays in registers
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes)
        for (std::size_t k = 0; k < lanes; ++k) own[k] += square(item(i + k));
    for (std::size_t k = 0; i + k < count; ++k) own[k] += square(item(i + k));
    sums = own;
}

void add_squares(Bytes items, FloatType type, SquareLanes& sums) {
    const std::uint8_t* const at = items.data();
    with_float_type(type, [&](auto number) {
        using Float = decltype(number);
        sum_squares(items.size() / float_size<Float>, sums,
                    [at](std::size_t i) { return item_value<Float>(at, i); });
    });
}

void add_squared_differences(Bytes items, Bytes others, FloatType type, SquareLanes& sums) {
    const std::uint8_t *const a = items.data(), *const b = others.data();
    with_float_type(type, [&](auto number) {
        using Float = decltype(number);
        sum_squares(items.size() / float_size<Float>, sums,
                    [a, b](std::size_t i) { return item_value<Float>(a, i) - item_value<Float>(b, i); });
    });
}

}  // namespace

constinit const Kernels kernels{
    {load_all<F32>, load_all<F16>, load_all<BF16>},
    {store_all<F32>, store_all<F16>, store_all<BF16>},
    {divide<F32>, divide<F16>, divide<BF16>},
    multiply,
    to_ints,
    to_fp4,
    to_fp8,
    from_ints,
    from_fp4,
    from_fp8,
    {nullptr, pack<1>, pack<2>, pack<3>, pack<4>, pack<5>, pack<6>, pack<7>, pack<8>},
    {nullptr, unpack<1>, unpack<2>, unpack<3>, unpack<4>, unpack<5>, unpack<6>, unpack<7>, unpack<8>},
    {nullptr, tabulate<F16>, tabulate<BF16>},
    look_up,
    fence,
    {range<F32>, range<F16>, range<BF16>},
    add_squares,
    add_squared_differences,
};

}  // namespace slimtensors::quantize::SLIM_TARGET
