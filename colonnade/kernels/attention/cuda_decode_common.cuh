// Flash-Decoding in CUDA C++: arguments, sizes, and primitives (cuda_decode.cu).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

// Macros defined by the host: H (head width), GROUP (query heads per key/value head), NT (row tiles of 8 query rows),
// PAGE (tokens per page), WARPS, TEAM (warps per team), STAGES, BF16, CACHE (0: dtype of the queries, 1: float8 e4m3, 2:
// int8), WINDOWED, CAPPED, SLOPES, SINKS, SCALED, SINGLE (one query per request), MERGE, EARLY (launch the dependent
// kernel early), SHARED_Q (queries pass through shared memory), COMPUTE (0: only load, for measurements), FIXED (tokens
// per chunk, or 0; with fixed splits sums do not depend on the batch), SHORT (cuda_decode_short.cu, where TEAM is the
// number of tiles of a line; HALF: tiles of at most 8 tokens), ROPE (cuda_decode_mla.cu, where H is the width of the
// value part of a latent).

struct Args {
  const char *q, *k, *v;
  u16* o;
  float *lse, *slot_o, *slot_lse;
  const int *plan, *pages, *cu, *lengths;
  const float *slopes, *sinks, *k_scale, *v_scale;
  i64 q_t, q_n, k_page, k_p, k_k, v_page, v_p, v_k;  // strides in bytes
  int pages_r, columns, cache_pages, items_at, firsts_at, merges_at, heads, window, lines;
  float scale, cap;
  u32 lines_inverse;  // 2^32 / lines per request, rounded up; 0 if there is one line
};

constexpr int TOKENS = 16, FIELDS = 8, ROWS = 8 * NT, KSTEPS = H / 16, QUADS = H / 4;
constexpr int THREADS = 32 * WARPS, TEAMS = WARPS / TEAM;
static_assert(WARPS % TEAM == 0 && (NT == 1 || TEAMS == 1 || SHORT), "teams are equal, and share queries of many rows");
constexpr int STREAMS = FIXED ? 8 : TEAM, TURNS = STREAMS / TEAM;  // STREAMS: distance between the tiles of a warp
constexpr int CHUNK_TILES = FIXED / TOKENS, LEVELS = 24;  // enough for 2^23 chunks of at least 128 tokens
static_assert(!FIXED || (TEAM <= 8 && 8 % TEAM == 0 && CHUNK_TILES % 8 == 0), "whole streams");
static_assert(TURNS == 1 || NT == 1, "the streams of a warp are kept in shared memory, 8 rows each");
constexpr int UNITS = (8 * QUADS + TEAM * 32 - 1) / (TEAM * 32);  // units (4 elements of a row, of 8 rows) per lane
// Fill the free stage of the ring before the products of a tile instead of after them: with two stages, no load would be
// in flight during the products otherwise.
constexpr bool LOAD_FIRST = STAGES == 2;
// Load 8-bit values before the softmax, and convert them while it is computed.
constexpr bool VALUES_FIRST = CACHE && NT == 1 && H <= 128 && TURNS < 4;
constexpr int PARTS = 4;  // states of a line that a lane holds at a time
constexpr int CHUNKS = H * (CACHE ? 1 : 2) / 16;  // 16-byte chunks of a token
// Rows of a multiple of 8 chunks are swizzled; others are padded to an odd number of chunks. Either way 8 rows lie in
// different banks.
constexpr bool SWIZZLED = CHUNKS % 8 == 0;
constexpr int ROW_BYTES = SWIZZLED ? CHUNKS * 16 : (CHUNKS | 1) * 16;
constexpr int TILE_BYTES = TOKENS * ROW_BYTES, STAGE_BYTES = 2 * TILE_BYTES;
// The rows of exchanged states lie in different banks, too.
constexpr int O_ROW = H % 32 ? H + 4 : H;
constexpr int Q_CHUNKS = H / 8, Q_ROW_BYTES = 16 * (Q_CHUNKS % 8 ? Q_CHUNKS | 1 : Q_CHUNKS);
__device__ __forceinline__ int q_place(int row, int chunk) {
  return row * Q_ROW_BYTES + (Q_CHUNKS % 8 ? chunk : chunk ^ row) * 16;
}
constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES, O_BYTES = WARPS * 8 * O_ROW * 4;
__device__ __forceinline__ int o_place(int row, int d) { return row * O_ROW + (H % 32 ? d : d ^ (row & 6) << 2); }
// The column of elements 2 · half and 2 · half + 1 of a lane's accumulator for step d. 16-bit values are read in order,
// 8-bit values in pairs; SHORT kernels read 32 elements for two steps.
__device__ __forceinline__ int o_column(int d, int g, int half) {
  if (SHORT) return d / 2 * 32 + g / 2 * 8 + d % 2 * 4 + half * 2 + g % 2;
  return d * 16 + (CACHE ? 2 * g + half : g + 8 * half);
}
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define INF __int_as_float(0x7f800000)
// Softmax weights are multiplied by 2^LIFT, so that small ones are normal float16 numbers.
constexpr float LIFT = BF16 && !CACHE ? 0.f : 10.f;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(u32 to, const char* from, int bytes, u64 policy) {
  // Fewer bytes than 16 are padded with zeros: with 0 bytes nothing is read. Keys are read once, so they are evicted
  // first. A hint to prefetch 256 bytes at a time makes large caches 7% slower.
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
// Loads one word. With programmatic dependent launch, a kernel must not load what its predecessor may write through the
// read-only path: the compiler moves such loads above the wait.
template <typename T> __device__ __forceinline__ T read(const T* from) {
  static_assert(sizeof(T) == 4, "a word");
  if (!SHORT) return __ldg(from);
  u32 r;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(r) : "l"(from) : "memory");
  return *(T*)&r;
}
__device__ __forceinline__ float finite_or_0(float top) { return top == -INF ? 0.f : top; }

// Converts four 8-bit numbers to two pairs of float16.
__device__ __forceinline__ void widen(u32 x, u32& low, u32& high) {
#if CACHE == 1
  asm volatile("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
      : "=r"(low), "=r"(high) : "r"(x));
#else
  // 0x6400 | u, read as float16, is 1024 + u.
  x ^= 0x80808080u;
  asm volatile("{.reg .b32 a, b; prmt.b32 a, %2, 0x64646464, 0x4140; prmt.b32 b, %2, 0x64646464, 0x4342;"
      " sub.f16x2 %0, a, %3; sub.f16x2 %1, b, %3;}" : "=r"(low), "=r"(high) : "r"(x), "r"(0x64806480u));
#endif
}

// Converts a pair of 16-bit numbers to float32.
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
struct Queries {  // a request: number of keys, row of its first query in the stream, number of queries
  int length, start, count;
};

__device__ __forceinline__ Queries queries_of(const Args& a, int request) {
  Queries r;
  r.length = __ldg(a.lengths + request);
  r.start = SINGLE ? request : __ldg(a.cu + request);
  r.count = SINGLE ? 1 : __ldg(a.cu + request + 1) - r.start;
  return r;
}

// This warp's first tile from token ``first`` on. Tiles are assigned to warps by position, independently of the piece.
__device__ __forceinline__ int first_tile(int first, int member) {
  const int tile = first / TOKENS;
  return tile + (member + TEAM - tile % TEAM) % TEAM;
}

__device__ __forceinline__ void team_barrier(int team) {
  if (TEAMS == 1) __syncthreads();
  else if (TEAM == 1) __syncwarp();
  else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM * 32) : "memory");
}
