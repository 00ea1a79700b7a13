// Both phases of paged attention, and queues, on three threads, under ThreadSanitizer (tests/unit/test_cpu_library.py).
//
// With an argument there is no barrier between the phases, which the sanitizer must report.
// The pool, the barrier and the division of work are those of all kernels; this file compiles in a second, and
// cpu_sanitized.cpp in four.

#include "paged_attention.h"

#include <cstdio>
#include <vector>

namespace {

bool with_barrier = true;

void run(const void* argument, int thread, int threads, Barrier& barrier) {
    std::atomic<int64_t> error{OK};
    for (int phase = 0; phase < Attention::PHASES; phase++) {
        static_cast<const Attention*>(argument)->run(phase, thread, threads, error);
        if (with_barrier) barrier.wait(threads);
    }
}

struct Taken {
    std::vector<int>* times;
    int64_t step, piece;
};

// Takes all items twice: the barrier empties the queue's counter.
void take(const void* argument, int thread, int threads, Barrier& barrier) {
    const Taken& taken = *static_cast<const Taken*>(argument);
    for (int i = 0; i < 2; i++) {
        Queue queue(int64_t(taken.times->size()), taken.step, taken.piece, thread, threads, &barrier.taken());
        for (Share part; queue.next(part);)
            for (int64_t j = part.begin; j < part.end; j++) (*taken.times)[size_t(j)]++;
        barrier.wait(threads);
    }
}

bool queues_are_whole() {
    for (int64_t count : {1, 5, 32, 61, 200}) {
        for (int64_t step : {1, 4, 16}) {
            std::vector<int> times(size_t(count), 0);
            const Taken taken{&times, step, 2 * step};
            pool().run({take, &taken, 3});
            for (int each : times) {
                if (each != 2) return false;
            }
        }
    }
    return true;
}

}  // namespace

int main(int count, char**) {
    with_barrier = count == 1;
    const int64_t rows = 3, heads = 2, width = 4, page = 16, pages = 20, splits = 2;
    std::vector<float> q(size_t(rows * heads * width), 0.5f), keys(size_t(pages * page * width), 0.25f), out(q.size());
    std::vector<float> partial(size_t(rows * heads * splits * (width + 2)));
    std::vector<int32_t> tables, lengths{1, 300, 40}, offsets{0, 1, 2, 3};
    for (int32_t i = 0; i < rows * pages; i++) tables.push_back(i % int32_t(pages));
    const Attention attention{q.data(), keys.data(), keys.data(), tables.data(), lengths.data(), offsets.data(),
                              partial.data(), out.data(), rows, rows, heads, 1, width, page, pages, pages, splits, 0, FLOAT32,
                              width};
    for (int i = 0; i < 20; i++) pool().run({run, &attention, 3});
    for (float value : out) {
        if (with_barrier && (value < 0.249f || value > 0.251f)) return 1;
    }
    if (with_barrier && !queues_are_whole()) return 1;
    std::printf("done\n");
    return 0;
}
