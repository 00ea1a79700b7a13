// Flash-Decoding in CUDA C++: queries, and the products and softmax of one tile of 16 tokens (cuda_decode.cu).

struct Places {  // offsets in a tile of the rows that a lane passes to ldmatrix, for 4 steps of 16 elements
  u32 k[4], v[4];
};
__device__ __forceinline__ Places places_of(int lane) {
  const int k_token = lane % 8 + lane / 8 % 2 * 8, k_chunk = lane / 16;
  const int v_token = lane % 8 + lane / 16 * 8, v_chunk = lane / 8 % 2;
  Places r;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    r.k[i] = k_token * ROW_BYTES + ((SWIZZLED ? (2 * i + k_chunk) ^ (k_token & 7) : 2 * i + k_chunk) << 4);
    r.v[i] = TILE_BYTES + v_token * ROW_BYTES +
             ((SWIZZLED ? (2 * i + v_chunk) ^ (v_token & 7) : 2 * i + v_chunk) << 4);
  }
  return r;
}

// Copies a tile of keys or values: ``left`` of its tokens, and zeros for the others.
__device__ __forceinline__ void copy_tokens(u32 to, const char* from, i64 stride, int left, int lane, u64 policy) {
#pragma unroll
  for (int i = 0; i < (TOKENS * CHUNKS + 31) / 32; i++) {
    const int e = lane + 32 * i, token = e / CHUNKS, chunk = e % CHUNKS;
    if (TOKENS * CHUNKS % 32 && e >= TOKENS * CHUNKS) break;
    const u32 place = token * ROW_BYTES + ((SWIZZLED ? chunk ^ (token & 7) : chunk) << 4);
    copy16(to + place, from + token * stride + chunk * 16, token < left ? 16 : 0, policy);
  }
}

struct View {  // a piece: its rows, the range of visible keys, and the factors of scores
  int row0, rows, high, before;  // first row, number of rows, end of the keys, position of the first query
  float factor[NT][2];
#if SLOPES
  float slope[NT][2];
#endif
};
struct State {  // state of a warp: largest scores, sums of weights, unscaled outputs
  float top[NT][2], total[NT][2], o[NT][KSTEPS][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      top[n][0] = top[n][1] = -INF;
      total[n][0] = total[n][1] = 0;
#pragma unroll
      for (int d = 0; d < KSTEPS; d++) o[n][d][0] = o[n][d][1] = o[n][d][2] = o[n][d][3] = 0;
    }
  }
};

// Loads the block's 8 rows of queries, 16 bytes per thread.
constexpr int Q_EACH = (8 * Q_CHUNKS + THREADS - 1) / THREADS;
__device__ __forceinline__ void block_queries(const Args& a, uint4 (&to)[Q_EACH], const Item& item, const Queries& who) {
#pragma unroll
  for (int i = 0; i < Q_EACH; i++) {
    const int e = threadIdx.x + i * THREADS, row = e / Q_CHUNKS, m = item.block * 8 + row;
    to[i] = make_uint4(0, 0, 0, 0);
    if (row < 8 && m < who.count * GROUP) {
      const char* const q = a.q + (i64)(who.start + m / GROUP) * a.q_t + (item.head * GROUP + m % GROUP) * a.q_n;
      to[i] = __ldg((const uint4*)q + e % Q_CHUNKS);
    }
  }
}
__device__ __forceinline__ void put_block_queries(const uint4 (&from)[Q_EACH], char* shared_q) {
#pragma unroll
  for (int i = 0; i < Q_EACH; i++) {
    const int e = threadIdx.x + i * THREADS, row = e / Q_CHUNKS, chunk = e % Q_CHUNKS;
    if (row >= 8) break;
    const uint4 x = from[i];
#if CACHE
    // The order of the elements of converted keys: a lane's elements 4t to 4t + 3 as two pairs.
    *(uint2*)(shared_q + q_place(row, chunk & ~1) + chunk % 2 * 8) = make_uint2(x.x, x.z);
    *(uint2*)(shared_q + q_place(row, chunk | 1) + chunk % 2 * 8) = make_uint2(x.y, x.w);
#else
    *(uint4*)(shared_q + q_place(row, chunk)) = x;
#endif
  }
}

// Loads queries in the layout of a tensor-core operand: row g of 8, two pairs for each 16 elements.
__device__ __forceinline__ void raw_queries(const Args& a, u32 (*to)[2], int n, const Item& item, const Queries& who,
                                            int g, int t) {
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
}

// With an 8-bit cache, products are computed in float16: each row is scaled by a power of 2 to at most 512.
#if CACHE
__device__ __forceinline__ float to_half(u32 (*q)[2]) {
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
}
#endif

// S^T = K Q^T of a tile. ``q`` are the queries: in registers for 8 rows, else this lane's in shared memory.
#if NT == 1
__device__ __forceinline__ void scores(float (&s)[NT][2][4], u32 at, const Places& places, const u32 (*q)[2]) {
#else
__device__ __forceinline__ void scores(float (&s)[NT][2][4], u32 at, const Places& places, const uint2* q) {
#endif
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][0][e] = s[n][1][e] = 0;
#if CACHE
#pragma unroll
  for (int j = 0; j < (KSTEPS + 1) / 2; j++) {  // two chunks of 16 elements at a time
    u32 x[4];
    load_matrices(x, at + places.k[j % 4] + j / 4 * 128);
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
          const uint2 b = q[(n * KSTEPS + 2 * j + c) * 32];
          mma(s[n][c], f, b.x, b.y);
#endif
        }
      }
  }
#else
#pragma unroll
  for (int j = 0; j < KSTEPS; j++) {
    u32 f[4];
    load_matrices(f, at + places.k[j % 4] + j / 4 * 128);
#pragma unroll
    for (int n = 0; n < NT; n++) {
#if NT == 1
      mma(s[n][j % 2], f, q[j][0], q[j][1]);
#else
      const uint2 b = q[(n * KSTEPS + j) * 32];
      mma(s[n][j % 2], f, b.x, b.y);
#endif
    }
  }
#endif
}

// Zeroes values from token ``high`` on: weights there are 0, but 0 times uninitialised memory may be NaN.
__device__ __forceinline__ void clear_values(u32 at, int token0, int high, int lane) {
  for (int e = lane; e < TOKENS * CHUNKS; e += 32) {
    const int token = e / CHUNKS, chunk = e % CHUNKS;
    const u32 place = token * ROW_BYTES + ((SWIZZLED ? chunk ^ (token & 7) : chunk) << 4);
    if (token0 + token >= high)
      asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(at + TILE_BYTES + place), "r"(0) : "memory");
  }
  __syncwarp();
}

// Online softmax: converts scores to weights P^T in operand layout, and rescales earlier sums to the new largest score.
__device__ __forceinline__ void weigh(const Args& a, const float (&s)[NT][2][4], u32 (&p)[NT][2], State& sums,
                                      const View& view, int token0, bool there, bool plain, int g, int t) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    float x[4];  // tokens g and g + 8, rows 2t and 2t + 1
#pragma unroll
    for (int e = 0; e < 4; e++) {
      x[e] = (s[n][0][e] + s[n][1][e]) * view.factor[n][e % 2];
#if CAPPED
      x[e] = a.cap * (1.f - 2.f * inverse(power2(x[e] * (2.f * LOG2E / a.cap)) + 1.f));  // cap tanh(x / cap)
#endif
#if SLOPES
      const int row = view.row0 + n * 8 + 2 * t + e % 2;
      x[e] -= view.slope[n][e % 2] * (float)(view.before + row / GROUP - (token0 + g + e / 2 * 8));
#endif
      if (CAPPED || SLOPES) x[e] *= LOG2E;
    }
    if (!plain) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int token = token0 + g + e / 2 * 8, position = view.before + (view.row0 + n * 8 + 2 * t + e % 2) / GROUP;
        const bool seen = there && token < view.high && token <= position && (!WINDOWED || token > position - a.window);
        if (!seen) x[e] = -INF;
      }
    }
    float high0 = fmaxf(x[0], x[2]), high1 = fmaxf(x[1], x[3]);
#pragma unroll
    for (int w = 4; w < 32; w <<= 1) {
      high0 = fmaxf(high0, __shfl_xor_sync(~0u, high0, w));
      high1 = fmaxf(high1, __shfl_xor_sync(~0u, high1, w));
    }
    high0 = fmaxf(high0 - LIFT, sums.top[n][0]);
    high1 = fmaxf(high1 - LIFT, sums.top[n][1]);
    const float base0 = finite_or_0(high0), base1 = finite_or_0(high1);
    const float shrink0 = power2(sums.top[n][0] - base0), shrink1 = power2(sums.top[n][1] - base1);
    sums.top[n][0] = high0;
    sums.top[n][1] = high1;
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = power2(x[e] - (e % 2 ? base1 : base0));
    if (SHORT) {  // the warp has only one tile
      sums.total[n][0] = x[0] + x[2];
      sums.total[n][1] = x[1] + x[3];
    } else {
      sums.total[n][0] = sums.total[n][0] * shrink0 + x[0] + x[2];
      sums.total[n][1] = sums.total[n][1] * shrink1 + x[1] + x[3];
    }
    if (!SHORT && __any_sync(~0u, shrink0 != 1.f || shrink1 != 1.f)) {
#pragma unroll
      for (int d = 0; d < KSTEPS; d++) {
        sums.o[n][d][0] *= shrink0; sums.o[n][d][1] *= shrink1; sums.o[n][d][2] *= shrink0; sums.o[n][d][3] *= shrink1;
      }
    }
    p[n][0] = transpose(pack(x[0], x[1]));
    p[n][1] = transpose(pack(x[2], x[3]));
  }
}

// Operands V^T of a pair of steps, loaded transposed.
__device__ __forceinline__ void load_value_pair(u32 (&f)[2][4], u32 at, const Places& places, int j) {
#if CACHE  // two steps at a time
  u32 x[4];
  load_transposed(x, at + places.v[j % 4] + j / 4 * 128);
#pragma unroll
  for (int c = 0; c < 2; c++) {
    // Bytes are (token, element): the even element of a pair goes to row g, the odd one to row g + 8.
    widen(__byte_perm(x[c], 0, 0x3120), f[c][0], f[c][1]);
    widen(__byte_perm(x[c + 2], 0, 0x3120), f[c][2], f[c][3]);
  }
#else
#pragma unroll
  for (int c = 0; c < 2; c++)
    if (2 * j + c < KSTEPS) load_transposed(f[c], at + places.v[(2 * j + c) % 4] + (2 * j + c) / 4 * 128);
#endif
}

// O^T += V^T P^T.
__device__ __forceinline__ void weighted_values(State& sums, u32 at, const Places& places, const u32 (&p)[NT][2]) {
#pragma unroll
  for (int j = 0; j < (KSTEPS + 1) / 2; j++) {
    u32 f[2][4];
    load_value_pair(f, at, places, j);
#pragma unroll
    for (int c = 0; c < 2; c++)
      if (2 * j + c < KSTEPS)
#pragma unroll
        for (int n = 0; n < NT; n++) mma(sums.o[n][2 * j + c], f[c], p[n][0], p[n][1]);
  }
}

// The same in two parts: with few rows, values are loaded and converted while the softmax waits for other lanes.
template <int N> __device__ __forceinline__ void load_values(u32 (&values)[N][4], u32 at, const Places& places) {
#pragma unroll
  for (int j = 0; j < (N + 1) / 2; j++) {
    u32 f[2][4];
    load_value_pair(f, at, places, j);
#pragma unroll
    for (int c = 0; c < 2; c++)
      if (2 * j + c < N)
#pragma unroll
        for (int i = 0; i < 4; i++) values[2 * j + c][i] = f[c][i];
  }
}
template <int N> __device__ __forceinline__ void add_values(State& sums, const u32 (&values)[N][4], const u32 (&p)[NT][2]) {
#pragma unroll
  for (int d = 0; d < N; d++)
#pragma unroll
    for (int n = 0; n < NT; n++) mma(sums.o[n][d], values[d], p[n][0], p[n][1]);
}
