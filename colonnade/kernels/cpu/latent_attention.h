// Multi-head latent attention, absorbed (colonnade/model/attention.py): the steps before and after paged attention.
//
//     cache[slot] = [norm(c); rot(r)]          one vector per token: the key of all heads; its first elements are their value
//     q'_n = [W_up,nᵀ q_n; rot(p_n)] · factor  the query of head n for that key
//     y_n = W_v,n o_n                          from the weighted sum of vectors c to the values of head n
//
// W_up and W_v are the first `plain` and the other `value_width` rows of each head's part of one matrix of `rank` columns.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "arguments.h"
#include "embedding_norm_rope.h"
#include "linear.h"
#include "row_math.h"
#include "simd.h"
#include "skinny_gemm.h"
#include "thread_pool.h"

namespace {

struct LatentQueries {
    const void* q;            // (rows, heads, plain + rope)
    const void* kv;           // (rows, rank + rope): c and r
    const void *own, *other;  // (rows, rope)
    NormWeights norm;         // of c
    const void* up;           // (heads, plain + value_width, rank)
    const int64_t* slots;
    void* cache;              // (slot_count, rank + rope)
    void* out;                // (rows, heads, rank + rope)
    int64_t rows, heads, plain, rope, rank, value_width, slot_count, dtype;
    double factor;

    static constexpr int64_t STEP = 128;  // columns of one task

    void run(int, int thread, int threads, std::atomic<int64_t>& error) const {
        const int64_t parts = ceil_div(rank, STEP);
        const Share mine = share(rows + heads * parts, 1, thread, threads);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            if (i < rows) {
                store_vector(i, error);
                continue;
            }
            const int64_t head = (i - rows) / parts, start = (i - rows) % parts * STEP;
            const Share columns{start, start + STEP < rank ? start + STEP : rank};
            for (int64_t t = 0; t < rows; t += PANEL) {
                const Share some{t, t + PANEL < rows ? t + PANEL : rows};
                if (dtype == FLOAT32) absorb<float>(head, columns, some);
                else absorb<uint16_t>(head, columns, some);
                if (start == 0) turn(head, some);
            }
        }
    }

    void store_vector(int64_t t, std::atomic<int64_t>& error) const {
        if (slots[t] < 0 || slots[t] >= slot_count) {
            error.store(BAD_SLOT);
            return;
        }
        const Dtype type = Dtype(dtype);
        const int64_t width = rank + rope;
        scratch.start(Scratch::bytes<float>(rank) + 4 * Scratch::bytes<float>(rope));
        float* const c = scratch.take<float>(rank);
        read_row(kv, type, t * width, rank, c);
        apply_norm(c, rank, norm, type);
        write_row(cache, type, slots[t] * width, rank, c);
        turn_row(kv, t * width + rank, t, 1.0f, cache, slots[t] * width + rank);
    }

    void turn(int64_t head, Share some) const {
        scratch.start(4 * Scratch::bytes<float>(rope));
        for (int64_t t = some.begin; t < some.end; t++) {
            const int64_t i = t * heads + head;
            turn_row(q, i * (plain + rope) + plain, t, float(factor), out, i * (rank + rope) + rank);
            scratch.start(4 * Scratch::bytes<float>(rope));
        }
    }

    // Writes x[from, …), rotated by token t's factors, to y[to, to + rope); uses the remaining scratch memory.
    void turn_row(const void* x, int64_t from, int64_t t, float times, void* y, int64_t to) const {
        const Dtype type = Dtype(dtype);
        float* const straight = scratch.take<float>(rope);
        float* const turned = scratch.take<float>(rope);
        float* const cosines = scratch.take<float>(rope);
        float* const sines = scratch.take<float>(rope);
        read_row(x, type, from, rope, straight);
        read_row(own, type, t * rope, rope, cosines);
        read_row(other, type, t * rope, rope, sines);
        rotate_row(straight, cosines, sines, rope, turned);
        for (int64_t i = 0; i < rope; i++) turned[i] *= times;
        write_row(y, type, to, rope, turned);
    }

    // Computes some columns of W_upᵀ q for some rows: four rows of W_up at a time, added in order.
    template <typename T> void absorb(int64_t head, Share columns, Share some) const {
        const Dtype type = Dtype(dtype);
        const int64_t count = columns.end - columns.begin, padded = round_up(count, LANES), n = some.end - some.begin;
        scratch.start(Scratch::bytes<float>(n * plain) + Scratch::bytes<float>(n * padded));
        float* const queries = scratch.take<float>(n * plain);
        float* const sums = scratch.take<float>(n * padded);
        for (int64_t t = 0; t < n; t++) {
            read_row(q, type, ((some.begin + t) * heads + head) * (plain + rope), plain, queries + t * plain);
        }
        std::memset(sums, 0, size_t(n * padded) * 4);
        const T* const weights = static_cast<const T*>(up) + head * (plain + value_width) * rank + columns.begin;
        for (int64_t h = 0; h < plain; h += 4) {
            const int64_t last = plain - h < 4 ? plain - h : 4;
            for (int64_t t = 0; t < n; t++) {
                if (last == 4) add<T, 4>(weights + h * rank, queries + t * plain + h, count, sums + t * padded);
                else
                    for (int64_t i = h; i < h + last; i++) {
                        add<T, 1>(weights + i * rank, queries + t * plain + i, count, sums + t * padded);
                    }
            }
        }
        for (int64_t t = 0; t < n; t++) {
            float* const row = sums + t * padded;
            for (int64_t i = 0; i < count; i++) row[i] *= float(factor);
            write_row(out, type, ((some.begin + t) * heads + head) * (rank + rope) + columns.begin, count, row);
        }
    }

    // sums += Σ x[i] w[i], rows w of `rank` columns, of which `count` are used.
    template <typename T, int N> void add(const T* w, const float* x, int64_t count, float* sums) const {
        Floats factors[N];
        for (int n = 0; n < N; n++) factors[n] = broadcast(x[n]);
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            Floats y = load(sums + i);
            for (int n = 0; n < N; n++) y = fma(factors[n], load(w + n * rank + i), y);
            store(sums + i, y);
        }
        if (i < count) {
            Floats y = load(sums + i);
            for (int n = 0; n < N; n++) y = fma(factors[n], load_part(w + n * rank + i, count - i), y);
            store(sums + i, y);
        }
    }
};

struct LatentValues {
    const void* x;   // (rows, heads, rank)
    const void* up;  // as in LatentQueries
    void* y;         // (rows, heads, value_width)
    int64_t rows, heads, plain, value_width, rank, dtype;

    void run(int, int thread, int threads, std::atomic<int64_t>&) const {
        const Share mine = share(heads * value_width, 4, thread, threads);
        for (int64_t head = mine.begin / value_width; head * value_width < mine.end; head++) {
            const int64_t start = head * value_width, stop = start + value_width;
            const Share outputs{
                (mine.begin > start ? mine.begin : start) - start, (mine.end < stop ? mine.end : stop) - start};
            for (int64_t t = 0; t < rows; t += PANEL) multiply(head, outputs, {t, t + PANEL < rows ? t + PANEL : rows});
        }
    }

    void multiply(int64_t head, Share outputs, Share some) const {
        const Dtype type = Dtype(dtype);
        const int64_t n = some.end - some.begin, stride = round_up(rank, LANES), size = type == FLOAT32 ? 4 : 2;
        scratch.start(Scratch::bytes<float>(n * stride) + Scratch::bytes<float>(n * BAND));
        float* const floats = scratch.take<float>(n * stride);
        float* const band = scratch.take<float>(n * BAND);
        for (int64_t t = 0; t < n; t++) {
            read_row(x, type, ((some.begin + t) * heads + head) * rank, rank, floats + t * stride);
            std::memset(floats + t * stride + rank, 0, size_t(stride - rank) * 4);
        }
        const char* const values = static_cast<const char*>(up) + (head * (plain + value_width) + plain) * rank * size;
        const Matrix weight{values, nullptr, nullptr, PLAIN, value_width, rank, 0};
        Rows x_rows{};
        x_rows.count = n;
        x_rows.inputs = rank;
        x_rows.floats = floats;
        x_rows.float_stride = stride;
        for (int64_t o = outputs.begin; o < outputs.end; o += BAND) {
            const Share part{o, o + BAND < outputs.end ? o + BAND : outputs.end};
            any_product(weight, type, x_rows, part, band);
            for (int64_t t = 0; t < n; t++) {
                const int64_t to = ((some.begin + t) * heads + head) * value_width + part.begin;
                write_row(y, type, to, part.end - part.begin, band + t * BAND);
            }
        }
    }
};

}  // namespace
