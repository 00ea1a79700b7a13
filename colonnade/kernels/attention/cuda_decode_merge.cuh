// Flash-Decoding in CUDA C++: combines and writes states at the end of a piece (cuda_decode.cu).

__device__ __forceinline__ void write_output(const Args& a, const Item& item, int start, int row, int d, float top,
                                             float total, float4 o) {
  const int m = item.block * ROWS + row, n = item.head * GROUP + m % GROUP;
#if SINKS
  const float sink = read(a.sinks + n) * LOG2E, higher = fmaxf(top, sink), base = finite_or_0(higher);
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

// Writes the output of lines without keys.
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

// Replaces the bit pattern of an empty slot by another NaN.
__device__ __forceinline__ float posted(float x) {
  return __float_as_uint(x) == ~0u ? __uint_as_float(0x7fffffffu) : x;
}
__device__ __forceinline__ bool empty(float x) { return __float_as_uint(x) == ~0u; }

struct Sum {  // state of 4 elements of a row: largest score, sum of weights, unscaled output
  float top, total;
  float4 o;

  __device__ __forceinline__ void add(const Sum (&s)[PARTS]) {
    float higher = top;
#pragma unroll
    for (int i = 0; i < PARTS; i++) higher = fmaxf(higher, s[i].top);
    const float base = finite_or_0(higher), shrink = power2(top - base);
    top = higher;
    total *= shrink;
    o.x *= shrink; o.y *= shrink; o.z *= shrink; o.w *= shrink;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      const float e = power2(s[i].top - base);
      total += s[i].total * e;
      o.x += s[i].o.x * e; o.y += s[i].o.y * e; o.z += s[i].o.z * e; o.w += s[i].o.w * e;
    }
  }
};
__device__ __forceinline__ Sum identity() { return {-INF, 0.f, make_float4(0, 0, 0, 0)}; }

// Writes the state of a part of a line to its slot.
__device__ __forceinline__ void post(const Args& a, const Item& item, int row, int d, const Sum& s) {
  float* const slot = a.slot_o + (((i64)item.slot * ROWS + row) * QUADS + d / 4) * 8;
  __stcg((float4*)slot, make_float4(posted(s.o.x), posted(s.o.y), posted(s.o.z), posted(s.o.w)));
  __stcg((float2*)(slot + 4), make_float2(posted(s.top), posted(s.total)));
}

// A team's share of a split line: units ``from`` to ``to`` (4 elements of a row each), with ``parts`` states per unit.
struct Share {
  int parts, from, to;
  float* slots;  // slot of unit 0 and part 0

  __device__ __forceinline__ float* place(int unit, int p) const {
    return slots + ((i64)p * ROWS * QUADS + unit) * 8;
  }
};
__device__ __forceinline__ Share share_of(const Args& a, const Item& item, int queries) {
  Share r;
  const int part = item.share >> 16, units = rows_of(item, queries) * QUADS;
  r.parts = item.share & 0xffff;
  const int each = (u32)(units + r.parts - 1) / (u32)r.parts;
  r.from = part * each;
  r.to = min(units, r.from + each);
  r.slots = a.slot_o + (i64)(item.slot - part) * ROWS * QUADS * 8;
  return r;
}
// The number of lanes that share the parts of one unit: a power of 2.
__device__ __forceinline__ int lanes_for(int parts) {
  int sharing = 1;
  while (sharing < parts && sharing < 32) sharing <<= 1;
  return sharing;
}
// Uses fewer lanes per unit if the team would otherwise need another round for its units and no lane gets more states
// than it can hold: a round costs a round trip to the L2 cache and the shuffles of a sum.
__device__ __forceinline__ int lanes_for(int parts, int units) {
  int sharing = lanes_for(parts);
  while (sharing > 1 && units * sharing > TEAM * 32 && parts * 2 <= sharing * PARTS) sharing >>= 1;
  return sharing;
}

// Polls the slots of a unit's parts ``part(0)`` to ``part(PARTS - 1)``, reads their states and empties the slots. States
// for which ``has(i)`` is false are identities.
template <typename Has, typename Part>
__device__ __forceinline__ void take(Sum (&s)[PARTS], const Share& share, int unit, Has has, Part part) {
#pragma unroll
  for (int i = 0; i < PARTS; i++) s[i] = identity();
  bool missing;
  do {
    missing = false;
#pragma unroll
    for (int i = 0; i < PARTS; i++)
      if (has(i)) {
        float* const x = share.place(unit, part(i));
        asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(s[i].o.x), "=f"(s[i].o.y), "=f"(s[i].o.z), "=f"(s[i].o.w) : "l"(x) : "memory");
        asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];"
                     : "=f"(s[i].top), "=f"(s[i].total) : "l"(x + 4) : "memory");
      }
#pragma unroll
    for (int i = 0; i < PARTS; i++)
      missing |= empty(s[i].o.x) || empty(s[i].o.y) || empty(s[i].o.z) || empty(s[i].o.w) || empty(s[i].top) ||
                 empty(s[i].total);
  } while (missing);
#pragma unroll
  for (int i = 0; i < PARTS; i++)
    if (has(i)) {
      float* const x = share.place(unit, part(i));
      const float nan = __uint_as_float(~0u);
      __stcg((float4*)x, make_float4(nan, nan, nan, nan));
      __stcg((float2*)(x + 4), make_float2(nan, nan));
    }
}

// Merges this team's share of a split line.
__device__ __forceinline__ void merge(const Args& a, const Item& item, int start, int queries, float v_scale,
                                      int member, int lane) {
  const Share share = share_of(a, item, queries);
  const int sharing = lanes_for(share.parts, share.to - share.from), per_warp = 32 / sharing;
  const int mine = lane / sharing, sub = lane % sharing;
#pragma unroll 1
  for (int unit0 = share.from + member * per_warp; unit0 < share.to; unit0 += TEAM * per_warp) {
    const int unit = unit0 + mine;
    const bool in = unit < share.to;
    Sum sum = identity();
#pragma unroll 1
    for (int first = sub; first < share.parts; first += sharing * PARTS) {
      Sum s[PARTS];
      take(s, share, unit, [&](int i) { return in && first + i * sharing < share.parts; },
           [&](int i) { return first + i * sharing; });
      sum.add(s);
    }
    float higher = sum.top;
    for (int w = 1; w < sharing; w <<= 1) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, w));
    const float shrink = power2(sum.top - finite_or_0(higher)), times = shrink * v_scale;
    sum.total *= shrink;
    sum.o.x *= times; sum.o.y *= times; sum.o.z *= times; sum.o.w *= times;
    for (int w = 1; w < sharing; w <<= 1) {
      sum.total += __shfl_xor_sync(~0u, sum.total, w);
      sum.o.x += __shfl_xor_sync(~0u, sum.o.x, w); sum.o.y += __shfl_xor_sync(~0u, sum.o.y, w);
      sum.o.z += __shfl_xor_sync(~0u, sum.o.z, w); sum.o.w += __shfl_xor_sync(~0u, sum.o.w, w);
    }
    if (in && sub == 0) write_output(a, item, start, unit / QUADS, unit % QUADS * 4, higher, sum.total, sum.o);
  }
}

// Writes a warp's state of 8 rows to shared memory for its team. With fixed splits the lanes' weights are already summed.
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
#pragma unroll
    for (int half = 0; half < 2; half++) {
      mine[o_place(2 * t, o_column(d, g, half))] = sums.o[n][d][2 * half];
      mine[o_place(2 * t + 1, o_column(d, g, half))] = sums.o[n][d][2 * half + 1];
    }
  }
  if (g == 0) {
    ml[2 * t] = make_float2(sums.top[n][0], sums.total[n][0]);
    ml[2 * t + 1] = make_float2(sums.top[n][1], sums.total[n][1]);
  }
}

// Combines the team's states of 8 rows and writes the output, or a slot if the piece is a part of a line.
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
      post(a, item, row, d, {highest, weights, sum});
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
