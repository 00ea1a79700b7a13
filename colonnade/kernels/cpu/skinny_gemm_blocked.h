// Products of few rows with quantised weights stored in blocks of 16 outputs (to_blocks in kernels/linear/quantise.py).
//
//     int8   byte 4 o + c of quad k of a block: input 4 k + c of output o
//     int4   byte 4 o + c of pair k of a block: input 8 k + c of output o in the low nibble, input 8 k + 4 + c in the high
//
// Each vector lane is one output, so that a group's sum needs no sum across lanes, and its scales are applied once. A
// row of x is broadcast four inputs at a time.

#pragma once

#include <cstdint>
#include <cstring>

#include "arguments.h"
#include "dynamic_quantisation.h"
#include "simd.h"
#include "skinny_gemm.h"
#include "thread_pool.h"

namespace {

constexpr int64_t BLOCK = 16;
constexpr int VECTORS = int(BLOCK / LANES);
constexpr int BLOCK_ROWS = LANES == 16 ? 8 : 4;  // rows of x that share the loads of a block
constexpr int PAIR_ROWS = 6;  // the same of two blocks, which share the loads of x; their sums fill the registers
constexpr int64_t MANY_ROWS = 24;  // from which two blocks are multiplied at once

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr bool LIFTED = true;  // signed weights get 128 added, which the start of each sum subtracts
inline Ints broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Bytes spread(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
inline Bytes lift(Bytes w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
inline Ints add_dot(Ints sums, Bytes w, Bytes x) { return _mm512_dpbusd_epi32(sums, w, x); }
inline Ints add_signed_dot(Ints sums, Bytes w, Bytes x) { return _mm512_dpbusd_epi32(sums, w, x); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
#elif defined(__AVX2__) && defined(__FMA__)
constexpr bool LIFTED = false;
inline Ints broadcast_int(int32_t x) { return _mm256_set1_epi32(x); }
inline Bytes spread(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
inline Bytes lift(Bytes w) { return w; }
inline Ints add_dot(Ints sums, Bytes w, Bytes x) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
inline Ints add_signed_dot(Ints sums, Bytes w, Bytes x) { return _mm256_add_epi32(sums, dot(w, x)); }
inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
#else
constexpr bool LIFTED = false;
inline Ints broadcast_int(int32_t x) { return Ints{x, x, x, x}; }
inline Bytes spread(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    const Ints all = broadcast_int(four);
    return load_vector<Bytes>(&all);
}
inline Bytes lift(Bytes w) { return w; }
inline Ints add_dot(Ints sums, Bytes w, Bytes x) { return sums + dot(w, x); }
inline Ints add_signed_dot(Ints sums, Bytes w, Bytes x) { return sums + dot(w, x); }
inline Ints add_ints(Ints a, Ints b) { return a + b; }
#endif

// Whether a tile of R rows prefetches only the first line of each group of weights, to the L2 cache. On AMD processors
// with AVX-512 the hardware prefetchers stay ahead of products of few rows, and a prefetch per line delays theirs (Zen 4:
// 1.2 times as long). Other processors prefetch every line; fewer were not measured there.
#if defined(__x86_64__)
inline bool on_amd() { return __builtin_cpu_init(), __builtin_cpu_is("amd"); }
#else
inline bool on_amd() { return false; }
#endif
const bool ON_AMD = on_amd();
template <int R, int MAX_ROWS> inline bool sparse_prefetch() { return LANES == 16 && R <= MAX_ROWS && ON_AMD; }

// A tile of R rows of x times B blocks: y[r * BAND + o]. `at` is the first row of x.
struct Int8Blocks {
    static constexpr int64_t GROUP = X_GROUP;
    static constexpr bool PAIRS = LANES == 16;
    template <int R, int B = 1>
    static void tile(const Matrix& w, const BlockRows& x, int64_t at, int64_t block, float* y) {
        constexpr int N = B * VECTORS;
        const int64_t size = BLOCK * w.inputs;  // of a block
        const int8_t* p = static_cast<const int8_t*>(w.values) + block * size;
        const int8_t* rows = x.bytes + at * x.stride;
        Floats sums[R][N];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < N; v++) sums[r][v] = zero();
        const auto group = [&](int64_t g, int64_t quads) {
            Ints dots[R][N];
            for (int r = 0; r < R; r++) {
                const Ints start = broadcast_int(LIFTED ? -128 * x.totals[(at + r) * x.groups + g] : 0);
                for (int v = 0; v < N; v++) dots[r][v] = start;
            }
            for (int b = 0; b < B && at == 0; b++) {
                if (sparse_prefetch<R, 4>()) prefetch_far(p + b * size + AHEAD, 1);
                else prefetch(p + b * size + AHEAD, quads * VECTORS * UNIT);
            }
            for (int64_t k = 0; k < quads; k++) {
                Bytes bytes[N];
                for (int v = 0; v < N; v++) {
                    bytes[v] = lift(load_bytes(p + v / VECTORS * size + (k * VECTORS + v % VECTORS) * UNIT));
                }
                for (int r = 0; r < R; r++) {
                    const Bytes xs = spread(rows + r * x.stride + g * GROUP + 4 * k);
                    for (int v = 0; v < N; v++) dots[r][v] = add_signed_dot(dots[r][v], bytes[v], xs);
                }
            }
            p += quads * VECTORS * UNIT;
            for (int r = 0; r < R; r++) {
                const Floats z = broadcast(x.scales[(at + r) * x.groups + g]);
                for (int v = 0; v < N; v++) sums[r][v] = fma(to_floats(dots[r][v]), z, sums[r][v]);
            }
        };
        const int64_t whole = w.inputs / GROUP;
        for (int64_t g = 0; g < whole; g++) group(g, GROUP / 4);
        if (whole < x.groups) group(whole, (w.inputs - whole * GROUP) / 4);
        const float* scales = static_cast<const float*>(w.scales) + block * BLOCK;
        for (int r = 0; r < R; r++)
            for (int v = 0; v < N; v++) store(y + r * BAND + v * LANES, multiply(sums[r][v], load(scales + v * LANES)));
    }
};

template <int G> struct Int4Blocks {
    static constexpr int64_t GROUP = G;
    static constexpr bool PAIRS = false;  // no faster: scales take as long as loads
    template <int R> static void tile(const Matrix& w, const BlockRows& x, int64_t at, int64_t block, float* y) {
        const uint8_t* p = static_cast<const uint8_t*>(w.values) + block * x.groups * (G / 2) * BLOCK;
        const uint32_t* pairs = static_cast<const uint32_t*>(w.scales) + block * x.groups * BLOCK;
        const int8_t* rows = x.bytes + at * x.stride;
        Floats sums[R][VECTORS];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) sums[r][v] = zero();
        for (int64_t g = 0; g < x.groups; g++, p += G / 2 * BLOCK, pairs += BLOCK) {
            Ints dots[R][VECTORS], others[R][VECTORS];  // two sums for one row, which is bound by latency
            for (int r = 0; r < R; r++)
                for (int v = 0; v < VECTORS; v++) dots[r][v] = others[r][v] = broadcast_int(0);
            if (at == 0) {
                prefetch_far(p + AHEAD, sparse_prefetch<R, 1>() ? 1 : G / 2 * BLOCK);
                prefetch_far(pairs + AHEAD / 8, BLOCK * 4);
            }
            for (int k = 0; k < G / 8; k++) {
                for (int v = 0; v < VECTORS; v++) {
                    const Bytes bytes = load_bytes(p + (k * VECTORS + v) * UNIT);
                    const Bytes low = low_nibbles(bytes), high = high_nibbles(bytes);
                    for (int r = 0; r < R; r++) {
                        const int8_t* xs = rows + r * x.stride + g * G + 8 * k;
                        dots[r][v] = add_dot(dots[r][v], low, spread(xs));
                        Ints& to = R == 1 ? others[r][v] : dots[r][v];
                        to = add_dot(to, high, spread(xs + 4));
                    }
                }
            }
            for (int v = 0; v < VECTORS; v++) {
                const Bytes both = load_bytes(pairs + v * LANES);
                const Floats s = low_halves(both), m = high_halves(both);
                for (int r = 0; r < R; r++) {
                    const int64_t i = (at + r) * x.groups + g;
                    const Ints exact = R == 1 ? add_ints(dots[r][v], others[r][v]) : dots[r][v];
                    sums[r][v] = fma(multiply(to_floats(exact), s), broadcast(x.scales[i]), sums[r][v]);
                    sums[r][v] = fma(m, broadcast(x.sums[i]), sums[r][v]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) store(y + r * BAND + v * LANES, sums[r][v]);
    }
};

// y (rows, BAND) of outputs [part.begin, part.end): whole blocks, at most BAND outputs.
template <typename P> void block_product(const Matrix& w, const BlockRows& x, Share part, float* y) {
    int64_t o = part.begin;
    if constexpr (P::PAIRS) {
        for (; x.count >= MANY_ROWS && o + 2 * BLOCK <= part.end; o += 2 * BLOCK) {
            float* const to = y + (o - part.begin);
            int64_t t = 0;
            for (; t + PAIR_ROWS <= x.count; t += PAIR_ROWS) P::template tile<PAIR_ROWS, 2>(w, x, t, o / BLOCK, to + t * BAND);
            for (; t + 2 <= x.count; t += 2) P::template tile<2, 2>(w, x, t, o / BLOCK, to + t * BAND);
            if (t < x.count) P::template tile<1, 2>(w, x, t, o / BLOCK, to + t * BAND);
        }
    }
    for (; o < part.end; o += BLOCK) {
        const int64_t block = o / BLOCK;
        float* const to = y + (o - part.begin);
        int64_t t = 0;
        for (; t + BLOCK_ROWS <= x.count; t += BLOCK_ROWS) P::template tile<BLOCK_ROWS>(w, x, t, block, to + t * BAND);
        if (BLOCK_ROWS > 4 && t + 4 <= x.count) {
            P::template tile<4>(w, x, t, block, to + t * BAND);
            t += 4;
        }
        if (t + 2 <= x.count) {
            P::template tile<2>(w, x, t, block, to + t * BAND);
            t += 2;
        }
        if (t < x.count) P::template tile<1>(w, x, t, block, to + t * BAND);
    }
}

void any_block_product(const Matrix& w, const BlockRows& x, Share part, float* y) {
    if (w.kind == INT8_BLOCKS) return block_product<Int8Blocks>(w, x, part, y);
    if (w.group == 32) return block_product<Int4Blocks<32>>(w, x, part, y);
    if (w.group == 64) return block_product<Int4Blocks<64>>(w, x, part, y);
    return block_product<Int4Blocks<128>>(w, x, part, y);
}

}  // namespace
