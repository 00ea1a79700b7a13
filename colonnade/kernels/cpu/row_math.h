// Arithmetic on rows of float32 or bfloat16: conversion, e^x, activations, sums, dot products, RMSNorm and LayerNorm.
//
// Sums are in float32, in an order that depends only on the length of the row.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "arguments.h"
#include "simd.h"

namespace {

inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return std::fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

inline float to_float(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline float to_float(float x) { return x; }
inline void assign(float& y, float x) { y = x; }
inline void assign(uint16_t& y, float x) {  // round to nearest even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    y = x != x ? uint16_t(0x7FC0) : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// e^x to about one unit in the last place, by a polynomial for e^r, |r| <= ln 2 / 2 (the compiler vectorises it).
inline float exponential(float x) {
    const float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float shifted = multiply_add(bounded, 1.44269504f, 12582912.0f);
    const float n = shifted - 12582912.0f;
    const float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, bounded));
    float p = 1.9875691500e-4f;
    p = multiply_add(p, r, 1.3981999507e-3f);
    p = multiply_add(p, r, 8.3334519073e-3f);
    p = multiply_add(p, r, 4.1665795894e-2f);
    p = multiply_add(p, r, 1.6666665459e-1f);
    p = multiply_add(p, r, 5.0000001201e-1f);
    p = multiply_add(p, r * r, r) + 1.0f;
    const int32_t bits = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return x != x ? x : p * scale;
}

inline float activate(float x, Activation activation) {
    switch (activation) {
        case SILU: return x / (1.0f + exponential(-x));
        case GELU_TANH: {
            const float inner = 0.7978845608f * multiply_add(0.044715f * x * x, x, x);
            return x - x / (1.0f + exponential(2.0f * inner));  // x (1 + tanh(inner)) / 2
        }
        case GELU: return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
        case RELU: return x < 0.0f ? 0.0f : x;
        default: return x;
    }
}

inline void read_row(const void* x, Dtype dtype, int64_t start, int64_t count, float* y) {
    if (dtype == FLOAT32) {
        std::memcpy(y, static_cast<const float*>(x) + start, size_t(count) * 4);
    } else {
        const uint16_t* from = static_cast<const uint16_t*>(x) + start;
        for (int64_t i = 0; i < count; i++) y[i] = to_float(from[i]);
    }
}

inline void write_row(void* y, Dtype dtype, int64_t start, int64_t count, const float* x) {
    if (dtype == FLOAT32) {
        std::memcpy(static_cast<float*>(y) + start, x, size_t(count) * 4);
    } else {
        uint16_t* to = static_cast<uint16_t*>(y) + start;
        for (int64_t i = 0; i < count; i++) assign(to[i], x[i]);
    }
}

inline float element(const void* x, Dtype dtype, int64_t i) {
    return dtype == FLOAT32 ? static_cast<const float*>(x)[i] : to_float(static_cast<const uint16_t*>(x)[i]);
}

// The largest element of x; NaN may be ignored.
inline float largest(const float* x, int64_t count) {
    float y = x[0];
    int64_t i = 0;
    if (count >= LANES) {
        Floats most = load(x);
        for (i = LANES; i + LANES <= count; i += LANES) most = larger(most, load(x + i));
        float values[LANES];
        store(values, most);
        for (float value : values) y = y < value ? value : y;
    }
    for (; i < count; i++) y = y < x[i] ? x[i] : y;
    return y;
}

inline float total_of(const float* x, int64_t count) {
    Floats sums = zero();
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sums = fma(load(x + i), broadcast(1.0f), sums);
    float y = sum(sums);
    for (; i < count; i++) y += x[i];
    return y;
}

// Σ a_i b_i, or Σ (a_i − c)(b_i − c), in an order that depends on `count` only.
inline float inner_product(const float* a, const float* b, int64_t count, float c = 0.0f) {
    Floats sums[4] = {zero(), zero(), zero(), zero()};
    const Floats shift = broadcast(-c), one = broadcast(1.0f);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Floats& to = sums[i / LANES % 4];
        to = fma(fma(load(a + i), one, shift), fma(load(b + i), one, shift), to);
    }
    float y = (sum(sums[0]) + sum(sums[1])) + (sum(sums[2]) + sum(sums[3]));
    for (; i < count; i++) y = multiply_add(a[i] - c, b[i] - c, y);
    return y;
}

// RMSNorm or LayerNorm of one row, in place.
inline void apply_norm(float* x, int64_t width, const NormWeights& norm, Dtype dtype) {
    float mean = 0.0f;
    if (norm.bias != nullptr) {
        mean = total_of(x, width) / float(width);
    }
    const float square = inner_product(x, x, width, mean) / float(width);
    const float factor = 1.0f / std::sqrt(square + float(norm.eps));
    for (int64_t i = 0; i < width; i++) x[i] = (x[i] - mean) * factor;
    if (dtype == FLOAT32) {
        const float* weight = static_cast<const float*>(norm.weight);
        for (int64_t i = 0; i < width; i++) x[i] *= weight[i];
    } else {
        for (int64_t i = 0; i < width; i++) x[i] *= element(norm.weight, dtype, i);
    }
    if (norm.bias != nullptr) {
        for (int64_t i = 0; i < width; i++) x[i] += element(norm.bias, dtype, i);
    }
}

}  // namespace
