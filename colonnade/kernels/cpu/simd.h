// Vectors of LANES floats or UNIT bytes: AVX-512 with VNNI, AVX2 with FMA, or portable ones of 4 floats (e.g. NEON).
//
// All three have the same functions: loads of float32 and bfloat16, fused multiply-add, sums, and products of int8 and
// int4 values.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)

constexpr int LANES = 16;
using Floats = __m512;
using Ints = __m512i;
using Bytes = __m512i;

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline Bytes low_nibbles(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes b) { return low_nibbles(_mm512_srli_epi16(b, 4)); }
// Each lane is the sum of four products of signed bytes. The instruction needs w unsigned, so it gets w + 128.
inline Ints dot(Bytes w, Bytes x) {
    const Ints lift = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(-128), x);
    const Ints start = _mm512_sub_epi32(_mm512_setzero_si512(), lift);
    return _mm512_dpbusd_epi32(start, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), x);
}
inline Ints dot_nibbles(Bytes low, Bytes high, Bytes x_low, Bytes x_high) {
    return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), low, x_low), high, x_high);
}
// The sum of each vector. Adjacent vectors are interleaved and added, until each lane has the sum of one.
inline Floats sums_of(const Floats* x) {
    Floats fours[4];
    for (int i = 0; i < 4; i++) {
        const Floats ab = _mm512_add_ps(_mm512_unpacklo_ps(x[4 * i], x[4 * i + 1]), _mm512_unpackhi_ps(x[4 * i], x[4 * i + 1]));
        const Floats cd =
            _mm512_add_ps(_mm512_unpacklo_ps(x[4 * i + 2], x[4 * i + 3]), _mm512_unpackhi_ps(x[4 * i + 2], x[4 * i + 3]));
        const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    }
    const auto halves = [](Floats a, Floats b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    return halves(halves(fours[0], fours[1]), halves(fours[2], fours[3]));
}
inline Floats select(Floats x, const int32_t* lanes) { return _mm512_permutexvar_ps(_mm512_loadu_si512(lanes), x); }
// Pairs (s, m) of bfloat16: s is the low half of each word.
inline Floats low_halves(Bytes x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline Floats high_halves(Bytes x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-65536))); }

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int LANES = 8;
using Floats = __m256;
using Ints = __m256i;
using Bytes = __m256i;

inline Bytes load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats broadcast(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline Floats load(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(Floats x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Bytes low_nibbles(Bytes b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes b) { return low_nibbles(_mm256_srli_epi16(b, 4)); }
// Each lane is the sum of four products of signed bytes. The instruction needs one factor unsigned: |w|, with the sign
// moved to x. Two products are at most 2 · 128 · 127, which fits 16 bits.
inline Ints dot(Bytes w, Bytes x) {
    const Ints pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline Ints dot_nibbles(Bytes low, Bytes high, Bytes x_low, Bytes x_high) {
    const Ints pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, x_low), _mm256_maddubs_epi16(high, x_high));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline Floats sums_of(const Floats* x) {  // as with AVX-512
    Floats fours[2];
    for (int i = 0; i < 2; i++) {
        const Floats ab = _mm256_hadd_ps(x[4 * i], x[4 * i + 1]), cd = _mm256_hadd_ps(x[4 * i + 2], x[4 * i + 3]);
        fours[i] = _mm256_hadd_ps(ab, cd);
    }
    return _mm256_add_ps(
        _mm256_permute2f128_ps(fours[0], fours[1], 0x20), _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
}
inline Floats select(Floats x, const int32_t* lanes) { return _mm256_permutevar8x32_ps(x, load_bytes(lanes)); }
inline Floats low_halves(Bytes x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline Floats high_halves(Bytes x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-65536))); }

#else

constexpr int LANES = 4;
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef int8_t Bytes __attribute__((vector_size(16)));

template <typename V> inline V load_vector(const void* p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline Bytes load_bytes(const void* p) { return load_vector<Bytes>(p); }
inline Floats zero() { return Floats{}; }
inline Floats broadcast(float x) { return Floats{x, x, x, x}; }
inline Floats load(const float* p) { return load_vector<Floats>(p); }
inline Floats load(const uint16_t* p) {
    Floats x;
    for (int i = 0; i < LANES; i++) {
        const uint32_t bits = uint32_t(p[i]) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        x[i] = value;
    }
    return x;
}
inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
inline Floats multiply(Floats a, Floats b) { return a * b; }
inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
inline float sum(Floats x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats to_floats(Ints x) { return Floats{float(x[0]), float(x[1]), float(x[2]), float(x[3])}; }
inline Bytes low_nibbles(Bytes b) { return b & 15; }
inline Bytes high_nibbles(Bytes b) { return (b >> 4) & 15; }
inline Ints dot(Bytes w, Bytes x) {
    // Products of the four bytes of each lane, which shifts of 32-bit lanes bring to their lowest byte one by one.
    const Ints a = load_vector<Ints>(&w), b = load_vector<Ints>(&x);
    return (a >> 24) * (b >> 24) + ((a << 8) >> 24) * ((b << 8) >> 24) + ((a << 16) >> 24) * ((b << 16) >> 24) +
           ((a << 24) >> 24) * ((b << 24) >> 24);
}
inline Ints dot_nibbles(Bytes low, Bytes high, Bytes x_low, Bytes x_high) { return dot(low, x_low) + dot(high, x_high); }
inline Floats sums_of(const Floats* x) { return Floats{sum(x[0]), sum(x[1]), sum(x[2]), sum(x[3])}; }
inline Floats select(Floats x, const int32_t* lanes) {
    return Floats{x[lanes[0]], x[lanes[1]], x[lanes[2]], x[lanes[3]]};
}
inline Floats low_halves(Bytes x) {
    const Ints bits = load_vector<Ints>(&x) << 16;
    return load_vector<Floats>(&bits);
}
inline Floats high_halves(Bytes x) {
    const Ints bits = load_vector<Ints>(&x) & -65536;
    return load_vector<Floats>(&bits);
}

#endif

constexpr int64_t UNIT = 4 * LANES;  // bytes in a vector

// The first `count` elements of a vector, and zeros; nothing after them is read.
template <typename T> inline Floats load_part(const T* p, int64_t count) {
    T values[LANES] = {};
    for (int64_t i = 0; i < count; i++) values[i] = p[i];
    return load(values);
}

#if defined(__AVX512BW__)
inline Bytes load_bytes_part(const void* p, int64_t count) {
    return _mm512_maskz_loadu_epi8(~uint64_t(0) >> (64 - count), p);  // 0 < count <= 64
}
#elif defined(__AVX2__)
inline Bytes load_bytes_part(const void* p, int64_t count) {
    alignas(32) static const int32_t mask[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};
    const int* words = static_cast<const int*>(p);
    Bytes x = _mm256_maskload_epi32(words, load_bytes(mask + LANES - count / 4));
    if (count % 4 != 0) {
        int8_t values[UNIT];
        std::memcpy(values, &x, sizeof x);
        for (int64_t i = count / 4 * 4; i < count; i++) values[i] = static_cast<const int8_t*>(p)[i];
        x = load_bytes(values);
    }
    return x;
}
#else
inline Bytes load_bytes_part(const void* p, int64_t count) {
    int8_t values[UNIT] = {};
    std::memcpy(values, p, size_t(count));
    return load_bytes(values);
}
#endif

// Functions that only prefetch must be inlined: gcc treats a call of one as having no effect, and removes it.
#define PREFETCHING __attribute__((always_inline))

// Prefetches `bytes` of memory to the L1 cache.
PREFETCHING inline void prefetch(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
}

// The same to the L2 cache.
PREFETCHING inline void prefetch_far(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i, 0, 2);
}

}  // namespace
