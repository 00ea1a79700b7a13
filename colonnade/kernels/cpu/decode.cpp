// Kernels of a decode step on a CPU, behind a C interface: runs a list of calls on all threads.
//
// One translation unit, which kernels/cpu/library.py compiles for one instruction set (simd.h).
//
//     colonnade_run(calls, count, threads)     runs a list of calls, one after another, each on all threads
//
// A call consists of a kernel's number and its arguments. A recorded step is one list, so it costs one call from Python
// (kernels/cpu/calls.py).
//
//     linear.h                 norm, product, gate, bias and residual for few rows
//     experts.h                router and mixture of experts
//     paged_attention.h        attention to the paged KV cache
//     latent_attention.h       queries, cache write and values of latent attention
//     embedding_norm_rope.h    embedding; norm; RoPE and cache write
//     skinny_gemm.h            products with weights stored by row; skinny_gemm_blocked.h: in blocks of 16 outputs
//     dynamic_quantisation.h   quantisation of rows of x to int8
//     row_math.h               conversion, exp, activations, sums and norms of rows
//     simd.h, thread_pool.h    vectors; worker threads and barrier
//
// Numerics: sums are in float32, in an order that depends only on the shape of a row, not on the number of rows, their
// division into tiles, or the number of threads. So a row's result does not depend, bitwise, on the other rows.
// With quantised weights a row of x is quantised to int8, and products are exact sums of integers per group.
//
// Arguments are validated in Python; inputs that change between replays (tokens, slots, lengths, pages) are checked
// here.

#include <atomic>
#include <cstdint>
#include <new>

#include "arguments.h"
#include "embedding_norm_rope.h"
#include "experts.h"
#include "latent_attention.h"
#include "linear.h"
#include "paged_attention.h"
#include "thread_pool.h"

namespace {

struct Call {
    int64_t kernel;
    const void* arguments;
};

enum Kernel : int64_t {
    LINEAR = 0, EMBEDDING = 1, NORM = 2, ROTATION = 3, ROPE_WRITE = 4, ATTENTION = 5, EXPERTS = 6,
    LATENT_QUERIES = 7, LATENT_VALUES = 8,
};

struct Step {
    const Call* calls;
    int64_t count;
    std::atomic<int64_t>* error;
};

template <typename K, typename... More>
void run_kernel(
    const void* arguments, int phase, int thread, int threads, std::atomic<int64_t>& error, More... more) {
    try {
        static_cast<const K*>(arguments)->run(phase, thread, threads, error, more...);
    } catch (const std::bad_alloc&) {
        error.store(NO_MEMORY);
    }
}

void run_step(const void* argument, int thread, int threads, Barrier& barrier) {
    const Step& step = *static_cast<const Step*>(argument);
    std::atomic<int64_t>* const taken = &barrier.taken();
    for (int64_t i = 0; i < step.count; i++) {
        const Call& call = step.calls[i];
        const int phases = call.kernel == ATTENTION ? Attention::PHASES : call.kernel == EXPERTS ? Experts::PHASES : 1;
        for (int phase = 0; phase < phases; phase++) {
            const void* a = call.arguments;
            switch (call.kernel) {
                case LINEAR: run_kernel<Linear>(a, phase, thread, threads, *step.error, taken); break;
                case EMBEDDING: run_kernel<Embedding>(a, phase, thread, threads, *step.error); break;
                case NORM: run_kernel<Norm>(a, phase, thread, threads, *step.error); break;
                case ROTATION: run_kernel<Rotation>(a, phase, thread, threads, *step.error); break;
                case ROPE_WRITE: run_kernel<RopeWrite>(a, phase, thread, threads, *step.error); break;
                case ATTENTION: run_kernel<Attention>(a, phase, thread, threads, *step.error); break;
                case EXPERTS: run_kernel<Experts>(a, phase, thread, threads, *step.error); break;
                case LATENT_QUERIES: run_kernel<LatentQueries>(a, phase, thread, threads, *step.error); break;
                case LATENT_VALUES: run_kernel<LatentValues>(a, phase, thread, threads, *step.error); break;
            }
            if (i + 1 < step.count && step.calls[i + 1].kernel == LINEAR) {
                static_cast<const Linear*>(step.calls[i + 1].arguments)->announce(thread, threads, taken);
            }
            barrier.wait(threads);
        }
    }
}

}  // namespace

extern "C" {

// Runs the calls in order, on `threads` threads; returns 0, or an Error.
int64_t colonnade_run(const Call* calls, int64_t count, int64_t threads) {
    std::atomic<int64_t> error{OK};
    const Step step{calls, count, &error};
    pool().run({run_step, &step, int(threads < 1 ? 1 : threads)});
    return error.load();
}

// Lanes of a float vector: 16, 8 or 4.
int64_t colonnade_lanes() { return LANES; }
}
