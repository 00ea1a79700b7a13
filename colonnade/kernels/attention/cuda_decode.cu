// Flash-Decoding in CUDA C++: split-KV attention over a paged cache, compiled at run time (cuda_decode.py).
//
// The warps of a block form teams; a team is one of the plan's workers and takes the pieces of keys that the plan gives
// it, in order. Its warps take a piece's tiles of 16 tokens in turn. Each warp has its own ring of tiles in shared
// memory, filled by 16-byte asynchronous copies, so that the loop has no barrier and the next piece's keys are loading
// while a piece ends. Tokens are the M dimension of the
// tensor cores' products, S^T = K Q^T and O^T = V^T P^T, query rows are N: 8 rows fill a product.
//
// The warps' states are combined in shared memory. A piece that is a whole line writes the output. The others' states
// go to slots: with MERGE each team of a cut line merges a share of the output itself, else another kernel does.
//
// MERGE needs no fence, counter or second launch. Slots hold NaN (all bits 1) before and after each launch. A state is
// written with plain stores and read by exactly one thread, which polls until no word is that NaN, then resets the
// slot. A team writes all its states before it polls, so nothing can wait in a circle once all blocks are resident;
// the cooperative launch guarantees that they are.
//
// Lengths and page ids are checked here: tokens at or beyond the length and pages outside the cache read nothing.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

// Macros from the host: H, GROUP, NT (8 query rows each), PAGE, WARPS, TEAM (warps of a team), STAGES, BF16,
// CACHE (0: 16 bits as the queries, 1: float8 e4m3, 2: int8), WINDOWED, CAPPED, SLOPES, SINKS, SCALED, SINGLE, MERGE,
// EARLY (launch the dependent kernel), SHARED_Q (queries pass through shared memory), COMPUTE (0: loads alone).

struct Args {
  const char *q, *k, *v;
  u16* o;
  float *lse, *slot_o, *slot_lse;
  const int *plan, *pages, *cu, *lengths;
  const float *slopes, *sinks, *k_scale, *v_scale;
  i64 q_t, q_n, k_page, k_p, k_k, v_page, v_p, v_k;  // strides in bytes
  int pages_r, columns, cache_pages, items_at, firsts_at, merges_at, heads, window;
  float scale, cap;
};

constexpr int TOKENS = 16, FIELDS = 8, ROWS = 8 * NT, KSTEPS = H / 16, QUADS = H / 4;
constexpr int THREADS = 32 * WARPS, TEAMS = WARPS / TEAM;
static_assert(WARPS % TEAM == 0 && (NT == 1 || TEAMS == 1), "teams are equal, and share queries of many rows");
constexpr int PARTS = 4;  // states of a line that a lane holds at once
constexpr int CHUNKS = H * (CACHE ? 1 : 2) / 16;  // 16-byte chunks of a token
// Rows of 8 chunks are swizzled; others have an odd number, so that 8 rows lie in different banks.
constexpr bool SWIZZLED = CHUNKS % 8 == 0;
constexpr int ROW_BYTES = SWIZZLED ? CHUNKS * 16 : (CHUNKS | 1) * 16;
constexpr int TILE_BYTES = TOKENS * ROW_BYTES, STAGE_BYTES = 2 * TILE_BYTES;
// Rows of states that warps leave for each other lie in different banks, too.
constexpr int O_ROW = H % 32 ? H + 4 : H;
constexpr int Q_CHUNKS = H / 8, Q_ROW_BYTES = 16 * (Q_CHUNKS % 8 ? Q_CHUNKS | 1 : Q_CHUNKS);
__device__ __forceinline__ int q_place(int row, int chunk) {
  return row * Q_ROW_BYTES + (Q_CHUNKS % 8 ? chunk : chunk ^ row) * 16;
}
constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES, O_BYTES = WARPS * 8 * O_ROW * 4;
__device__ __forceinline__ int o_place(int row, int d) { return row * O_ROW + (H % 32 ? d : d ^ (row & 6) << 2); }
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define INF __int_as_float(0x7f800000)
// Weights are kept this many powers of 2 above the usual, so that small ones are normal numbers of float16.
constexpr float LIFT = BF16 && !CACHE ? 0.f : 10.f;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(u32 to, const char* from, int bytes, u64 policy) {
  // Fewer bytes than 16 are filled up with zeros: none is read of a token that is not there. Keys are read once, and
  // evicted first; a hint to prefetch 256 bytes at a time costs 7% of a large cache's speed.
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               ::"r"(to), "l"(from), "r"(bytes), "l"(policy));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

__device__ __forceinline__ void load_matrices(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void load_transposed(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

#if BF16 && !CACHE
#define TYPE "bf16"
#else
#define TYPE "f16"
#endif
__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ u32 pack_output(float low, float high) {
  u32 r;
  if (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ u32 transpose(u32 x) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}
__device__ __forceinline__ float power2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float log_2(float x) {
  float r;
  asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float inverse(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float finite_or_0(float top) { return top == -INF ? 0.f : top; }

// The two halves of four numbers of 8 bits as pairs of float16.
__device__ __forceinline__ void widen(u32 x, u32& low, u32& high) {
#if CACHE == 1
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
      : "=r"(low), "=r"(high) : "r"(x));
#else
  // As float16, 0x64 above a byte u is 1024 + u.
  x ^= 0x80808080u;
  asm("{.reg .b32 a, b; prmt.b32 a, %2, 0x64646464, 0x4140; prmt.b32 b, %2, 0x64646464, 0x4342;"
      " sub.f16x2 %0, a, %3; sub.f16x2 %1, b, %3;}" : "=r"(low), "=r"(high) : "r"(x), "r"(0x64806480u));
#endif
}

// A pair of queries' numbers as float32, and back as a pair for the tensor cores, times a power of 2.
__device__ __forceinline__ float2 unpack(u32 x) {
  float2 r;
  if (BF16) {
    r.x = __uint_as_float(x << 16);
    r.y = __uint_as_float(x & 0xffff0000u);
  } else {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(r.x), "=f"(r.y) : "r"(x));
  }
  return r;
}

struct Item {
  int request, head, block, first, end, slot, share;
};
struct Queries {  // of a request: how many keys, its first query's row of the stream, how many queries
  int length, start, count;
};

__device__ __forceinline__ Queries queries_of(const Args& a, int request) {
  Queries r;
  r.length = __ldg(a.lengths + request);
  r.start = SINGLE ? request : __ldg(a.cu + request);
  r.count = SINGLE ? 1 : __ldg(a.cu + request + 1) - r.start;
  return r;
}

// The first tile from token ``first`` on that is this warp's: tiles are assigned by position, whatever the piece is.
__device__ __forceinline__ int first_tile(int first, int member) {
  const int tile = first / TOKENS;
  return tile + (member + TEAM - tile % TEAM) % TEAM;
}

__device__ __forceinline__ void team_barrier(int team) {
  if (TEAMS == 1) __syncthreads();
  else if (TEAM == 1) __syncwarp();
  else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM * 32) : "memory");
}

__device__ __forceinline__ void write_output(const Args& a, const Item& item, int start, int row, int d, float top,
                                             float total, float4 o) {
  const int m = item.block * ROWS + row, n = item.head * GROUP + m % GROUP;
#if SINKS
  const float sink = __ldg(a.sinks + n) * LOG2E, higher = fmaxf(top, sink), base = finite_or_0(higher);
  const float shrink = power2(top - base);
  o.x *= shrink; o.y *= shrink; o.z *= shrink; o.w *= shrink;
  total = total * shrink + power2(sink - base);
  top = higher;
#endif
  const float each = total == 0.f ? 0.f : inverse(total);
  const i64 line = (i64)(start + m / GROUP) * a.heads + n;
  *(uint2*)(a.o + line * H + d) = make_uint2(pack_output(o.x * each, o.y * each), pack_output(o.z * each, o.w * each));
  if (d == 0) a.lse[line] = total == 0.f ? -INF : (top + log_2(total)) * LN2;
}

// A word that is never the pattern of an empty slot.
__device__ __forceinline__ float posted(float x) {
  return __float_as_uint(x) == ~0u ? __uint_as_float(0x7fffffffu) : x;
}
__device__ __forceinline__ bool empty(float x) { return __float_as_uint(x) == ~0u; }

__device__ __forceinline__ int rows_of(const Item& item, int queries) {
  return min(ROWS, queries * GROUP - item.block * ROWS);
}

// This team's share of a cut line: groups of 4 numbers, each with the largest score and the sum of weights.
__device__ __forceinline__ void merge(const Args& a, const Item& item, int start, int queries, float v_scale,
                                      int member, int lane) {
  const int parts = item.share & 0xffff, part = item.share >> 16, units = rows_of(item, queries) * QUADS;
  int sharing = 1;  // lanes that share the parts of one unit
  while (sharing < parts && sharing < 32) sharing <<= 1;
  const int per_warp = 32 / sharing, mine = lane / sharing, sub = lane % sharing;
  const int each = (u32)(units + parts - 1) / (u32)parts, from = part * each;
  const int to = min(units, from + each);
  float* const slots = a.slot_o + (i64)(item.slot - part) * ROWS * QUADS * 8;
#pragma unroll 1
  for (int unit0 = from + member * per_warp; unit0 < to; unit0 += TEAM * per_warp) {
    const int unit = unit0 + mine;
    const bool in = unit < to;
    float* const at = slots + (i64)unit * 8;
    float top = -INF, total = 0;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int first = sub; first < parts; first += 32 * PARTS) {
      float4 o[PARTS];
      float2 ml[PARTS];
#pragma unroll
      for (int i = 0; i < PARTS; i++) {
        o[i] = make_float4(0, 0, 0, 0);
        ml[i] = make_float2(-INF, 0);
      }
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
          const int p = first + i * 32;
          if (in && p < parts) {
            float* x = at + (i64)p * ROWS * QUADS * 8;
            asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                         : "=f"(o[i].x), "=f"(o[i].y), "=f"(o[i].z), "=f"(o[i].w) : "l"(x) : "memory");
            asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];"
                         : "=f"(ml[i].x), "=f"(ml[i].y) : "l"(x + 4) : "memory");
          }
        }
#pragma unroll
        for (int i = 0; i < PARTS; i++)
          missing |= empty(o[i].x) || empty(o[i].y) || empty(o[i].z) || empty(o[i].w) || empty(ml[i].x) || empty(ml[i].y);
      } while (missing);
      float higher = top;
#pragma unroll
      for (int i = 0; i < PARTS; i++) {
        const int p = first + i * 32;
        if (in && p < parts) {
          float* x = at + (i64)p * ROWS * QUADS * 8;
          const float nan = __uint_as_float(~0u);
          __stcg((float4*)x, make_float4(nan, nan, nan, nan));
          __stcg((float2*)(x + 4), make_float2(nan, nan));
        }
        higher = fmaxf(higher, ml[i].x);
      }
      const float base = finite_or_0(higher), shrink = power2(top - base);
      top = higher;
      total *= shrink;
      sum.x *= shrink; sum.y *= shrink; sum.z *= shrink; sum.w *= shrink;
#pragma unroll
      for (int i = 0; i < PARTS; i++) {
        const float e = power2(ml[i].x - base);
        total += ml[i].y * e;
        sum.x += o[i].x * e; sum.y += o[i].y * e; sum.z += o[i].z * e; sum.w += o[i].w * e;
      }
    }
    float higher = top;
    for (int w = 1; w < sharing; w <<= 1) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, w));
    const float shrink = power2(top - finite_or_0(higher));
    total *= shrink;
    sum.x *= shrink * v_scale; sum.y *= shrink * v_scale; sum.z *= shrink * v_scale; sum.w *= shrink * v_scale;
    for (int w = 1; w < sharing; w <<= 1) {
      total += __shfl_xor_sync(~0u, total, w);
      sum.x += __shfl_xor_sync(~0u, sum.x, w); sum.y += __shfl_xor_sync(~0u, sum.y, w);
      sum.z += __shfl_xor_sync(~0u, sum.z, w); sum.w += __shfl_xor_sync(~0u, sum.w, w);
    }
    if (in && sub == 0) write_output(a, item, start, unit / QUADS, unit % QUADS * 4, higher, total, sum);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int team = warp / TEAM, member = warp % TEAM, worker = team * gridDim.x + blockIdx.x;
  float* const shared_o = (float*)(smem + RING_BYTES) + team * TEAM * 8 * O_ROW;
  float2* const shared_ml = (float2*)(smem + RING_BYTES + O_BYTES) + team * TEAM * 8;
#if NT > 1
  uint2* const shared_q = (uint2*)(smem + RING_BYTES + O_BYTES + WARPS * 64);
  float* const shared_factor = (float*)(shared_q + NT * KSTEPS * 32);
#endif
  const u32 ring = shared_address(smem) + warp * STAGES * STAGE_BYTES;
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

  // A worker's first item stands where it is found without looking up where the others are.
  const int4* const first_item = (const int4*)(a.plan + a.firsts_at + worker * FIELDS);
  const int4 f0 = __ldg(first_item), f1 = __ldg(first_item + 1);
  const int count = f1.z;
#if MERGE
  const int nothing = __ldg(a.plan + 1);
#endif
  const int4* const items = (const int4*)(a.plan + a.items_at) + (i64)__ldg(a.plan + 4 + worker) * 2;
#if EARLY
  asm volatile("griddepcontrol.launch_dependents;");
#endif

#if !SHARED_Q
  // Queries as the tensor cores take them: row g of 8, two pairs for each 16 numbers.
  auto raw_queries = [&](u32 (*to)[2], int n, const Item& item, const Queries& who) {
    const int m = item.block * ROWS + n * 8 + g;
    const bool there = m < who.count * GROUP;
    const char* const q = a.q + (i64)(who.start + m / GROUP) * a.q_t + (i64)(item.head * GROUP + m % GROUP) * a.q_n;
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) {
#if CACHE
      const uint2 x = there ? __ldg((const uint2*)q + s * 4 + t) : make_uint2(0, 0);
      to[s][0] = x.x; to[s][1] = x.y;
#else
      to[s][0] = there ? __ldg((const u32*)q + s * 8 + t) : 0;
      to[s][1] = there ? __ldg((const u32*)q + s * 8 + 4 + t) : 0;
#endif
    }
  };
#endif

#if SHARED_Q
  // A block that is one team has them from shared memory, 16 bytes a thread: fewer loads wait in line behind the keys.
  char* const shared_q = smem + RING_BYTES + O_BYTES + WARPS * 64;
  constexpr int Q_EACH = (8 * Q_CHUNKS + THREADS - 1) / THREADS;
  uint4 q_next[Q_EACH];
  auto ask_queries = [&](const Item& item, const Queries& who) {
#pragma unroll
    for (int i = 0; i < Q_EACH; i++) {
      const int e = threadIdx.x + i * THREADS, row = e / Q_CHUNKS, m = item.block * 8 + row;
      q_next[i] = make_uint4(0, 0, 0, 0);
      if (row < 8 && m < who.count * GROUP) {
        const char* const q = a.q + (i64)(who.start + m / GROUP) * a.q_t + (item.head * GROUP + m % GROUP) * a.q_n;
        q_next[i] = __ldg((const uint4*)q + e % Q_CHUNKS);
      }
    }
  };
  auto put_queries = [&]() {
#pragma unroll
    for (int i = 0; i < Q_EACH; i++) {
      const int e = threadIdx.x + i * THREADS, row = e / Q_CHUNKS, chunk = e % Q_CHUNKS;
      if (row >= 8) break;
      const uint4 x = q_next[i];
#if CACHE
      // In the order in which a product has the keys' numbers: those of a lane, 4t to 4t + 3, as two pairs.
      *(uint2*)(shared_q + q_place(row, chunk & ~1) + chunk % 2 * 8) = make_uint2(x.x, x.z);
      *(uint2*)(shared_q + q_place(row, chunk | 1) + chunk % 2 * 8) = make_uint2(x.y, x.w);
#else
      *(uint4*)(shared_q + q_place(row, chunk)) = x;
#endif
    }
  };
#elif NT == 1
  u32 q_next[KSTEPS][2];
  auto ask_queries = [&](const Item& item, const Queries& who) { raw_queries(q_next, 0, item, who); };
#endif

  // -- loading: which tile is next, and its page, looked up a tile ahead
  int next = 0, head = f0.y, end = f1.x, tile = count ? first_tile(f0.w, member) : 0, last = (end + TOKENS - 1) / TOKENS;
  const int* table = a.pages + (i64)f0.x * a.pages_r;
  int page = 0, stage = 0;
  u32 pages_there = 0;  // a bit for each stage
  int4 n0 = f0, n1 = f1;  // lane i has item i of 32
  auto seek = [&]() {
    while (tile >= last && next < count) {
      if (++next == count) break;
      if (next % 32 == 0 && next + lane < count) {
        n0 = __ldg(items + 2 * (next + lane));
        n1 = __ldg(items + 2 * (next + lane) + 1);
      }
      const int from = next % 32;
      table = a.pages + (i64)__shfl_sync(~0u, n0.x, from) * a.pages_r;
      head = __shfl_sync(~0u, n0.y, from);
      end = __shfl_sync(~0u, n1.x, from);
      tile = first_tile(__shfl_sync(~0u, n0.w, from), member);
      last = (end + TOKENS - 1) / TOKENS;
    }
    if (tile < last) {
      const int column = tile * TOKENS / PAGE;
      page = column < a.columns ? __ldg(table + column) : -1;
    }
  };
  auto load = [&]() {
    if (tile < last) {
      const bool there = (u32)page < (u32)a.cache_pages;
      const int token0 = tile * TOKENS, left = there ? end - token0 : 0;
      const i64 at = there ? page : 0;
      const char* const k = a.k + at * a.k_page + (token0 % PAGE) * a.k_p + head * a.k_k;
      const char* const v = a.v + at * a.v_page + (token0 % PAGE) * a.v_p + head * a.v_k;
      const u32 to = ring + stage * STAGE_BYTES;
      pages_there = (pages_there & ~(1u << stage)) | ((u32)there << stage);
#pragma unroll
      for (int i = 0; i < (TOKENS * CHUNKS + 31) / 32; i++) {
        const int e = lane + 32 * i, token = e / CHUNKS, chunk = e % CHUNKS;
        if (TOKENS * CHUNKS % 32 && e >= TOKENS * CHUNKS) break;
        const u32 place = token * ROW_BYTES + ((SWIZZLED ? chunk ^ (token & 7) : chunk) << 4);
        copy16(to + place, k + token * a.k_p + chunk * 16, token < left ? 16 : 0, policy);
      }
#pragma unroll
      for (int i = 0; i < (TOKENS * CHUNKS + 31) / 32; i++) {
        const int e = lane + 32 * i, token = e / CHUNKS, chunk = e % CHUNKS;
        if (TOKENS * CHUNKS % 32 && e >= TOKENS * CHUNKS) break;
        const u32 place = token * ROW_BYTES + ((SWIZZLED ? chunk ^ (token & 7) : chunk) << 4);
        copy16(to + TILE_BYTES + place, v + token * a.v_p + chunk * 16, token < left ? 16 : 0, policy);
      }
      tile += TEAM;
      seek();
    }
    commit();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  };
  // What is waited for comes late in the program: copies begin two dependent reads after the start.
  if (tile < last) {
    const int column = tile * TOKENS / PAGE;
    page = column < a.columns ? __ldg(table + column) : -1;
  }
  if (lane < count) {
    n0 = __ldg(items + 2 * lane);
    n1 = __ldg(items + 2 * lane + 1);
  }
  Item item, item_next;
  item_next.request = f0.x; item_next.head = f0.y; item_next.block = f0.z; item_next.first = f0.w;
  item_next.end = f1.x; item_next.slot = f1.y; item_next.share = f1.w;
  Queries who, who_next = {0, 0, 0};
  if (count) who_next = queries_of(a, f0.x);
#if NT == 1
  if (SINGLE && count) ask_queries(item_next, who_next);
#endif
  if (tile >= last) seek();  // a short first piece has no tile for this warp
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; i++) load();
#if NT == 1
  if (!SINGLE && count) ask_queries(item_next, who_next);
#endif
  int4 m0, m1;  // the same, for the products
  Queries of = {0, 0, 0};
  auto look_up = [&](int i) {
    if (i + lane < count) {
      m0 = __ldg(items + 2 * (i + lane));
      m1 = __ldg(items + 2 * (i + lane) + 1);
      of = queries_of(a, m0.x);
    }
  };

#if MERGE
  // Lines of no keys, where there are any, while the first keys are on their way.
  const int merges = nothing ? __ldg(a.plan) : 0;
  for (int i = blockIdx.x; i < merges; i += gridDim.x) {
    const int* const line = a.plan + a.merges_at + i * FIELDS;
    if (__ldg(line + 3) == __ldg(line + 4)) {
      Item none;
      none.request = __ldg(line); none.head = __ldg(line + 1); none.block = __ldg(line + 2);
      const Queries who = queries_of(a, none.request);
      for (int unit = threadIdx.x; unit < rows_of(none, who.count) * QUADS; unit += THREADS)
        write_output(a, none, who.start, unit / QUADS, unit % QUADS * 4, -INF, 0, make_float4(0, 0, 0, 0));
    }
  }
  Item cut_first, cut_last;  // a worker's first and last piece may be parts of lines
  Queries who_first, who_last;
  cut_first.slot = cut_last.slot = -1;
#endif

  // -- where this lane's rows of matrices lie in a tile
  const int k_token = lane % 8 + lane / 8 % 2 * 8, k_chunk = lane / 16;
  const int v_token = lane % 8 + lane / 16 * 8, v_chunk = lane / 8 % 2;
  u32 k_at[4], v_at[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    k_at[i] = k_token * ROW_BYTES + ((SWIZZLED ? (2 * i + k_chunk) ^ (k_token & 7) : 2 * i + k_chunk) << 4);
    v_at[i] = TILE_BYTES + v_token * ROW_BYTES +
              ((SWIZZLED ? (2 * i + v_chunk) ^ (v_token & 7) : 2 * i + v_chunk) << 4);
  }

  // With a cache of 8 bits products are of float16: each row becomes a power of 2 times numbers up to 512.
#if CACHE
  auto to_half = [&](u32 (*q)[2]) -> float {
    float most = 0;
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 x = unpack(q[s][i]);
        most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const u32 bits = min(max(__float_as_uint(most) & 0x7f800000u, 32u << 23), 253u << 23);
    const float back = __uint_as_float(bits - (8u << 23)), times = __uint_as_float((262u << 23) - bits);
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 x = unpack(q[s][i]);
        q[s][i] = pack(x.x * times, x.y * times);
      }
    }
    return back;
  };
#endif
  auto item_at = [&](int i, Queries& who) -> Item {
    const int from = i % 32;
    Item r;
    r.request = __shfl_sync(~0u, m0.x, from); r.head = __shfl_sync(~0u, m0.y, from);
    r.block = __shfl_sync(~0u, m0.z, from); r.first = __shfl_sync(~0u, m0.w, from);
    r.end = __shfl_sync(~0u, m1.x, from); r.slot = __shfl_sync(~0u, m1.y, from);
    r.share = __shfl_sync(~0u, m1.w, from);
    who.length = __shfl_sync(~0u, of.length, from);
    who.start = __shfl_sync(~0u, of.start, from);
    who.count = __shfl_sync(~0u, of.count, from);
    return r;
  };

  int used = 0;  // the stage of the next tile
#if NT == 1
  u32 q[2 * ((KSTEPS + 1) / 2)][2];
#if SHARED_Q
  if (count) put_queries();
  __syncthreads();
#endif
#endif
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    item = item_next;
    who = who_next;
    float factor[NT][2];
    const float scale = a.scale * (SCALED ? __ldg(a.k_scale + item.head) : 1.f) * (CAPPED || SLOPES ? 1.f : LOG2E);
#if NT == 1
#if SHARED_Q
#pragma unroll
    for (int s = 0; s < KSTEPS; s += 2)  // behind an odd last one lies another row's, which is not used
      load_matrices(q[s], shared_address(shared_q + q_place(lane % 8, 2 * s + lane / 8)));
#else
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) { q[s][0] = q_next[s][0]; q[s][1] = q_next[s][1]; }
#endif
    factor[0][0] = factor[0][1] = scale;
#if CACHE
    const float back = to_half(q);
    factor[0][0] *= __shfl_sync(~0u, back, 8 * t);
    factor[0][1] *= __shfl_sync(~0u, back, 8 * t + 4);
#endif
#else
    for (int n = warp; n < NT; n += WARPS) {
      u32 x[KSTEPS][2];
      raw_queries(x, n, item, who);
#if CACHE
      const float back = to_half(x);
      if (t == 0) shared_factor[n * 8 + g] = back;
#endif
#pragma unroll
      for (int s = 0; s < KSTEPS; s++) shared_q[(n * KSTEPS + s) * 32 + lane] = make_uint2(x[s][0], x[s][1]);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NT; n++) {
      factor[n][0] = scale * (CACHE ? shared_factor[n * 8 + 2 * t] : 1.f);
      factor[n][1] = scale * (CACHE ? shared_factor[n * 8 + 2 * t + 1] : 1.f);
    }
#endif
    const int row0 = item.block * ROWS, rows = rows_of(item, who.count), high = min(item.end, who.length);
    const int before = who.length - who.count;  // the position of the first query
    // Every row sees all tokens from ``plain_from`` up to ``plain_to``.
    const int plain_to = min(high, before + row0 / GROUP + 1);
    const int plain_from = WINDOWED ? before + (row0 + rows - 1) / GROUP - a.window + 1 : 0;
    const int end_tile = (item.end + TOKENS - 1) / TOKENS;
#if SLOPES
    float slope[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = n * 8 + 2 * t + e;
        slope[n][e] = row < rows ? __ldg(a.slopes + item.head * GROUP + (row0 + row) % GROUP) : 0.f;
      }
#endif
    float top[NT][2], total[NT][2], o[NT][KSTEPS][4];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      top[n][0] = top[n][1] = -INF;
      total[n][0] = total[n][1] = 0;
#pragma unroll
      for (int d = 0; d < KSTEPS; d++) o[n][d][0] = o[n][d][1] = o[n][d][2] = o[n][d][3] = 0;
    }

    bool ahead = i + 1 < count;
    for (int mine = first_tile(item.first, member); mine < end_tile || ahead; mine += TEAM) {
      // The next piece, and its queries, are looked up beside this one's first tile.
      if (ahead && i % 32 == 31) look_up(i + 1);
      if (ahead && i == 0) look_up(0);
      const bool look = ahead;
      ahead = false;
      if (mine < end_tile) {
      wait<STAGES - 2>();
      __syncwarp();
#if COMPUTE
      const u32 at = ring + used * STAGE_BYTES;
      const int token0 = mine * TOKENS;
      const bool there = pages_there >> used & 1;
      const bool plain = there && token0 >= plain_from && token0 + TOKENS <= plain_to;
      float s[NT][2][4];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][0][e] = s[n][1][e] = 0;
#if CACHE
#pragma unroll
      for (int j = 0; j < (KSTEPS + 1) / 2; j++) {  // two chunks of 16 numbers at once
        u32 x[4];
        load_matrices(x, at + k_at[j % 4] + j / 4 * 128);
#pragma unroll
        for (int c = 0; c < 2; c++)
          if (2 * j + c < KSTEPS) {
            u32 f[4];
            widen(x[2 * c], f[0], f[2]);
            widen(x[2 * c + 1], f[1], f[3]);
#pragma unroll
            for (int n = 0; n < NT; n++) {
#if NT == 1
              mma(s[n][c], f, q[2 * j + c][0], q[2 * j + c][1]);
#else
              const uint2 b = shared_q[(n * KSTEPS + 2 * j + c) * 32 + lane];
              mma(s[n][c], f, b.x, b.y);
#endif
            }
          }
      }
#else
#pragma unroll
      for (int j = 0; j < KSTEPS; j++) {
        u32 f[4];
        load_matrices(f, at + k_at[j % 4] + j / 4 * 128);
#pragma unroll
        for (int n = 0; n < NT; n++) {
#if NT == 1
          mma(s[n][j % 2], f, q[j][0], q[j][1]);
#else
          const uint2 b = shared_q[(n * KSTEPS + j) * 32 + lane];
          mma(s[n][j % 2], f, b.x, b.y);
#endif
        }
      }
#endif
      u32 p[NT][2];
      if (!plain && token0 + TOKENS > high) {
        // Weights there are 0, but 0 times what memory holds need not be.
        for (int e = lane; e < TOKENS * CHUNKS; e += 32) {
          const int token = e / CHUNKS, chunk = e % CHUNKS;
          const u32 place = token * ROW_BYTES + ((SWIZZLED ? chunk ^ (token & 7) : chunk) << 4);
          if (token0 + token >= high)
            asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(at + TILE_BYTES + place), "r"(0) : "memory");
        }
        __syncwarp();
      }
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float x[4];  // tokens g and g + 8, rows 2t and 2t + 1
#pragma unroll
        for (int e = 0; e < 4; e++) {
          x[e] = (s[n][0][e] + s[n][1][e]) * factor[n][e % 2];
#if CAPPED
          x[e] = a.cap * (1.f - 2.f * inverse(power2(x[e] * (2.f * LOG2E / a.cap)) + 1.f));  // cap tanh(x / cap)
#endif
#if SLOPES
          const int row = row0 + n * 8 + 2 * t + e % 2;
          x[e] -= slope[n][e % 2] * (float)(before + row / GROUP - (token0 + g + e / 2 * 8));
#endif
          if (CAPPED || SLOPES) x[e] *= LOG2E;
        }
        if (!plain) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int token = token0 + g + e / 2 * 8, position = before + (row0 + n * 8 + 2 * t + e % 2) / GROUP;
            const bool seen = there && token < high && token <= position && (!WINDOWED || token > position - a.window);
            if (!seen) x[e] = -INF;
          }
        }
        float high0 = fmaxf(x[0], x[2]), high1 = fmaxf(x[1], x[3]);
#pragma unroll
        for (int w = 4; w < 32; w <<= 1) {
          high0 = fmaxf(high0, __shfl_xor_sync(~0u, high0, w));
          high1 = fmaxf(high1, __shfl_xor_sync(~0u, high1, w));
        }
        high0 = fmaxf(high0 - LIFT, top[n][0]);
        high1 = fmaxf(high1 - LIFT, top[n][1]);
        const float base0 = finite_or_0(high0), base1 = finite_or_0(high1);
        const float shrink0 = power2(top[n][0] - base0), shrink1 = power2(top[n][1] - base1);
        top[n][0] = high0;
        top[n][1] = high1;
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = power2(x[e] - (e % 2 ? base1 : base0));
        total[n][0] = total[n][0] * shrink0 + x[0] + x[2];
        total[n][1] = total[n][1] * shrink1 + x[1] + x[3];
        if (__any_sync(~0u, shrink0 != 1.f || shrink1 != 1.f)) {
#pragma unroll
          for (int d = 0; d < KSTEPS; d++) {
            o[n][d][0] *= shrink0; o[n][d][1] *= shrink1; o[n][d][2] *= shrink0; o[n][d][3] *= shrink1;
          }
        }
        p[n][0] = transpose(pack(x[0], x[1]));
        p[n][1] = transpose(pack(x[2], x[3]));
      }
#if CACHE
#pragma unroll
      for (int j = 0; j < (KSTEPS + 1) / 2; j++) {
        u32 x[4];
        load_transposed(x, at + v_at[j % 4] + j / 4 * 128);
#pragma unroll
        for (int c = 0; c < 2; c++)
          if (2 * j + c < KSTEPS) {
            // Bytes are (token, number): the even number of a pair is in row g, the odd one in row g + 8.
            u32 f[4];
            widen(__byte_perm(x[c], 0, 0x3120), f[0], f[1]);
            widen(__byte_perm(x[c + 2], 0, 0x3120), f[2], f[3]);
#pragma unroll
            for (int n = 0; n < NT; n++) mma(o[n][2 * j + c], f, p[n][0], p[n][1]);
          }
      }
#else
#pragma unroll
      for (int j = 0; j < KSTEPS; j++) {
        u32 f[4];
        load_transposed(f, at + v_at[j % 4] + j / 4 * 128);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(o[n][j], f, p[n][0], p[n][1]);
      }
#endif
#endif
      __syncwarp();
      load();
      used = used + 1 == STAGES ? 0 : used + 1;
      }
      if (look) {
        item_next = item_at(i + 1, who_next);
#if NT == 1
        ask_queries(item_next, who_next);
#endif
      }
    }

#if COMPUTE
    // -- the warps' states together, 8 rows at once
    const float v_scale = SCALED ? __ldg(a.v_scale + item.head) : 1.f;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int w = 4; w < 32; w <<= 1) {
        total[n][0] += __shfl_xor_sync(~0u, total[n][0], w);
        total[n][1] += __shfl_xor_sync(~0u, total[n][1], w);
      }
      float* const mine = shared_o + member * 8 * O_ROW;
#pragma unroll
      for (int d = 0; d < KSTEPS; d++) {
        // Products of 8 bits have numbers 2g and 2g + 1 in rows g and g + 8.
        const int low = d * 16 + (CACHE ? 2 * g : g), high_d = CACHE ? low + 1 : low + 8;
        mine[o_place(2 * t, low)] = o[n][d][0];
        mine[o_place(2 * t + 1, low)] = o[n][d][1];
        mine[o_place(2 * t, high_d)] = o[n][d][2];
        mine[o_place(2 * t + 1, high_d)] = o[n][d][3];
      }
      if (g == 0) {
        shared_ml[member * 8 + 2 * t] = make_float2(top[n][0], total[n][0]);
        shared_ml[member * 8 + 2 * t + 1] = make_float2(top[n][1], total[n][1]);
      }
      team_barrier(team);
      for (int unit = member * 32 + lane; unit < 8 * QUADS; unit += 32 * TEAM) {
        const int row8 = unit / QUADS, d = unit % QUADS * 4, row = n * 8 + row8;
        if (row >= rows) continue;
        float highest = -INF, weights = 0;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < TEAM; w++) highest = fmaxf(highest, shared_ml[w * 8 + row8].x);
        const float base = finite_or_0(highest);
#pragma unroll
        for (int w = 0; w < TEAM; w++) {
          const float2 ml = shared_ml[w * 8 + row8];
          const float e = power2(ml.x - base);
          const float4 x = *(const float4*)(shared_o + w * 8 * O_ROW + o_place(row8, d));
          weights += ml.y * e;
          sum.x += x.x * e; sum.y += x.y * e; sum.z += x.z * e; sum.w += x.w * e;
        }
#if MERGE
        if (item.slot >= 0) {
          float* const slot = a.slot_o + (((i64)item.slot * ROWS + row) * QUADS + d / 4) * 8;
          __stcg((float4*)slot, make_float4(posted(sum.x), posted(sum.y), posted(sum.z), posted(sum.w)));
          __stcg((float2*)(slot + 4), make_float2(posted(highest), posted(weights)));
          continue;
        }
#endif
        sum.x *= v_scale; sum.y *= v_scale; sum.z *= v_scale; sum.w *= v_scale;
#if !MERGE
        if (item.slot >= 0) {
          const i64 line = (i64)item.slot * ROWS + row;
          const float each = weights == 0.f ? 0.f : inverse(weights);
          *(float4*)(a.slot_o + line * H + d) = make_float4(sum.x * each, sum.y * each, sum.z * each, sum.w * each);
          if (d == 0) a.slot_lse[line] = weights == 0.f ? -INF : (highest + log_2(weights)) * LN2;
          continue;
        }
#endif
        write_output(a, item, who.start, row, d, highest, weights, sum);
      }
#if SHARED_Q
      if (i + 1 < count) put_queries();
#endif
      if (n + 1 < NT || i + 1 < count) team_barrier(team);
    }
#if MERGE
    if (item.slot >= 0 && i == 0) { cut_first = item; who_first = who; }
    if (item.slot >= 0 && i > 0) { cut_last = item; who_last = who; }
#endif
#endif
  }
#if MERGE && COMPUTE
#pragma unroll 1
  for (int c = 0; c < 2; c++) {
    if (cut_first.slot >= 0) {
      const float v_scale = SCALED ? __ldg(a.v_scale + cut_first.head) : 1.f;
      merge(a, cut_first, who_first.start, who_first.count, v_scale, member, lane);
    }
    cut_first = cut_last;
    who_first = who_last;
    cut_last.slot = -1;
  }
#endif
}
