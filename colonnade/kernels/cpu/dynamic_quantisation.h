// Quantises rows of x to int8 for products with quantised weights, one scale per group of inputs.
//
//     x ≈ z p,  z = max |x| / 127 in a group; int4 weights also need z Σ p
//
// A group is X_GROUP inputs for int8 weights, and the weights' own group for int4.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "arguments.h"
#include "simd.h"

namespace {

constexpr int64_t X_GROUP = 32;  // inputs that share a scale when x is quantised for int8 weights

// Rows of x in the layout for weights stored by row.
struct Rows {
    int64_t count, inputs, units, groups;
    const float* floats;  // (count, inputs rounded up to LANES), for plain weights
    int64_t float_stride;
    const int8_t* bytes;  // (count, units, UNIT), for int4 (count, units, 2, UNIT)
    const float* scales;  // (count, units, LANES): each lane's z
    const float* sums;    // int4: (count, groups rounded up to LANES): z_g Σ p_d
    int64_t sum_stride;
};

// Quantised rows of x in the layout for weights stored in blocks.
struct BlockRows {
    int64_t count, stride, groups;
    const int8_t* bytes;    // (count, stride): padded with zeros to whole groups
    const float* scales;    // (count, groups): z
    const float* sums;      // (count, groups): z Σ p, for int4
    const int32_t* totals;  // (count, groups): Σ p, for int8
};

// int8 values p and the scale z of a group of x. A group that is not finite has a scale of NaN.
inline float quantise_group(const float* x, int64_t count, int8_t* p) {
    int32_t bits_of_most = 0;  // of values that are not negative, bits are ordered as the values; NaN is the largest
    for (int64_t i = 0; i < count; i++) {
        int32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7FFFFFFF;
        bits_of_most = bits_of_most < bits ? bits : bits_of_most;
    }
    if (bits_of_most >= 0x7F800000) {
        std::memset(p, 0, size_t(count));
        return std::nanf("");
    }
    float most;
    std::memcpy(&most, &bits_of_most, 4);
    const float inverse = most < 1e-30f ? 0.0f : 127.0f / most;
    for (int64_t i = 0; i < count; i++) {
        const float shifted = x[i] * inverse + 12582912.0f;  // rounds to nearest even
        int32_t bits;
        std::memcpy(&bits, &shifted, 4);
        p[i] = int8_t(bits);
    }
    return most < 1e-30f ? 0.0f : most / 127.0f;
}

// The lane order of int4 (kernels/linear/quantise.py): byte 4 c + b has inputs 2 b · G/8 + c and (2 b + 1) · G/8 + c.
template <int G> inline void interleave(const int8_t* p, int8_t* low, int8_t* high) {
    constexpr int W = G / 8;
    for (int c = 0; c < W; c++) {
        for (int b = 0; b < 4; b++) {
            low[4 * c + b] = p[2 * b * W + c];
            high[4 * c + b] = p[(2 * b + 1) * W + c];
        }
    }
}

inline int64_t unit_count(const Matrix& w) {
    return w.kind == INT8 ? ceil_div(w.inputs, UNIT) : ceil_div(ceil_div(w.inputs, w.group) * w.group / 2, UNIT);
}

inline void quantise_int8(const float* x, const Rows& rows, int8_t* p, float* scales) {
    constexpr int64_t PER = UNIT < X_GROUP ? X_GROUP : UNIT;  // whole groups and whole units
    alignas(64) float padded[PER];
    for (int64_t start = 0; start < rows.units * UNIT; start += PER) {
        const int64_t left = rows.inputs - start, count = left < PER ? (left < 0 ? 0 : left) : PER;
        std::memcpy(padded, x + start, size_t(count) * 4);
        std::memset(padded + count, 0, size_t(PER - count) * 4);
        int8_t values[PER];
        float z[PER / X_GROUP];
        for (int64_t g = 0; g < PER / X_GROUP; g++) {
            z[g] = quantise_group(padded + g * X_GROUP, X_GROUP, values + g * X_GROUP);
        }
        const int64_t bytes = rows.units * UNIT - start < PER ? rows.units * UNIT - start : PER;
        std::memcpy(p + start, values, size_t(bytes));
        for (int64_t i = 0; i < bytes / 4; i++) scales[start / 4 + i] = z[4 * i / X_GROUP];
    }
}

template <int G> void quantise_int4(const float* x, const Rows& rows, int8_t* p, float* scales, float* sums) {
    alignas(64) float padded[G];
    int8_t values[G], low[G / 2], high[G / 2];
    std::memset(p, 0, size_t(2 * rows.units * UNIT));
    std::memset(scales, 0, size_t(rows.units * LANES) * 4);
    for (int64_t g = 0; g < rows.groups; g++) {
        const int64_t left = rows.inputs - g * G, count = left < G ? left : G;
        std::memcpy(padded, x + g * G, size_t(count) * 4);
        std::memset(padded + count, 0, size_t(G - count) * 4);
        const float z = quantise_group(padded, G, values);
        int32_t total = 0;
        for (int i = 0; i < G; i++) total += values[i];
        sums[g] = z * float(total);
        interleave<G>(values, low, high);
        constexpr int64_t PART = G / 2 < UNIT ? G / 2 : UNIT;
        for (int64_t i = 0; i < G / 2; i += PART) {
            const int64_t at = g * G / 2 + i, unit = at / UNIT, offset = at % UNIT;
            std::memcpy(p + 2 * unit * UNIT + offset, low + i, size_t(PART));
            std::memcpy(p + (2 * unit + 1) * UNIT + offset, high + i, size_t(PART));
            for (int64_t l = 0; l < PART / 4; l++) scales[unit * LANES + offset / 4 + l] = z;
        }
    }
    for (int64_t g = rows.groups; g < rows.sum_stride; g++) sums[g] = 0.0f;
}

// One row of x, padded with zeros to whole groups of G.
template <int G> void quantise_block_row(const float* x, int64_t groups, int8_t* p, float* z, float* sums, int32_t* totals) {
    for (int64_t g = 0; g < groups; g++) {
        z[g] = quantise_group(x + g * G, G, p + g * G);
        int32_t total = 0;
        for (int i = 0; i < G; i++) total += p[g * G + i];
        totals[g] = total;
        sums[g] = z[g] * float(total);
    }
}

}  // namespace
