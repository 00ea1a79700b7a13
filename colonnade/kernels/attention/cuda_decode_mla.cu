// Flash-Decoding in CUDA C++ for MLA: each latent is key and value of up to 16 query rows and is read once
// (cuda_decode.py).
//
// A key has H + ROPE elements; the first H are the value. 16 rows of 512 accumulators do not fit into the registers of
// one warp, so all warps of a block process a tile of 64 latents together. A warp multiplies 16 tokens by half of the
// elements of the queries, the partial scores are added in shared memory, and each warp adds the weighted values of its
// share of the H columns. Every warp computes the softmax of all 64 tokens, which costs less than a third barrier. A
// state is distributed over the block and needs no combining. The block has one ring of tiles; a warp copies 8 tokens of
// each tile.
//
// The plan, the protocol of slots, and the bounds checks of lengths and page ids are those of cuda_decode.cu.

constexpr int LATENT = H + ROPE, LATENT_BYTES = LATENT * 2, BLOCK_TOKENS = 64, GROUPS = BLOCK_TOKENS / TOKENS;
constexpr int HALVES = WARPS / GROUPS, HALF_STEPS = LATENT / 16 / HALVES;  // steps per half of the elements of a key
constexpr int COLUMN_STEPS = H / 16 / WARPS;  // steps of 16 value columns per warp
constexpr int SPREADS = LATENT / 64;  // groups of 8 chunks of 16 bytes, copied by 8 lanes
constexpr int BLOCK_STAGE = BLOCK_TOKENS * LATENT_BYTES;
constexpr int SCORE_ROW = BLOCK_TOKENS + 8;  // rows of scores lie in different banks
static_assert(WARPS == 8 && HALVES == 2 && LATENT % 64 == 0 && H % (16 * WARPS) == 0 && TEAMS == 1, "whole shares");
static_assert(!CACHE && MERGE && NT <= 2, "16 bits; more rows do not fit the registers");

// The slot of a part has its unscaled outputs and, for each part of its line, a copy of the largest scores and sums of the
// rows whose outputs that part merges. A state of 16 rows takes 33 KB instead of 64 KB as in cuda_decode_merge.cuh, and
// a share is contiguous. There is room for copies for H / 2 parts.
constexpr int SLOT_FLOATS = ROWS * H * 2;
__device__ __forceinline__ float* slot_of(const Args& a, int slot) { return a.slot_o + (i64)slot * SLOT_FLOATS; }
__device__ __forceinline__ float2* tops_of(float* slot, int reader) {
  return (float2*)(slot + ROWS * H) + reader * ROWS;
}

// Merges the block's share of a split line. Threads are units of 4 elements times groups of parts; the sums of the groups
// are added in shared memory, in place of a tile of the ring.
__device__ __forceinline__ void merge_share(const Args& a, const Item& item, int start, int queries, char* smem) {
  const int part = item.share >> 16, parts = item.share & 0xffff, units = rows_of(item, queries) * QUADS;
  const int each = (units + parts - 1) / parts, from = part * each, to = min(units, from + each);
  const int first_slot = item.slot - part;
  int wide = 1;  // units processed at a time: a power of 2
  while (wide < to - from && wide < THREADS) wide <<= 1;
  const int groups = THREADS / wide, mine = threadIdx.x / wide, column = threadIdx.x % wide;
  float4* const sums_o = (float4*)smem;
  float2* const sums_ml = (float2*)(smem + THREADS * 16);
  const float nan = __uint_as_float(~0u);
#pragma unroll 1
  for (int unit0 = from; unit0 < to; unit0 += wide) {
    const int unit = unit0 + column, row = unit / QUADS;
    Sum sum = identity();
    if (unit < to) {
#pragma unroll 1
      for (int p0 = mine; p0 < parts; p0 += groups * PARTS) {
        Sum s[PARTS];
        bool missing;
        do {
          missing = false;
#pragma unroll
          for (int i = 0; i < PARTS; i++) {
            s[i] = identity();
            const int p = p0 + i * groups;
            if (p < parts) {
              float* const slot = slot_of(a, first_slot + p);
              asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                           : "=f"(s[i].o.x), "=f"(s[i].o.y), "=f"(s[i].o.z), "=f"(s[i].o.w)
                           : "l"(slot + unit * 4) : "memory");
              asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];"
                           : "=f"(s[i].top), "=f"(s[i].total) : "l"(tops_of(slot, part) + row) : "memory");
            }
          }
#pragma unroll
          for (int i = 0; i < PARTS; i++)
            missing |= empty(s[i].o.x) || empty(s[i].o.y) || empty(s[i].o.z) || empty(s[i].o.w) || empty(s[i].top) ||
                       empty(s[i].total);
        } while (missing);
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
          const int p = p0 + i * groups;
          if (p < parts) __stcg((float4*)slot_of(a, first_slot + p) + unit, make_float4(nan, nan, nan, nan));
        }
        sum.add(s);
      }
    }
    sums_o[threadIdx.x] = sum.o;
    sums_ml[threadIdx.x] = make_float2(sum.top, sum.total);
    __syncthreads();
    if (mine == 0 && unit < to) {
      float higher = -INF;
#pragma unroll 4
      for (int i = 0; i < groups; i++) higher = fmaxf(higher, sums_ml[i * wide + column].x);
      const float base = finite_or_0(higher);
      float total = 0;
      float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int i = 0; i < groups; i++) {
        const float2 ml = sums_ml[i * wide + column];
        const float4 x = sums_o[i * wide + column];
        const float e = power2(ml.x - base);
        total += ml.y * e;
        o.x += x.x * e; o.y += x.y * e; o.z += x.z * e; o.w += x.w * e;
      }
      write_output(a, item, start, row, unit % QUADS * 4, higher, total, o);
    }
    __syncthreads();
  }
  // All threads have read this block's copies of scores and sums.
  if (to > from) {
    const int row0 = from / QUADS, rows = (to - 1) / QUADS - row0 + 1;
    for (int i = threadIdx.x; i < parts * rows; i += THREADS)
      __stcg(tops_of(slot_of(a, first_slot + i / rows), part) + row0 + i % rows, make_float2(nan, nan));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_mla(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, worker = blockIdx.x;
  const int group = warp % GROUPS, half = warp / GROUPS;
  float* const shared_scores = (float*)(smem + STAGES * BLOCK_STAGE);  // [half][row][token]
  unsigned char* const shared_pages = (unsigned char*)(shared_scores + HALVES * ROWS * SCORE_ROW);  // [stage][warp]
  float2* const shared_tops = (float2*)(shared_pages + STAGES * WARPS);  // [row]
  const u32 ring = shared_address(smem);
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

  const int4* const first_item = (const int4*)(a.plan + a.firsts_at + worker * FIELDS);
  const int4 f0 = __ldg(first_item), f1 = __ldg(first_item + 1);
  const int count = f1.z, nothing = __ldg(a.plan + 1);
  const int4* const items = (const int4*)(a.plan + a.items_at) + (i64)__ldg(a.plan + 4 + worker) * 2;

  // Lane i has item i of 32, and its queries.
  int4 n0 = f0, n1 = f1;
  Queries of = {0, 0, 0};
  auto look_up = [&](int i) {
    if (i + lane < count) {
      n0 = __ldg(items + 2 * (i + lane));
      n1 = __ldg(items + 2 * (i + lane) + 1);
      of = queries_of(a, n0.x);
    }
  };
  auto item_at = [&](int i, Queries& who) {
    const int from = i % 32;
    Item r;
    r.request = __shfl_sync(~0u, n0.x, from); r.head = __shfl_sync(~0u, n0.y, from);
    r.block = __shfl_sync(~0u, n0.z, from); r.first = __shfl_sync(~0u, n0.w, from);
    r.end = __shfl_sync(~0u, n1.x, from); r.slot = __shfl_sync(~0u, n1.y, from); r.share = __shfl_sync(~0u, n1.w, from);
    who.length = __shfl_sync(~0u, of.length, from);
    who.start = __shfl_sync(~0u, of.start, from);
    who.count = __shfl_sync(~0u, of.count, from);
    return r;
  };

  // -- queries in operand layout: row g of 8, two pairs for each 16 elements of this warp's half
  u32 q[NT][HALF_STEPS][2];
  auto ask_queries = [&](const Item& item, const Queries& who) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const int m = item.block * ROWS + n * 8 + g;
      const bool there = m < who.count * GROUP;
      const char* const from =
          a.q + (i64)(who.start + m / GROUP) * a.q_t + (i64)(m % GROUP) * a.q_n + half * HALF_STEPS * 32 + t * 4;
#pragma unroll
      for (int s = 0; s < HALF_STEPS; s++) {
        q[n][s][0] = there ? __ldg((const u32*)(from + s * 32)) : 0;
        q[n][s][1] = there ? __ldg((const u32*)(from + s * 32 + 16)) : 0;
      }
    }
  };

  // -- loading: the first token of the next tile, and the page of this warp's 8 tokens, looked up one tile ahead
  int next = 0, at_token = f0.w / TOKENS * TOKENS, end = f1.x, stage = 0, page = -1;
  const int* table = a.pages + (i64)f0.x * a.pages_r;
  const int my_token = warp * 8;
  Queries who_first = {0, 0, 0};
  if (count) who_first = queries_of(a, f0.x);
  auto find_page = [&]() {
    const int token = at_token + my_token, column = token / PAGE;
    page = token < end && column < a.columns ? __ldg(table + column) : -1;
  };
  if (count) find_page();
  look_up(0);
  Item item;
  item.request = f0.x; item.head = f0.y; item.block = f0.z; item.first = f0.w;
  item.end = f1.x; item.slot = f1.y; item.share = f1.w;
  if (count) ask_queries(item, who_first);
  int readable = count ? min(end, who_first.length) : 0;  // end of the tokens that are read
  auto load = [&]() {
    if (next < count) {
      const bool there = (u32)page < (u32)a.cache_pages;
      const int token0 = at_token + my_token, left = there ? readable - token0 : 0;
      const int chunk = lane % 8, token = lane / 8;
      const char* const from = a.k + (i64)(there ? page : 0) * a.k_page + (i64)(token0 % PAGE + token) * a.k_p + chunk * 16;
      const u32 to = ring + stage * BLOCK_STAGE + my_token * LATENT_BYTES;
#pragma unroll
      for (int h = 0; h < 2; h++) {  // tokens ``token`` and ``token`` + 4
        const u32 row = to + (token + 4 * h) * LATENT_BYTES + ((chunk ^ (token + 4 * h)) << 4);
#pragma unroll
        for (int j = 0; j < SPREADS; j++)
          copy16(row + j * 128, from + 4 * h * a.k_p + j * 128, token + 4 * h < left ? 16 : 0, policy);
      }
      if (lane == 0) shared_pages[stage * WARPS + warp] = there;
      at_token += BLOCK_TOKENS;
      if (at_token >= end && ++next < count) {
        if (next % 32 == 0) look_up(next);
        Queries who;
        const Item following = item_at(next, who);
        table = a.pages + (i64)following.request * a.pages_r;
        at_token = following.first / TOKENS * TOKENS;
        end = following.end;
        readable = min(end, who.length);
      }
      if (next < count) find_page();
    }
    commit();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  };
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; i++) load();
  write_empty_lines(a, nothing ? __ldg(a.plan) : 0);

  // Offsets in a tile of the rows that a lane passes to ldmatrix.
  u32 k_at[4], v_at[COLUMN_STEPS];
  const int k_token = lane % 8 + lane / 8 % 2 * 8, v_token = lane % 8 + lane / 16 * 8;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int step = half * HALF_STEPS + i;
    k_at[i] = (group * TOKENS + k_token) * LATENT_BYTES + step / 4 * 128 +
              ((2 * (step % 4) + lane / 16) ^ (k_token & 7)) * 16;
  }
#pragma unroll
  for (int c = 0; c < COLUMN_STEPS; c++) {
    const int chunk = 2 * (warp * COLUMN_STEPS + c) + lane / 8 % 2;
    v_at[c] = v_token * LATENT_BYTES + (chunk / 8 * 8 + (chunk % 8 ^ (v_token & 7))) * 16;
  }

  Item cut_first, cut_last;  // only a worker's first and last piece can be part of a split line
  Queries who_cut_first, who_cut_last;
  cut_first.slot = cut_last.slot = -1;
  // The consumer's own copies of items: the loader is up to three tiles ahead and may already use the next 32 items.
  int4 m0 = n0, m1 = n1;
  Queries m_of = of;
  int used = 0;
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    Queries who = who_first;
    if (i > 0) {
      if (i % 32 == 0 && i + lane < count) {
        m0 = __ldg(items + 2 * (i + lane));
        m1 = __ldg(items + 2 * (i + lane) + 1);
        m_of = queries_of(a, m0.x);
      }
      const int from = i % 32;
      item.request = __shfl_sync(~0u, m0.x, from); item.head = __shfl_sync(~0u, m0.y, from);
      item.block = __shfl_sync(~0u, m0.z, from); item.first = __shfl_sync(~0u, m0.w, from);
      item.end = __shfl_sync(~0u, m1.x, from); item.slot = __shfl_sync(~0u, m1.y, from);
      item.share = __shfl_sync(~0u, m1.w, from);
      who.length = __shfl_sync(~0u, m_of.length, from); who.start = __shfl_sync(~0u, m_of.start, from);
      who.count = __shfl_sync(~0u, m_of.count, from);
      ask_queries(item, who);
    }
    const int row0 = item.block * ROWS, rows = rows_of(item, who.count), high = min(item.end, who.length);
    const int before = who.length - who.count;
    // Every row attends to all tokens in [plain_from, plain_to), so tiles inside need no mask.
    const int plain_to = min(high, before + row0 / GROUP + 1);
    const int plain_from = WINDOWED ? before + (row0 + rows - 1) / GROUP - a.window + 1 : 0;
    const float factor = a.scale * LOG2E;
    float top[NT], total[NT], o[NT][COLUMN_STEPS][4];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      top[n] = -INF;
      total[n] = 0;
#pragma unroll
      for (int c = 0; c < COLUMN_STEPS; c++) o[n][c][0] = o[n][c][1] = o[n][c][2] = o[n][c][3] = 0;
    }
#pragma unroll 1
    for (int token0 = item.first / TOKENS * TOKENS; token0 < item.end; token0 += BLOCK_TOKENS) {
      wait<STAGES - 2>();
      __syncthreads();  // all copies of this tile have arrived, and all warps have read the previous tile
      load();
      const u32 at = ring + used * BLOCK_STAGE;
      const u64 there = *(const u64*)(shared_pages + used * WARPS);
      used = used + 1 == STAGES ? 0 : used + 1;

      // -- this warp's half of the scores of 16 tokens, S^T = K Q^T
      float s[NT][2][4];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][0][e] = s[n][1][e] = 0;
#pragma unroll
      for (int j = 0; j < HALF_STEPS; j++) {
        u32 f[4];
        load_matrices(f, at + k_at[j % 4] + j / 4 * 128);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(s[n][j % 2], f, q[n][j][0], q[n][j][1]);
      }
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          shared_scores[(half * ROWS + n * 8 + 2 * t + e % 2) * SCORE_ROW + group * TOKENS + g + e / 2 * 8] =
              s[n][0][e] + s[n][1][e];
      __syncthreads();

      // -- weights of row g for tokens 2t, 2t + 1, 2t + 8, 2t + 9 of each 16: the operand layout of the second product
      const bool plain = there == 0x0101010101010101ull && token0 >= plain_from && token0 + BLOCK_TOKENS <= plain_to;
      u32 p[NT][GROUPS][2];
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float x[GROUPS][4], highest = -INF;
        const float* const mine = shared_scores + (n * 8 + g) * SCORE_ROW + 2 * t;
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float2 first = *(const float2*)(mine + j * TOKENS + e * 8);
            const float2 second = *(const float2*)(mine + ROWS * SCORE_ROW + j * TOKENS + e * 8);
            x[j][2 * e] = (first.x + second.x) * factor;
            x[j][2 * e + 1] = (first.y + second.y) * factor;
          }
        if (!plain) {
          const int position = before + (row0 + n * 8 + g) / GROUP;
#pragma unroll
          for (int j = 0; j < GROUPS; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const int token = token0 + j * TOKENS + 2 * t + e / 2 * 8 + e % 2;
              const bool seen = (there >> (16 * j) & 1) && token < high && token <= position &&
                                (!WINDOWED || token > position - a.window);
              if (!seen) x[j][e] = -INF;
            }
        }
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
          highest = fmaxf(highest, fmaxf(fmaxf(x[j][0], x[j][1]), fmaxf(x[j][2], x[j][3])));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
        highest = fmaxf(highest - LIFT, top[n]);
        const float base = finite_or_0(highest), shrink = power2(top[n] - base);
        top[n] = highest;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            x[j][e] = power2(x[j][e] - base);
            sum += x[j][e];
          }
          p[n][j][0] = pack(x[j][0], x[j][1]);
          p[n][j][1] = pack(x[j][2], x[j][3]);
        }
        total[n] = total[n] * shrink + sum;
        if (__any_sync(~0u, shrink != 1.f)) {
          const float shrink0 = __shfl_sync(~0u, shrink, 8 * t), shrink1 = __shfl_sync(~0u, shrink, 8 * t + 4);
#pragma unroll
          for (int c = 0; c < COLUMN_STEPS; c++) {
            o[n][c][0] *= shrink0; o[n][c][1] *= shrink1; o[n][c][2] *= shrink0; o[n][c][3] *= shrink1;
          }
        }
      }

      // -- O^T += V^T P^T
#pragma unroll
      for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int c = 0; c < COLUMN_STEPS; c++) {
          u32 f[4];
          load_transposed(f, at + v_at[c] + j * TOKENS * LATENT_BYTES);
#pragma unroll
          for (int n = 0; n < NT; n++) mma(o[n][c], f, p[n][j][0], p[n][j][1]);
        }
    }

    // -- four lanes exchange elements, so that each lane has 4 elements of a row
    const int mine = g % 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
      total[n] += __shfl_xor_sync(~0u, total[n], 1);
      total[n] += __shfl_xor_sync(~0u, total[n], 2);
      const int row = n * 8 + 2 * t + mine % 2;
      const float row_top = __shfl_sync(~0u, top[n], 4 * (2 * t + mine % 2));
      const float row_total = __shfl_sync(~0u, total[n], 4 * (2 * t + mine % 2));
#pragma unroll
      for (int c = 0; c < COLUMN_STEPS; c++) {
        float(&x)[4] = o[n][c];
#pragma unroll
        for (int bit = 1; bit <= 2; bit <<= 1)
#pragma unroll
          for (int e = 0; e < 4; e++)
            if (!(e & bit)) {
              const bool upper = mine & bit;
              const float other = __shfl_xor_sync(~0u, upper ? x[e] : x[e | bit], 4 * bit);
              if (upper) x[e] = other;
              else x[e | bit] = other;
            }
        const int d = (warp * COLUMN_STEPS + c) * 16 + mine / 2 * 8 + g / 4 * 4;
        if (row < rows) {
          const float4 four = make_float4(x[0], x[1], x[2], x[3]);
          if (item.slot >= 0)
            __stcg((float4*)(slot_of(a, item.slot) + row * H + d),
                   make_float4(posted(four.x), posted(four.y), posted(four.z), posted(four.w)));
          else write_output(a, item, who.start, row, d, row_top, row_total, four);
        }
      }
    }
    if (item.slot >= 0) {
      if (warp == 0 && t == 0) {
#pragma unroll
        for (int n = 0; n < NT; n++) shared_tops[n * 8 + g] = make_float2(posted(top[n]), posted(total[n]));
      }
      __syncthreads();
      const int parts = item.share & 0xffff, units = rows * QUADS, each = (units + parts - 1) / parts;
      float* const slot = slot_of(a, item.slot);
      for (int i = threadIdx.x; i < parts * ROWS; i += THREADS) {
        const int reader = i / ROWS, row = i % ROWS, from = reader * each, to = min(units, from + each);
        if (from < to && row >= from / QUADS && row <= (to - 1) / QUADS)
          __stcg(tops_of(slot, reader) + row, shared_tops[row]);
      }
    }
    if (item.slot >= 0 && i == 0) { cut_first = item; who_cut_first = who; }
    if (item.slot >= 0 && i > 0) { cut_last = item; who_cut_last = who; }
  }
  __syncthreads();  // all warps have read all tiles
#pragma unroll 1
  for (int c = 0; c < 2; c++) {
    if (cut_first.slot >= 0) merge_share(a, cut_first, who_cut_first.start, who_cut_first.count, smem);
    cut_first = cut_last;
    who_cut_first = who_cut_last;
    cut_last.slot = -1;
  }
}
