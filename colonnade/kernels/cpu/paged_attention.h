// Attention of each row to the keys of its request, up to its own position (kernels/attention/reference.py, paged).
//
// A task is SPLIT keys of one row and one key/value head, with the query heads that share it: all of them, or a part if
// there are fewer tasks than threads could use. Rows with more keys merge the tasks' softmax states in the second phase.
// Tasks begin at multiples of SPLIT, so a row's result depends, bitwise, neither on the batch nor on the threads.
//
// A thread runs its tasks on the same keys together, so that it reads memory in order: on one core of an AMD EPYC, reading
// 256 of each 768 bytes three times is four times as slow as reading all of them once.
//
// Latent attention has one key head, and a value is the first value_width elements of its key (latent_attention.h).

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "arguments.h"
#include "row_math.h"
#include "simd.h"
#include "thread_pool.h"

namespace {

constexpr int64_t KEYS_AHEAD = 24;   // prefetch distance in keys or values
constexpr int64_t SPLIT = 256;       // keys per task
constexpr int64_t ROW_BYTES = 4096;  // maximum bytes of a key's heads that are read together

struct Attention {
    const void *q, *keys, *values;    // (rows, heads, width); (pages, page_tokens, kv_heads, width)
    const int32_t *tables, *lengths, *cu_queries;
    float* partial;                   // (rows, heads, most_splits, value_width + 2): m, l, Σ e^(s − m) v
    void* out;                        // (rows, heads, value_width)
    int64_t rows, requests, heads, kv_heads, width, page_tokens, pages, table_width, most_splits, window, dtype;
    int64_t value_width;              // width, or less if values are the beginnings of keys

    static constexpr int PHASES = 2;

    // The keys [begin, end) that a row attends to, and its request; none for an invalid row.
    struct Seen {
        int64_t request, begin, end;
        int64_t first() const { return begin / SPLIT; }
        int64_t splits() const { return end > begin ? ceil_div(end, SPLIT) - first() : 0; }
    };
    Seen seen(int64_t row, int64_t& request, std::atomic<int64_t>& error) const {
        while (request < requests && cu_queries[request + 1] <= row) request++;
        if (request >= requests) return {0, 0, 0};
        const int64_t length = lengths[request], after = cu_queries[request + 1] - 1 - row;
        if (length == 0) return {request, 0, 0};
        if (length < 0 || length > table_width * page_tokens || length <= after) {
            error.store(BAD_LENGTH);
            return {request, 0, 0};
        }
        const int64_t end = length - after;
        return {request, window > 0 && end > window ? end - window : 0, end};
    }

    void run(int phase, int thread, int threads, std::atomic<int64_t>& error) const {
        const int64_t group = heads / kv_heads;
        int64_t tasks = 0, request = 0;
        if (phase == 1) {
            const Share mine = share(rows * heads, 1, thread, threads);
            for (int64_t i = mine.begin; i < mine.end; i++) {
                const Seen row = seen(i / heads, request, error);
                if (row.splits() > 1) merge(i, row.splits());
            }
            return;
        }
        for (int64_t t = 0; t < rows; t++) tasks += kv_heads * seen(t, request, error).splits();
        const int64_t each = heads_each(tasks, threads), parts = ceil_div(group, each), most = heads_at_once();
        const Share mine = share(tasks * parts, 1, thread, threads);
        const int64_t padded = round_up(width, LANES);
        scratch.start(
            2 * Scratch::bytes<float>(most * padded) + Scratch::bytes<float>(most * SPLIT) +
            Scratch::bytes<int64_t>(SPLIT));
        float* const query = scratch.take<float>(most * padded);
        float* const sums = scratch.take<float>(most * padded);
        float* const scores = scratch.take<float>(most * SPLIT);
        int64_t* const at = scratch.take<int64_t>(SPLIT);
        int64_t task = 0;
        request = 0;
        for (int64_t t = 0; t < rows; t++) {
            const Seen row = seen(t, request, error);
            if (row.end == row.begin && thread == 0) {
                for (int64_t i = 0; i < heads * value_width; i++) {
                    const float nothing = 0.0f;
                    write_row(out, Dtype(dtype), t * heads * value_width + i, 1, &nothing);
                }
            }
            // The tasks of a split are consecutive, and a thread merges its own into one: query heads [h, h + count).
            for (int64_t s = 0; s < row.splits(); s++, task += kv_heads * parts) {
                const int64_t begin = mine.begin > task ? mine.begin - task : 0;
                const int64_t end = mine.end - task < kv_heads * parts ? mine.end - task : kv_heads * parts;
                if (begin >= end) continue;
                const auto head = [&](int64_t i) {
                    const int64_t first = i % parts * each;
                    return i / parts * group + (first < group ? first : group);
                };
                for (int64_t h = head(begin), last = head(end); h < last;) {
                    const int64_t full = h - h % group + most, until = full < last ? full : last;
                    const Heads some{t * heads, h, until - h};
                    if (dtype == FLOAT32) split<float>(some, s, row, query, sums, scores, at, error);
                    else split<uint16_t>(some, s, row, query, sums, scores, at, error);
                    h = until;
                }
            }
        }
    }

    // Query heads of one task, if `tasks` have all heads of a group.
    int64_t heads_each(int64_t tasks, int threads) const {
        const int64_t group = heads / kv_heads, wanted = 2 * int64_t(threads);
        if (threads == 1 || tasks >= wanted) return group;
        return tasks == 0 ? group : ceil_div(group * tasks, wanted);
    }

    // Query heads that read keys and values together: those of as many key/value heads as fit ROW_BYTES.
    int64_t heads_at_once() const {
        const int64_t fit = ROW_BYTES / (width * (dtype == FLOAT32 ? 4 : 2));
        return heads / kv_heads * (fit < 1 ? 1 : fit > kv_heads ? kv_heads : fit);
    }

    struct Heads {
        int64_t row, first, count;  // `row`: the row's first head among those of all rows
    };

    template <typename T>
    void split(
        const Heads& some, int64_t s, const Seen& row, float* query, float* sums, float* scores, int64_t* at,
        std::atomic<int64_t>& error) const {
        const int64_t group = heads / kv_heads, padded = round_up(width, LANES), head = some.row + some.first;
        const int64_t first = some.first / group, heads_read = (some.first + some.count - 1) / group + 1 - first;
        const auto of = [&](int64_t g) { return ((some.first + g) / group - first) * width; };
        const int64_t from = (row.first() + s) * SPLIT, to = from + SPLIT;
        const int64_t begin = from < row.begin ? row.begin : from, end = to < row.end ? to : row.end;
        const int64_t count = end - begin;
        const int32_t* table = tables + row.request * table_width;
        for (int64_t i = 0; i < count;) {
            const int64_t page = table[(begin + i) / page_tokens], offset = (begin + i) % page_tokens;
            if (page < 0 || page >= pages) {
                error.store(BAD_PAGE);
                return;
            }
            for (int64_t j = offset; j < page_tokens && i < count; j++, i++) {
                at[i] = ((page * page_tokens + j) * kv_heads + first) * width;
            }
        }
        const float scale = 1.0f / std::sqrt(float(width));
        for (int64_t g = 0; g < some.count; g++) {
            float* const row_q = query + g * padded;
            read_row(q, Dtype(dtype), (head + g) * width, width, row_q);
            for (int64_t i = 0; i < width; i++) row_q[i] *= scale;
            for (int64_t i = width; i < padded; i++) row_q[i] = 0.0f;
        }
        const T *const all_keys = static_cast<const T*>(keys), *const all_values = static_cast<const T*>(values);
        const int64_t row_bytes = heads_read * width * int64_t(sizeof(T));
        // Prefetches the next cache lines of the keys and then of the values (latents have no separate values), equally
        // many in each step, since larger bursts would stall.
        const int64_t last = keys == values ? count : 2 * count;
        const int64_t row_lines = ceil_div(row_bytes, 64), each = ceil_div(LANES * row_lines, some.count);
        int64_t ahead = 0, line = 0;
        const auto request = [&](int64_t lines) PREFETCHING {
            while (lines > 0 && ahead < last) {
                const T* const start = ahead < count ? all_keys + at[ahead] : all_values + at[ahead - count];
                const int64_t now = row_lines - line < lines ? row_lines - line : lines;
                prefetch_far(reinterpret_cast<const char*>(start) + 64 * line, 64 * now);
                lines -= now;
                line += now;
                if (line == row_lines) line = 0, ahead++;
            }
        };
        request(KEYS_AHEAD * row_lines);
        for (int64_t i = 0; i < count; i += LANES) {
            const T* near[LANES];  // after the last key, the last one is repeated
            for (int64_t n = 0; n < LANES; n++) near[n] = all_keys + at[i + n < count ? i + n : count - 1];
            for (int64_t g = 0; g < some.count; g++) {
                request(each);
                store(scores + g * SPLIT + i, score(query + g * padded, near, of(g)));
            }
        }
        float* const totals = query;  // no longer needed
        for (int64_t g = 0; g < some.count; g++) {
            float* const weights = scores + g * SPLIT;
            const float most = largest(weights, count);
            for (int64_t i = 0; i < count; i++) weights[i] = exponential(weights[i] - most);
            totals[2 * g] = most;
            totals[2 * g + 1] = total_of(weights, count);
        }
        std::memset(sums, 0, size_t(some.count * padded) * 4);
        for (int64_t i = 0; i < count; i += LANES) {
            const int64_t part = count - i < LANES ? count - i : LANES;
            for (int64_t g = 0; g < some.count; g++) {
                request(each);
                weigh(scores + g * SPLIT + i, all_values + of(g), at + i, part, sums + g * padded);
            }
        }
        for (int64_t g = 0; g < some.count; g++) {
            float* const sum = sums + g * padded;
            if (row.splits() == 1) {
                for (int64_t i = 0; i < value_width; i++) sum[i] /= totals[2 * g + 1];
                write_row(out, Dtype(dtype), (head + g) * value_width, value_width, sum);
            } else {
                float* const to_state = state(head + g, s);
                std::memcpy(to_state, totals + 2 * g, 2 * sizeof(float));
                std::memcpy(to_state + 2, sum, size_t(value_width) * 4);
            }
        }
    }

    // The products of one query with LANES keys, `offset` behind near[n].
    template <typename T> Floats score(const float* query, const T* const* near, int64_t offset) const {
        Floats sums[LANES];
        for (int n = 0; n < LANES; n++) sums[n] = zero();
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const Floats q = load(query + i);
            for (int n = 0; n < LANES; n++) sums[n] = fma(q, load(near[n] + offset + i), sums[n]);
        }
        if (i < width) {
            const Floats q = load(query + i);
            for (int n = 0; n < LANES; n++) sums[n] = fma(q, load_part(near[n] + offset + i, width - i), sums[n]);
        }
        return sums_of(sums);
    }

    // sums += Σ weights[i] all[at[i]], four keys at a time, so that sums are loaded and stored once for four.
    template <typename T>
    void weigh(const float* weights, const T* all, const int64_t* at, int64_t count, float* sums) const {
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) {
            const Floats p[4] = {
                broadcast(weights[i]), broadcast(weights[i + 1]), broadcast(weights[i + 2]), broadcast(weights[i + 3])};
            int64_t j = 0;
            for (; j + LANES <= value_width; j += LANES) {
                Floats y = load(sums + j);
                for (int n = 0; n < 4; n++) y = fma(p[n], load(all + at[i + n] + j), y);
                store(sums + j, y);
            }
            if (j < value_width) {
                Floats y = load(sums + j);
                for (int n = 0; n < 4; n++) y = fma(p[n], load_part(all + at[i + n] + j, value_width - j), y);
                store(sums + j, y);
            }
        }
        for (; i < count; i++) {
            const Floats p = broadcast(weights[i]);
            int64_t j = 0;
            for (; j + LANES <= value_width; j += LANES) store(sums + j, fma(p, load(all + at[i] + j), load(sums + j)));
            if (j < value_width) store(sums + j, fma(p, load_part(all + at[i] + j, value_width - j), load(sums + j)));
        }
    }

    float* state(int64_t head, int64_t s) const { return partial + (head * most_splits + s) * (value_width + 2); }

    void merge(int64_t head, int64_t splits) const {
        float most = state(head, 0)[0], total = 0.0f;
        bool broken = false;
        for (int64_t s = 0; s < splits; s++) {
            const float m = state(head, s)[0];
            broken = broken || m != m;
            most = most < m ? m : most;
        }
        scratch.start(Scratch::bytes<float>(value_width));
        float* const sums = scratch.take<float>(value_width);
        std::memset(sums, 0, size_t(value_width) * 4);
        for (int64_t s = 0; s < splits; s++) {
            const float* const part = state(head, s);
            const float factor = broken ? std::nanf("") : exponential(part[0] - most);
            total = multiply_add(factor, part[1], total);
            for (int64_t i = 0; i < value_width; i++) sums[i] = multiply_add(factor, part[2 + i], sums[i]);
        }
        for (int64_t i = 0; i < value_width; i++) sums[i] /= total;
        write_row(out, Dtype(dtype), head * value_width, value_width, sums);
    }
};

}  // namespace
