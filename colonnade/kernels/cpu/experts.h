// A mixture of experts: norm, router, selected experts, and their weighted sum added to the residual stream.
//
//     l = W_r norm(x) + b        i = the A highest l        w = softmax(l)_i [/ Σ] · scale        y = x + Σ_j w_j E_{i_j}(norm(x))
//
// Choices are sorted by expert, so that rows with the same expert are multiplied together. The products are those of
// Linear, so a row's result does not depend, bitwise, on the other rows.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "arguments.h"
#include "linear.h"
#include "row_math.h"
#include "thread_pool.h"

namespace {

thread_local Scratch expert_scratch;  // Linear uses its own

struct ExpertMatrices {
    Matrix first;  // of expert 0
    int64_t value_bytes, scale_bytes, bias_bytes;  // from one expert to the next

    Matrix at(int64_t e) const {
        const auto next = [e](const void* p, int64_t bytes) {
            return p == nullptr ? nullptr : static_cast<const void*>(static_cast<const char*>(p) + e * bytes);
        };
        Matrix matrix = first;
        matrix.values = next(first.values, value_bytes);
        matrix.scales = next(first.scales, scale_bytes);
        matrix.bias = next(first.bias, bias_bytes);
        return matrix;
    }
};

struct Experts {
    const void* x;  // (rows, width)
    void* y;        // likewise
    NormWeights norm;
    Matrix router;  // plain, (experts, width)
    ExpertMatrices up, gate, down;
    void *normed, *hidden, *outputs;  // (rows, width), (choices, hidden units), (choices, width); choices = rows · active
    int32_t *ids, *places;            // per choice: its expert, and its position among the sorted choices
    float* shares;                    // per choice: w
    int64_t rows, active, normalise, activation, dtype;
    double scale;

    static constexpr int PHASES = 4;

    void run(int phase, int thread, int threads, std::atomic<int64_t>& error) const {
        // After a failed allocation, the results of the previous phase do not exist.
        if (phase > 0 && error.load() == NO_MEMORY) return;
        const Share mine = share(rows, 1, thread, threads);
        if (phase == 0) {
            for (int64_t t = mine.begin; t < mine.end; t++) route(t);
        } else if (phase == 3) {
            for (int64_t t = mine.begin; t < mine.end; t++) combine(t);
        } else {
            multiply(phase == 1, thread, threads, error);
        }
    }

    void route(int64_t t) const {
        const Dtype type = Dtype(dtype);
        const int64_t width = router.inputs, count = router.outputs;
        scratch.start(2 * Scratch::bytes<float>(width) + Scratch::bytes<float>(count) + Scratch::bytes<bool>(count));
        float* const row = scratch.take<float>(width);
        float* const weights = scratch.take<float>(width);
        float* const logits = scratch.take<float>(count);
        bool* const chosen = scratch.take<bool>(count);
        read_row(x, type, t * width, width, row);
        if (norm.weight != nullptr) apply_norm(row, width, norm, Dtype(dtype));
        write_row(normed, type, t * width, width, row);
        read_row(normed, type, t * width, width, row);
        for (int64_t e = 0; e < count; e++) {
            read_row(router.values, type, e * width, width, weights);
            logits[e] = inner_product(row, weights, width);
            if (router.bias != nullptr) logits[e] += element(router.bias, type, e);
            chosen[e] = false;
        }
        const float most = largest(logits, count);
        float total = 0.0f, sum_of_chosen = 0.0f;
        for (int64_t e = 0; e < count; e++) total += exponential(logits[e] - most);
        for (int64_t j = 0; j < active; j++) {
            int64_t best = -1;
            for (int64_t e = 0; e < count; e++) {
                if (!chosen[e] && (best < 0 || logits[e] > logits[best])) best = e;
            }
            chosen[best] = true;
            ids[t * active + j] = int32_t(best);
            shares[t * active + j] = exponential(logits[best] - most) / total;
            sum_of_chosen += shares[t * active + j];
        }
        const float factor = float(scale) / (normalise == 0 ? 1.0f : sum_of_chosen < 1e-20f ? 1e-20f : sum_of_chosen);
        for (int64_t j = 0; j < active; j++) shares[t * active + j] *= factor;
    }

    // hidden = act(G x) ⊙ (U x), or outputs = D hidden, of all choices, sorted by expert.
    void multiply(bool first, int thread, int threads, std::atomic<int64_t>& error) const {
        const int64_t choices = rows * active, count = router.outputs, size = dtype == FLOAT32 ? 4 : 2;
        const int64_t width = router.inputs, units = up.first.outputs;
        expert_scratch.start(
            Scratch::bytes<int64_t>(count + 1) + Scratch::bytes<int64_t>(choices) + Scratch::bytes<char>(rows * width * size));
        int64_t* const ends = expert_scratch.take<int64_t>(count + 1);
        int64_t* const order = expert_scratch.take<int64_t>(choices);
        char* const gathered = expert_scratch.take<char>(rows * width * size);
        for (int64_t e = 0; e <= count; e++) ends[e] = 0;
        for (int64_t c = 0; c < choices; c++) ends[ids[c] + 1]++;
        for (int64_t e = 0; e < count; e++) ends[e + 1] += ends[e];
        for (int64_t c = 0; c < choices; c++) order[ends[ids[c]]++] = c;  // ends[e] is now the end of e
        for (int64_t e = 0, begin = 0; e < count; begin = ends[e++]) {
            const int64_t n = ends[e] - begin;
            if (n == 0) continue;
            Linear linear{};
            linear.rows = n;
            linear.dtype = dtype;
            if (first) {
                for (int64_t i = 0; i < n; i++) {
                    const int64_t c = order[begin + i];
                    if (thread == 0) places[c] = int32_t(begin + i);
                    const char* const row = static_cast<const char*>(normed) + c / active * width * size;
                    std::memcpy(gathered + i * width * size, row, size_t(width * size));
                }
                linear.x = gathered;
                linear.y = static_cast<char*>(hidden) + begin * units * size;
                linear.weight = up.at(e);
                if (gate.first.values != nullptr) linear.gate = gate.at(e);
                linear.activation = activation;
                linear.x_stride = width;
            } else {
                linear.x = static_cast<const char*>(hidden) + begin * units * size;
                linear.y = static_cast<char*>(outputs) + begin * width * size;
                linear.weight = down.at(e);
                linear.activation = NONE;
                linear.x_stride = units;
            }
            linear.run(0, thread, threads, error);
        }
    }

    void combine(int64_t t) const {
        const Dtype type = Dtype(dtype);
        const int64_t width = router.inputs;
        scratch.start(3 * Scratch::bytes<float>(width));
        float* const sum_of = scratch.take<float>(width);
        float* const one = scratch.take<float>(width);
        float* const residual = scratch.take<float>(width);
        std::memset(sum_of, 0, size_t(width) * 4);
        for (int64_t j = 0; j < active; j++) {
            const int64_t c = t * active + j;
            read_row(outputs, type, places[c] * width, width, one);
            for (int64_t i = 0; i < width; i++) sum_of[i] = multiply_add(shares[c], one[i], sum_of[i]);
        }
        read_row(x, type, t * width, width, residual);
        for (int64_t i = 0; i < width; i++) sum_of[i] += residual[i];
        write_row(y, type, t * width, width, sum_of);
    }
};

}  // namespace
