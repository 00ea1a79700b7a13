// Products of few rows with weights stored by row (kernels/linear/quantise.py): plain, int8 and int4.
//
//     int8   y = s Σ_g z_g Σ_d q_d p_d                              x ≈ z p,  w ≈ s q
//     int4   y = Σ_g ( s_g z_g Σ_d q_d p_d  +  m_g z_g Σ_d p_d )    w ≈ s q + m
//
// A tile is R rows of x times O outputs, whose sums stay in registers. Each vector lane sums a part of the inputs.

#pragma once

#include <cstdint>

#include "arguments.h"
#include "dynamic_quantisation.h"
#include "simd.h"
#include "thread_pool.h"

namespace {

constexpr int64_t BAND = 128;   // outputs that are computed before bias, activation and residual are applied
constexpr int64_t AHEAD = 8192;      // bytes between the weights that are multiplied and those that are requested
constexpr int64_t ROW_AHEAD = 2048;  // the same in each row of a tile of plain weights, which go to the L2 cache

// For int4: the lane with the scale of each lane of unit j, of LANES groups' scales.
template <int G> struct GroupLanes {
    int32_t lane[G / 8][LANES];
    constexpr GroupLanes() : lane{} {
        for (int j = 0; j < G / 8; j++) {
            for (int l = 0; l < LANES; l++) lane[j][l] = int32_t((j * UNIT + 4 * l) / (G / 2));
        }
    }
};
template <int G> constexpr GroupLanes<G> GROUP_LANES{};

// y[r * BAND + o] of R rows of x times O rows of W. `at` is the first row of x, `first` the first output. The sums of
// inputs [inputs.begin, inputs.end) are added to those in `kept`, and stay there until the last input. The lanes of all
// sums are added at once, in the same order for every R and O, so that a row's bits do not depend on the others.
template <typename T, int R, int O>
inline void plain_tile(
    const Matrix& w, const Rows& x, int64_t at, int64_t first, Share inputs, Floats* kept, float* y) {
    const T* weights = static_cast<const T*>(w.values) + first * w.inputs;
    const float* rows = x.floats + at * x.float_stride;
    Floats sums[R][O];
    for (int r = 0; r < R; r++)
        for (int o = 0; o < O; o++) sums[r][o] = inputs.begin == 0 ? zero() : kept[r * O + o];
    // Each row is requested ROW_AHEAD bytes before it is read; behind its end, the row of the next tile in its place.
    const int64_t row = w.inputs * int64_t(sizeof(T)), last = w.inputs - ROW_AHEAD / int64_t(sizeof(T));
    int64_t k = inputs.begin;
    for (; k + LANES <= inputs.end; k += LANES) {
        Floats v[O];
        for (int o = 0; o < O; o++) v[o] = load(weights + o * w.inputs + k);
        if (at == 0 && k * int64_t(sizeof(T)) % 64 == 0) {
            const char* const p = reinterpret_cast<const char*>(weights + k) + ROW_AHEAD + (k < last ? 0 : (O - 1) * row);
            for (int o = 0; o < O; o++) __builtin_prefetch(p + o * row, 0, 2);
        }
        for (int r = 0; r < R; r++) {
            const Floats xs = load(rows + r * x.float_stride + k);
            for (int o = 0; o < O; o++) sums[r][o] = fma(v[o], xs, sums[r][o]);
        }
    }
    if (inputs.end < w.inputs) {
        for (int r = 0; r < R; r++)
            for (int o = 0; o < O; o++) kept[r * O + o] = sums[r][o];
        return;
    }
    if (k < w.inputs) {
        for (int o = 0; o < O; o++) {
            const Floats v = load_part(weights + o * w.inputs + k, w.inputs - k);
            for (int r = 0; r < R; r++) sums[r][o] = fma(v, load(rows + r * x.float_stride + k), sums[r][o]);
        }
    }
    for (int i = 0; i < R * O; i += LANES) {
        Floats some[LANES];
        float values[LANES];
        for (int j = 0; j < LANES; j++) some[j] = i + j < R * O ? sums[(i + j) / O][(i + j) % O] : zero();
        store(values, sums_of(some));
        for (int j = 0; j < LANES && i + j < R * O; j++) y[(i + j) / O * BAND + (i + j) % O] = values[j];
    }
}

struct Int8Product {
    static constexpr int FOUR_ROWS_OUTPUTS = LANES == 16 ? 4 : 2, ONE_ROW_OUTPUTS = 4;
    template <int R, int O> static void tile(const Matrix& w, const Rows& x, int64_t at, int64_t first, float (*y)[O]) {
        const int8_t* weights = static_cast<const int8_t*>(w.values) + first * w.inputs;
        const int8_t* rows = x.bytes + at * x.units * UNIT;
        const float* scales = x.scales + at * x.units * LANES;
        Floats sums[R][O];
        for (int r = 0; r < R; r++)
            for (int o = 0; o < O; o++) sums[r][o] = zero();
        const auto step = [&](int64_t u, const Bytes(&v)[O]) {
            for (int r = 0; r < R; r++) {
                const Bytes xs = load_bytes(rows + (r * x.units + u) * UNIT);
                const Floats z = load(scales + (r * x.units + u) * LANES);
                for (int o = 0; o < O; o++) sums[r][o] = fma(to_floats(dot(v[o], xs)), z, sums[r][o]);
            }
        };
        const int64_t whole = w.inputs / UNIT;
        for (int64_t u = 0; u < whole; u++) {
            Bytes v[O];
            for (int o = 0; o < O; o++) v[o] = load_bytes(weights + o * w.inputs + u * UNIT);
            step(u, v);
        }
        if (whole < x.units) {
            Bytes v[O];
            for (int o = 0; o < O; o++) {
                v[o] = load_bytes_part(weights + o * w.inputs + whole * UNIT, w.inputs - whole * UNIT);
            }
            step(whole, v);
        }
        const float* row_scales = static_cast<const float*>(w.scales) + first;
        for (int r = 0; r < R; r++)
            for (int o = 0; o < O; o++) y[r][o] = sum(sums[r][o]) * row_scales[o];
    }
};

template <int G> struct Int4Product {
    static constexpr int FOUR_ROWS_OUTPUTS = 2, ONE_ROW_OUTPUTS = 4;
    template <int R, int O> static void tile(const Matrix& w, const Rows& x, int64_t at, int64_t first, float (*y)[O]) {
        const int64_t bytes = x.groups * G / 2;  // of a row of W
        const uint8_t* weights = static_cast<const uint8_t*>(w.values) + first * bytes;
        const uint32_t* pairs = static_cast<const uint32_t*>(w.scales) + first * x.groups;
        const int8_t* rows = x.bytes + at * x.units * 2 * UNIT;
        const float* scales = x.scales + at * x.units * LANES;
        const float* x_sums = x.sums + at * x.sum_stride;
        Floats sums[R][O];
        for (int r = 0; r < R; r++)
            for (int o = 0; o < O; o++) sums[r][o] = zero();
        const auto step = [&](int64_t u, const Bytes(&v)[O], const Floats(&s)[O], const int32_t* lanes) {
            Bytes low[O], high[O];
            Floats spread[O];
            for (int o = 0; o < O; o++) {
                low[o] = low_nibbles(v[o]);
                high[o] = high_nibbles(v[o]);
                spread[o] = select(s[o], lanes);
            }
            for (int r = 0; r < R; r++) {
                const int8_t* p = rows + (r * x.units + u) * 2 * UNIT;
                const Bytes x_low = load_bytes(p), x_high = load_bytes(p + UNIT);
                const Floats z = load(scales + (r * x.units + u) * LANES);
                for (int o = 0; o < O; o++) {
                    const Floats part = to_floats(dot_nibbles(low[o], high[o], x_low, x_high));
                    sums[r][o] = fma(multiply(part, spread[o]), z, sums[r][o]);
                }
            }
        };
        for (int64_t g = 0; g < x.groups; g += LANES) {  // LANES groups, G / 8 units
            const bool whole = g + LANES <= x.groups;
            Floats s[O];
            for (int o = 0; o < O; o++) {
                const uint32_t* from = pairs + o * x.groups + g;
                const Bytes both = whole ? load_bytes(from) : load_bytes_part(from, 4 * (x.groups - g));
                s[o] = low_halves(both);
                const Floats m = high_halves(both);
                for (int r = 0; r < R; r++) sums[r][o] = fma(m, load(x_sums + r * x.sum_stride + g), sums[r][o]);
            }
            const int64_t from = g * (G / 2), left = bytes - from;
            for (int64_t j = 0; j < G / 8 && j * UNIT < left; j++) {
                Bytes v[O];
                for (int o = 0; o < O; o++) {
                    const uint8_t* p = weights + o * bytes + from + j * UNIT;
                    v[o] = left - j * UNIT >= UNIT ? load_bytes(p) : load_bytes_part(p, left - j * UNIT);
                }
                step(from / UNIT + j, v, s, GROUP_LANES<G>.lane[j]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int o = 0; o < O; o++) y[r][o] = sum(sums[r][o]);
    }
};

template <typename P, int R, int O>
inline void product_tile(const Matrix& w, const Rows& x, int64_t at, int64_t first, float* y) {
    float values[R][O];
    P::template tile<R, O>(w, x, at, first, values);
    for (int r = 0; r < R; r++)
        for (int o = 0; o < O; o++) y[r * BAND + o] = values[r][o];
}

// Bytes of a row of W.
inline int64_t row_bytes(const Matrix& w, Dtype dtype) {
    if (w.kind == INT8 || w.kind == INT8_BLOCKS) return w.inputs;
    if (w.kind == INT4 || w.kind == INT4_BLOCKS) return ceil_div(w.inputs, w.group) * w.group / 2;
    return w.inputs * (dtype == FLOAT32 ? 4 : 2);
}

// y (rows, BAND) of outputs [part.begin, part.end), at most BAND of them.
template <typename P> void product(const Matrix& w, const Rows& x, int64_t bytes, Share part, float* y) {
    constexpr int ONE = P::ONE_ROW_OUTPUTS, FOUR = P::FOUR_ROWS_OUTPUTS;
    const char* values = static_cast<const char*>(w.values);
    const int64_t pairs = w.kind == INT4 ? ceil_div(w.inputs, w.group) * 4 : 0;
    int64_t o = part.begin;
    for (; o + ONE <= part.end; o += ONE) {
        int64_t t = 0;
        prefetch(values + o * bytes + AHEAD, ONE * bytes);
        if (w.kind == INT4) prefetch(static_cast<const char*>(w.scales) + o * pairs + AHEAD / 8, ONE * pairs);
        for (; t + 4 <= x.count; t += 4) {
            for (int i = 0; i < ONE; i += FOUR) {
                product_tile<P, 4, FOUR>(w, x, t, o + i, y + t * BAND + (o - part.begin) + i);
            }
        }
        for (; t < x.count; t++) product_tile<P, 1, ONE>(w, x, t, o, y + t * BAND + (o - part.begin));
    }
    for (; o < part.end; o++) {
        for (int64_t t = 0; t < x.count; t++) product_tile<P, 1, 1>(w, x, t, o, y + t * BAND + (o - part.begin));
    }
}

// As product() with plain weights. Rows are multiplied in tiles of MANY, two and one. If there are many, outputs are cut
// into passes and inputs into pieces, so that weights and rows of x stay in the L1 cache; few rows read the weights in
// the order in which they are stored.
template <typename T> struct PlainProduct {
    static constexpr int MANY = 6;  // with O outputs, their sums fill the registers
    static constexpr int O = LANES == 16 ? 4 : 2;
    static constexpr int64_t STEP = 4, PASS = 8, PIECE = 512, MOST_ROWS = 64;
    const Matrix& w;
    const Rows& x;
    int64_t start;  // the first output of y
    float* y;
    Floats* kept;

    static void run(const Matrix& w, const Rows& x, Share part, float* y) {
        Floats kept[MOST_ROWS * PASS];
        PlainProduct{w, x, part.begin, y, kept}.outputs_of(part);
    }

    void outputs_of(Share part) const {
        const bool many = x.count >= MANY;
        const int64_t piece = many ? PIECE : w.inputs;
        int64_t o = part.begin;
        while (o + STEP <= part.end) {
            const int64_t outputs = many && o + PASS <= part.end ? PASS : STEP;
            for (int64_t k = 0; k < w.inputs; k += piece) {
                const Share inputs{k, k + piece < w.inputs ? k + piece : w.inputs};
                int64_t t = tiles<MANY, O>(0, o, outputs, inputs);
                t = tiles<2, STEP>(t, o, outputs, inputs);
                tiles<1, STEP>(t, o, outputs, inputs);
            }
            o += outputs;
        }
        for (; o < part.end; o++) tiles<1, 1>(0, o, 1, {0, w.inputs});
    }

    // Multiplies R rows at a time, from row t; returns the first row that is left.
    template <int R, int OUTPUTS> int64_t tiles(int64_t t, int64_t o, int64_t outputs, Share inputs) const {
        const T* values = static_cast<const T*>(w.values);
        for (; t + R <= x.count; t += R) {
            for (int64_t i = 0; i < outputs; i += OUTPUTS) {
                Floats* const sums = kept + t * PASS + i * R;
                plain_tile<T, R, OUTPUTS>(w, x, t, o + i, inputs, sums, y + t * BAND + (o - start) + i);
            }
        }
        return t;
    }
};

void any_product(const Matrix& w, Dtype dtype, const Rows& x, Share part, float* y) {
    const int64_t bytes = row_bytes(w, dtype);
    if (w.kind == INT8) return product<Int8Product>(w, x, bytes, part, y);
    if (w.kind == INT4 && w.group == 32) return product<Int4Product<32>>(w, x, bytes, part, y);
    if (w.kind == INT4 && w.group == 64) return product<Int4Product<64>>(w, x, bytes, part, y);
    if (w.kind == INT4) return product<Int4Product<128>>(w, x, bytes, part, y);
    if (dtype == FLOAT32) return PlainProduct<float>::run(w, x, part, y);
    return PlainProduct<uint16_t>::run(w, x, part, y);
}

}  // namespace
