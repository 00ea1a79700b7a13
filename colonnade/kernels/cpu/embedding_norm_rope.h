// Embedding, norm, rotary factors, and RoPE with the write of keys and values to the paged KV cache.

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>

#include "arguments.h"
#include "row_math.h"
#include "skinny_gemm_blocked.h"
#include "thread_pool.h"

namespace {

// y = table[tokens] (+ residual); the table has plain rows, or int8 rows with scales.
struct Embedding {
    const int64_t* tokens;
    Matrix table;
    const void* residual;  // null: none; may be y
    void* y;
    int64_t rows, dtype;

    void run(int, int thread, int threads, std::atomic<int64_t>& error) const {
        const Share mine = share(rows, 1, thread, threads);
        const int64_t width = table.inputs;
        scratch.start(Scratch::bytes<float>(width));
        float* const row = scratch.take<float>(width);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            if (tokens[t] < 0 || tokens[t] >= table.outputs) {
                error.store(BAD_TOKEN);
                continue;
            }
            if (table.kind == INT8) {
                const int8_t* q = static_cast<const int8_t*>(table.values) + tokens[t] * width;
                const float scale = static_cast<const float*>(table.scales)[tokens[t]];
                for (int64_t i = 0; i < width; i++) row[i] = float(q[i]) * scale;
            } else if (table.kind == INT8_BLOCKS) {
                const int8_t* block = static_cast<const int8_t*>(table.values) + tokens[t] / BLOCK * BLOCK * width;
                const int8_t* q = block + tokens[t] % BLOCK * 4;
                const float scale = static_cast<const float*>(table.scales)[tokens[t]];
                for (int64_t i = 0; i < width; i++) row[i] = float(q[i / 4 * 4 * BLOCK + i % 4]) * scale;
            } else {
                read_row(table.values, Dtype(dtype), tokens[t] * width, width, row);
            }
            if (residual != nullptr) {
                for (int64_t i = 0; i < width; i++) row[i] += element(residual, Dtype(dtype), t * width + i);
            }
            write_row(y, Dtype(dtype), t * width, width, row);
        }
    }
};

// y = norm(x), rows of `width`.
struct Norm {
    const void* x;
    NormWeights norm;
    void* y;
    int64_t rows, width, dtype;

    void run(int, int thread, int threads, std::atomic<int64_t>&) const {
        const Share mine = share(rows, 1, thread, threads);
        scratch.start(Scratch::bytes<float>(width));
        float* const row = scratch.take<float>(width);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            read_row(x, Dtype(dtype), t * width, width, row);
            apply_norm(row, width, norm, Dtype(dtype));
            write_row(y, Dtype(dtype), t * width, width, row);
        }
    }
};

// The rotary factors of each token (kernels/rotary.py): own = (cos, cos), other = (−sin, sin).
struct Rotation {
    const int64_t* positions;
    const float* theta;
    void *own, *other;
    double factor;
    int64_t rows, half, dtype;

    void run(int, int thread, int threads, std::atomic<int64_t>&) const {
        const Share mine = share(rows, 1, thread, threads);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            for (int64_t i = 0; i < half; i++) {
                const float angle = float(positions[t]) * theta[i];
                const float c = std::cos(angle) * float(factor), s = std::sin(angle) * float(factor), minus = -s;
                const int64_t at = 2 * half * t + i;
                write_row(own, Dtype(dtype), at, 1, &c);
                write_row(own, Dtype(dtype), at + half, 1, &c);
                write_row(other, Dtype(dtype), at, 1, &minus);
                write_row(other, Dtype(dtype), at + half, 1, &s);
            }
        }
    }
};

// y = x rotated by one token's factors; pairs are (i, i + width / 2).
inline void rotate_row(const float* x, const float* own, const float* other, int64_t width, float* y) {
    const int64_t half = width / 2;
    for (int64_t j = 0; j < half; j++) {
        y[j] = multiply_add(x[j + half], other[j], x[j] * own[j]);
        y[j + half] = multiply_add(x[j], other[j + half], x[j + half] * own[j + half]);
    }
}

// Queries from a fused projection; keys and values to the cache (kernels/attention/cache_write.py).
struct RopeWrite {
    const void* qkv;                  // (rows, kv_heads, group + 2, width)
    const void *own, *other;          // (rows, width), or null: no rotation
    NormWeights q_norm, k_norm;       // of each head
    const int64_t* slots;
    void *keys, *values, *q;
    int64_t rows, kv_heads, group, width, slot_count, dtype;

    void run(int, int thread, int threads, std::atomic<int64_t>& error) const {
        const Share mine = share(rows * kv_heads, 1, thread, threads);
        const Dtype type = Dtype(dtype);
        scratch.start(4 * Scratch::bytes<float>(width));
        float* const head = scratch.take<float>(width);
        float* const turned = scratch.take<float>(width);
        float* const cosines = scratch.take<float>(width);
        float* const sines = scratch.take<float>(width);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            const int64_t t = i / kv_heads, k = i % kv_heads;
            if (slots[t] < 0 || slots[t] >= slot_count) {
                error.store(BAD_SLOT);
                continue;
            }
            if (own != nullptr) {
                read_row(own, type, t * width, width, cosines);
                read_row(other, type, t * width, width, sines);
            }
            const int64_t cached = (slots[t] * kv_heads + k) * width;
            for (int64_t g = 0; g < group + 2; g++) {
                read_row(qkv, type, (i * (group + 2) + g) * width, width, head);
                const NormWeights& norm = g < group ? q_norm : k_norm;
                if (g <= group && norm.weight != nullptr) apply_norm(head, width, norm, type);
                const float* from = head;
                if (g <= group && own != nullptr) {
                    rotate_row(head, cosines, sines, width, turned);
                    from = turned;
                }
                if (g < group) write_row(q, type, ((t * kv_heads + k) * group + g) * width, width, from);
                else write_row(g == group ? keys : values, type, cached, width, from);
            }
        }
    }
};

}  // namespace
