// Flash-Decoding in CUDA C++: what becomes of states at the end of a piece (cuda_decode.cu).

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

__device__ __forceinline__ int rows_of(const Item& item, int queries) {
  return min(ROWS, queries * GROUP - item.block * ROWS);
}

// Lines of no keys.
__device__ __forceinline__ void write_empty_lines(const Args& a, int merges) {
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
}

// A word that is never the pattern of an empty slot.
__device__ __forceinline__ float posted(float x) {
  return __float_as_uint(x) == ~0u ? __uint_as_float(0x7fffffffu) : x;
}
__device__ __forceinline__ bool empty(float x) { return __float_as_uint(x) == ~0u; }

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

// A warp's state of 8 rows, left in shared memory for its team. With fixed splits lanes' weights are added already.
__device__ __forceinline__ void leave_state(State& sums, int n, float* mine, float2* ml, int g, int t) {
#if !FIXED
#pragma unroll
  for (int w = 4; w < 32; w <<= 1) {
    sums.total[n][0] += __shfl_xor_sync(~0u, sums.total[n][0], w);
    sums.total[n][1] += __shfl_xor_sync(~0u, sums.total[n][1], w);
  }
#endif
#pragma unroll
  for (int d = 0; d < KSTEPS; d++) {
    // Products of 8 bits have numbers 2g and 2g + 1 in rows g and g + 8.
    const int low = d * 16 + (CACHE ? 2 * g : g), high_d = CACHE ? low + 1 : low + 8;
    mine[o_place(2 * t, low)] = sums.o[n][d][0];
    mine[o_place(2 * t + 1, low)] = sums.o[n][d][1];
    mine[o_place(2 * t, high_d)] = sums.o[n][d][2];
    mine[o_place(2 * t + 1, high_d)] = sums.o[n][d][3];
  }
  if (g == 0) {
    ml[2 * t] = make_float2(sums.top[n][0], sums.total[n][0]);
    ml[2 * t + 1] = make_float2(sums.top[n][1], sums.total[n][1]);
  }
}

// The team's states of 8 rows together: to the output, or to a slot if the piece is a part of a line.
__device__ __forceinline__ void write_states(const Args& a, const Item& item, int start, int n, int rows, float v_scale,
                                             const float* shared_o, const float2* shared_ml, int member, int lane) {
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
    write_output(a, item, start, row, d, highest, weights, sum);
  }
}
