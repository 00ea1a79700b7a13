// Multiplies rows of x by ternary weights, one thread block per SM (cuda_ternary.py).
//
// Macros defined by the host: TRITS, REST (nonzero weights per word except the last), BF16, PER (words per load of a
// lane), GATED, SILU, ROUTED (experts), TOKENS (rows of x are tokens), WEIGHTED (0; 2: routing weights in x's dtype; 4:
// in float32), WARPS, TABLE_WORDS.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

struct Args {
  const u16* x;
  const i64 *order, *ends;
  const char *routing, *up, *gate, *tables;
  const u16 *up_scales, *gate_scales;
  u16* y;
  i64 stride;  // stride of x in elements
  int outputs, inputs, words, experts, active;
  int blocks, tiles, most;  // thread blocks per row; tiles of 32 outputs, in all and at most per block
};

constexpr int THREADS = 32 * WARPS, MATRICES = GATED ? 2 : 1, RANGE_OFFSET = 124;
// A column of x: x and −x for each position in a word, and a pair of zeros. Positions lie in different banks.
constexpr int COLUMN_BYTES = 4 * TRITS + 4;

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 load32(u32 at) {
  u32 r;
  asm("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(at));
  return r;
}
__device__ __forceinline__ float widen(u16 x) {
#if BF16
  return __uint_as_float((u32)x << 16);
#else
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
#endif
}
__device__ __forceinline__ u16 narrow(float x) {
  u16 r;
#if BF16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
#endif
  return r;
}
__device__ __forceinline__ float term(u32 column, u32 offset) {
  u16 r;
  asm("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(column + offset));
  return widen(r);
}

// Bulk copies, each with its own barrier, which is used once.
__device__ __forceinline__ void copy(u32 to, const char* from, u32 bytes, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier) {
  asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], 0; @done bra over; bra again; over:}"
               ::"r"(barrier) : "memory");
}

// Σ ± x of a word. Words are ordered by the position and sign of their last nonzero weight, so a range of 32 belongs to
// one block of words or to two consecutive ones. The entry of a range has the block's first word (16 bits), the offset
// of its last weight in a column, and where in the range the next block begins. The other weights of a word are looked up
// by its number in its block.
__device__ __forceinline__ float sum_of(u32 word, u32 column, u32 ranges, u32 rests) {
  const u32 entry = load32(ranges + 4 * min(word, RANGE_OFFSET + (word >> 5)));
  const u32 within = word & 31, border = entry >> 24;
  const bool next = within >= border;
  const u32 rest = load32(rests + 4 * (next ? within - border : word - (entry & 0xffff)));
  float sum = term(column, (entry >> 16 & 255) + (next ? 2 : 0));
#pragma unroll
  for (int j = 0; j < REST; j++) sum += term(column, rest >> 8 * j & 255);
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) ternary(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char memory[];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int row = blockIdx.x / a.blocks, block = blockIdx.x % a.blocks;
  int expert = 0;
  i64 token = row;
#if ROUTED
  for (int first = 0; first < a.experts; first += THREADS)
    expert += __syncthreads_count(first + thread < a.experts && a.ends[first + thread] <= row);
  if (expert >= a.experts) return;
  if (TOKENS) token = a.order[row] / a.active;
#endif
  const int own = (a.tiles - block + a.blocks - 1) / a.blocks, items = own * MATRICES;
  const u32 tile_bytes = 64 * a.words;
  const u32 tables = address(memory), column_0 = tables + 4 * TABLE_WORDS;
  const u32 weights = column_0 + (COLUMN_BYTES * a.words + 15) / 16 * 16;
  float* partial = (float*)(memory + (weights - tables) + a.most * MATRICES * tile_bytes);  // [item][warp][lane]
  const u32 barriers = address(partial + a.most * MATRICES * THREADS);
  if (thread == 0) {
    for (int i = 0; i <= items; i++) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    copy(tables, a.tables, 4 * TABLE_WORDS, barriers + 8 * items);
    for (int i = 0; i < items; i++) {
      const int first = (block + i / MATRICES * a.blocks) * 32;
      const char* from = (i % MATRICES ? a.gate : a.up) + ((i64)expert * a.outputs + first) * a.words * 2;
      copy(weights + i * tile_bytes, from, 2 * a.words * min(32, a.outputs - first), barriers + 8 * i);
    }
  }
  for (int d = thread; d < a.words * TRITS; d += THREADS) {
    const u32 x = d < a.inputs ? a.x[token * a.stride + d] : 0, to = column_0 + d / TRITS * COLUMN_BYTES + d % TRITS * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x | (x ^ 0x8000) << 16) : "memory");
  }
  for (int c = thread; c < a.words; c += THREADS)
    asm volatile("st.shared.b32 [%0], 0;" ::"r"(column_0 + c * COLUMN_BYTES + 4 * TRITS) : "memory");
  __syncthreads();
  wait(barriers + 8 * items);

  const u32 rests = tables + 4 * (RANGE_OFFSET + 2048);
  const int chunks = a.words / PER;
  int turn = warp;  // chunks of all items are assigned to warps round-robin
  for (int i = 0; i < items; i++) {
    const int first = (block + i / MATRICES * a.blocks) * 32;
    float sum = 0;
    wait(barriers + 8 * i);
    if (first + lane < a.outputs) {
      const u32 at = weights + i * tile_bytes + lane * 2 * a.words;
#pragma unroll 2
      for (int j = turn; j < chunks; j += WARPS) {
        u32 pairs[2] = {0, 0};
        if (PER == 4) asm("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(pairs[0]), "=r"(pairs[1]) : "r"(at + 8 * j));
        if (PER == 2) pairs[0] = load32(at + 4 * j);
        if (PER == 1) {
          u16 one;
          asm("ld.shared.u16 %0, [%1];" : "=h"(one) : "r"(at + 2 * j));
          pairs[0] = one;
        }
        const u32 column = column_0 + j * PER * COLUMN_BYTES;
#pragma unroll
        for (int k = 0; k < PER; k++)
          sum += sum_of(k % 2 ? pairs[k / 2] >> 16 : pairs[k / 2] & 0xffff, column + k * COLUMN_BYTES, tables, rests);
      }
    }
    partial[(i * WARPS + warp) * 32 + lane] = sum;
    turn = (turn + WARPS - chunks % WARPS) % WARPS;
  }
  __syncthreads();
  for (int o = thread; o < own * 32; o += THREADS) {
    const int tile = o / 32, f = (block + tile * a.blocks) * 32 + o % 32;
    if (f >= a.outputs) continue;
    float sums[MATRICES];
#pragma unroll
    for (int m = 0; m < MATRICES; m++) {
      float sum = 0;
      for (int w = 0; w < WARPS; w++) sum += partial[((tile * MATRICES + m) * WARPS + w) * 32 + o % 32];
      const u16 scale = (m ? a.gate_scales : a.up_scales)[(i64)expert * a.outputs + f];
      sums[m] = sum * __uint_as_float((u32)scale << 16);
    }
    float y = sums[0];
    if (SILU) {
      const float g = sums[MATRICES - 1], activated = g / (1 + __expf(-g));
      y = GATED ? y * activated : activated;
    }
    if (WEIGHTED == 4) y *= ((const float*)a.routing)[a.order[row]];
    if (WEIGHTED == 2) y *= widen(((const u16*)a.routing)[a.order[row]]);
    a.y[(i64)row * a.outputs + f] = narrow(y);
  }
}
