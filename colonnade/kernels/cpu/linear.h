// A linear layer for few rows: norm, product (gated, as in SwiGLU), bias, activation and residual in one kernel.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "arguments.h"
#include "dynamic_quantisation.h"
#include "row_math.h"
#include "simd.h"
#include "skinny_gemm.h"
#include "skinny_gemm_blocked.h"
#include "thread_pool.h"

namespace {

constexpr int64_t PANEL = 64;            // rows of x that are prepared at a time
constexpr int64_t PIECE_BYTES = 1 << 16;  // piece of a large weight that a thread takes at a time

// y = W x̂ + b (+ residual), or y = act(G x̂ + c) ⊙ (W x̂ + b), or y = act(W x̂ + b); x̂ is x or norm(x).
struct Linear {
    const void* x;
    const void* residual;  // null: none; may be y
    void* y;
    NormWeights norm;
    Matrix weight, gate;
    int64_t rows, x_stride, dtype, activation;

    // With few rows, threads divide the outputs, and each thread prepares all rows for itself, which costs less than a
    // barrier. With many, threads divide the rows. `taken` is the counter of a Queue; it must be 0 at the start.
    void run(int, int thread, int threads, std::atomic<int64_t>&, std::atomic<int64_t>* taken = nullptr) const {
        const bool by_rows = cut_by_rows(threads);
        const Share mine = by_rows ? share(rows, 4, thread, threads) : Share{0, rows};
        for (int64_t t = mine.begin; t < mine.end; t += PANEL) {
            const Share part{t, t + PANEL < mine.end ? t + PANEL : mine.end};
            Queue outputs = by_rows ? Queue(weight.outputs, step(), 0, 0, 1, nullptr) : queue(thread, threads, taken);
            if (outputs.empty()) continue;
            if (weight.kind >= INT8_BLOCKS) block_panel(part, outputs);
            else panel(part, outputs);
        }
    }

    bool cut_by_rows(int threads) const { return rows >= 32 * threads; }

    // Each thread's share of the outputs is a multiple of this.
    int64_t step() const { return weight.kind >= INT8_BLOCKS ? BLOCK : 4; }

    // Threads divide the outputs; those of large weights are taken in pieces of about PIECE_BYTES.
    Queue queue(int thread, int threads, std::atomic<int64_t>* taken) const {
        const int64_t bytes = row_bytes(weight, Dtype(dtype)) * (gate.values == nullptr ? 1 : 2);
        const bool large = threads > 1 && rows <= PANEL && weight.outputs * bytes >= 4 * PIECE_BYTES * threads;
        const int64_t steps = PIECE_BYTES / (bytes * step()), most = BAND / step();
        const int64_t piece = (steps < 1 ? 1 : steps > most ? most : steps) * step();
        return Queue(weight.outputs, step(), piece, thread, threads, large ? taken : nullptr);
    }

    // Row t of x after the norm, in float32, with zeros up to `padded`.
    void prepare(int64_t t, int64_t padded, float* row) const {
        read_row(x, Dtype(dtype), t * x_stride, weight.inputs, row);
        std::memset(row + weight.inputs, 0, size_t(padded - weight.inputs) * 4);
        if (norm.weight != nullptr) apply_norm(row, weight.inputs, norm, Dtype(dtype));
    }

    void block_panel(Share part, Queue& outputs) const {
        const bool int8 = weight.kind == INT8_BLOCKS;
        const int64_t group = int8 ? X_GROUP : weight.group, count = part.end - part.begin;
        const int64_t groups = ceil_div(weight.inputs, group), stride = groups * group;
        // One row reads a gated pair of weights one after the other, so that each is read in order.
        const int64_t band = count == 1 && gate.values != nullptr ? round_up(weight.outputs, BAND) : BAND;
        scratch.start(
            Scratch::bytes<float>(stride) + Scratch::bytes<int8_t>(count * stride) +
            3 * Scratch::bytes<float>(count * groups) + 2 * Scratch::bytes<float>(count * band));
        float* const row = scratch.take<float>(stride);
        int8_t* const bytes = scratch.take<int8_t>(count * stride);
        float* const scales = scratch.take<float>(count * groups);
        float* const sums = scratch.take<float>(count * groups);
        int32_t* const totals = scratch.take<int32_t>(count * groups);
        float* const ys = scratch.take<float>(count * band);
        float* const gs = scratch.take<float>(count * band);
        for (int64_t t = 0; t < count; t++) {
            prepare(part.begin + t, stride, row);
            const int64_t i = t * groups;
            if (group == 32) quantise_block_row<32>(row, groups, bytes + t * stride, scales + i, sums + i, totals + i);
            else if (group == 64) quantise_block_row<64>(row, groups, bytes + t * stride, scales + i, sums + i, totals + i);
            else quantise_block_row<128>(row, groups, bytes + t * stride, scales + i, sums + i, totals + i);
        }
        const BlockRows x_rows{count, stride, groups, bytes, scales, sums, totals};
        for (Share piece; outputs.next(piece);) {
            for (int64_t o = piece.begin; o < piece.end; o += band) {
                const Share some{o, o + band < piece.end ? o + band : piece.end};
                any_block_product(weight, x_rows, some, ys);
                if (gate.values != nullptr) any_block_product(gate, x_rows, some, gs);
                for (int64_t t = 0; t < count; t++) finish(some, part.begin + t, ys + t * BAND, gs + t * BAND);
            }
        }
    }

    void panel(Share part, Queue& outputs) const {
        const Dtype type = Dtype(dtype);
        const int64_t count = part.end - part.begin;
        const bool plain = weight.kind == PLAIN, int4 = weight.kind == INT4;
        // Rows that need no norm, conversion or padding are read in place.
        const bool as_is = plain && type == FLOAT32 && norm.weight == nullptr && weight.inputs % LANES == 0;
        Rows x_rows{};
        x_rows.count = count;
        x_rows.inputs = weight.inputs;
        x_rows.float_stride = as_is ? x_stride : round_up(weight.inputs, LANES);
        x_rows.units = plain ? 0 : unit_count(weight);
        x_rows.groups = int4 ? ceil_div(weight.inputs, weight.group) : 0;
        x_rows.sum_stride = round_up(x_rows.groups, LANES);
        const int64_t floats = as_is ? 0 : (plain ? count : 1) * x_rows.float_stride, x_bytes = x_rows.units * UNIT * (int4 ? 2 : 1);
        const int64_t bytes = count * x_bytes, scales = count * x_rows.units * LANES;
        const int64_t sums = count * x_rows.sum_stride, band = count * BAND;
        scratch.start(
            Scratch::bytes<float>(floats) + Scratch::bytes<int8_t>(bytes) + Scratch::bytes<float>(scales) +
            Scratch::bytes<float>(sums) + 2 * Scratch::bytes<float>(band));
        float* const float_rows = scratch.take<float>(floats);
        int8_t* const byte_rows = scratch.take<int8_t>(bytes);
        float* const lane_scales = scratch.take<float>(scales);
        float* const group_sums = scratch.take<float>(sums);
        float* const ys = scratch.take<float>(band);
        float* const gs = scratch.take<float>(band);
        x_rows.floats = as_is ? static_cast<const float*>(x) + part.begin * x_stride : float_rows;
        x_rows.bytes = byte_rows;
        x_rows.scales = lane_scales;
        x_rows.sums = group_sums;
        for (int64_t t = 0; t < count && !as_is; t++) {
            float* const row = float_rows + (plain ? t * x_rows.float_stride : 0);
            prepare(part.begin + t, x_rows.float_stride, row);
            int8_t* const p = byte_rows + t * x_bytes;
            float* const z = lane_scales + t * x_rows.units * LANES;
            float* const s = group_sums + t * x_rows.sum_stride;
            if (weight.kind == INT8) quantise_int8(row, x_rows, p, z);
            else if (int4 && weight.group == 32) quantise_int4<32>(row, x_rows, p, z, s);
            else if (int4 && weight.group == 64) quantise_int4<64>(row, x_rows, p, z, s);
            else if (int4) quantise_int4<128>(row, x_rows, p, z, s);
        }
        for (Share piece; outputs.next(piece);) {
            for (int64_t o = piece.begin; o < piece.end; o += BAND) {
                const Share some{o, o + BAND < piece.end ? o + BAND : piece.end};
                any_product(weight, type, x_rows, some, ys);
                if (gate.values != nullptr) any_product(gate, type, x_rows, some, gs);
                for (int64_t t = 0; t < count; t++) finish(some, part.begin + t, ys + t * BAND, gs + t * BAND);
            }
        }
    }

    // Prefetches what this thread will read first in run(): the norm's weights, and the first weights and scales.
    PREFETCHING void announce(int thread, int threads, std::atomic<int64_t>* taken) const {
        const Share mine = cut_by_rows(threads) ? Share{0, weight.outputs} : queue(thread, threads, taken).own();
        const int64_t bytes = row_bytes(weight, Dtype(dtype)), left = (mine.end - mine.begin) * bytes;
        const int64_t first = left < AHEAD ? left : AHEAD;
        if (norm.weight != nullptr) prefetch(norm.weight, weight.inputs * (dtype == FLOAT32 ? 4 : 2));
        const Matrix* const matrices[] = {&weight, &gate};
        for (const Matrix* matrix : matrices) {
            if (matrix->values == nullptr) continue;
            prefetch_far(static_cast<const char*>(matrix->values) + mine.begin * bytes, first);
            if (weight.kind != INT4 && weight.kind != INT4_BLOCKS) continue;
            const int64_t scale_bytes = 8 * bytes / weight.group;  // of a row: 4 bytes for group / 2 bytes of values
            prefetch_far(static_cast<const char*>(matrix->scales) + mine.begin * scale_bytes, 8 * first / weight.group);
        }
    }

    void finish(Share part, int64_t row, float* ys, float* gs) const {
        const Dtype type = Dtype(dtype);
        const int64_t count = part.end - part.begin, start = row * weight.outputs + part.begin;
        if (weight.bias != nullptr) {
            for (int64_t i = 0; i < count; i++) ys[i] += element(weight.bias, type, part.begin + i);
        }
        if (gate.values != nullptr) {
            if (gate.bias != nullptr) {
                for (int64_t i = 0; i < count; i++) gs[i] += element(gate.bias, type, part.begin + i);
            }
            if (activation == SILU) {
                for (int64_t i = 0; i < count; i++) ys[i] *= activate(gs[i], SILU);
            } else {
                for (int64_t i = 0; i < count; i++) ys[i] *= activate(gs[i], Activation(activation));
            }
        } else if (activation == GELU_TANH) {
            for (int64_t i = 0; i < count; i++) ys[i] = activate(ys[i], GELU_TANH);
        } else if (activation != NONE) {
            for (int64_t i = 0; i < count; i++) ys[i] = activate(ys[i], Activation(activation));
        }
        if (residual != nullptr) {
            for (int64_t i = 0; i < count; i++) ys[i] += element(residual, type, start + i);
        }
        write_row(y, type, start, count, ys);
    }
};

}  // namespace
