// Flash-Decoding in CUDA C++: fixed splits, which make results bitwise independent of the batch (cuda_decode.cu).
//
// The sum over the keys of a row follows one binary tree over their positions:
//
//   stream   every 8th tile of a chunk, added in order by one warp
//   chunk    its 8 streams: pairs at distance 4, then 2, then 1
//   line     its chunks: pairs that start at multiples of 2, of 4, of 8, ...
//
// Warps, teams and the merge of slots each compute whole subtrees, so the result does not depend on the assignment of
// tiles. Masked keys are identities, and joining with an identity is exact. FIXED kernels are compiled without fused
// multiply-adds, so that all variants round in the same way.

#if FIXED

__device__ __forceinline__ Sum joined(const Sum& a, const Sum& b) {
  Sum r;
  r.top = fmaxf(a.top, b.top);
  const float base = finite_or_0(r.top), x = power2(a.top - base), y = power2(b.top - base);
  r.total = a.total * x + b.total * y;
  r.o = make_float4(a.o.x * x + b.o.x * y, a.o.y * x + b.o.y * y, a.o.z * x + b.o.z * y, a.o.w * x + b.o.w * y);
  return r;
}

// The stream that a warp reads in each turn: streams that are joined first are read consecutively.
__device__ __forceinline__ int stream_of(int turn, int member) {
  return member + TEAM * (TURNS == 4 ? turn % 2 * 2 + turn / 2 : turn);
}

// The first tile at or after ``low`` of a stream of the chunk that starts at tile ``base``.
__device__ __forceinline__ int stream_tile(int base, int turn, int member, int low) {
  const int tile = base + stream_of(turn, member);
  return tile < low ? tile + (low - tile + STREAMS - 1) / STREAMS * STREAMS : tile;
}

// Sums the softmax weights over the lanes; every lane has the result.
__device__ __forceinline__ void add_lanes(State& sums) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int w = 4; w < 32; w <<= 1) {
      sums.total[n][0] += __shfl_xor_sync(~0u, sums.total[n][0], w);
      sums.total[n][1] += __shfl_xor_sync(~0u, sums.total[n][1], w);
    }
}

// Joins with the state of an earlier stream, whose outputs of row tile n and step d are ``at(n, d)``.
template <typename At>
__device__ __forceinline__ void join(State& sums, const float (&top)[NT][2], const float (&total)[NT][2], At at) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    float x[2], y[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float higher = fmaxf(top[n][e], sums.top[n][e]), base = finite_or_0(higher);
      x[e] = power2(top[n][e] - base);
      y[e] = power2(sums.top[n][e] - base);
      sums.top[n][e] = higher;
      sums.total[n][e] = total[n][e] * x[e] + sums.total[n][e] * y[e];
    }
#pragma unroll
    for (int d = 0; d < KSTEPS; d++) {
      const float4 o = at(n, d);
      float(&to)[4] = sums.o[n][d];
      to[0] = o.x * x[0] + to[0] * y[0];
      to[1] = o.y * x[1] + to[1] * y[1];
      to[2] = o.z * x[0] + to[2] * y[0];
      to[3] = o.w * x[1] + to[3] * y[1];
    }
  }
}

// The states of a warp's streams that wait to be joined. The first is in the warp's part of shared memory.
struct Streams {
  State held;
  float top[NT][2], total[NT][2];  // of the state in shared memory

  // Joins the state of a turn with those of earlier turns; after the last turn ``sums`` is the state of the chunk.
  __device__ __forceinline__ void add(State& sums, int turn, float4* mine, int lane) {
    if (TURNS == 1) return;
    if (TURNS == 4 && turn == 2) held = sums;
    if (TURNS == 4 && turn == 3)
      join(sums, held.top, held.total, [&](int n, int d) {
        return make_float4(held.o[n][d][0], held.o[n][d][1], held.o[n][d][2], held.o[n][d][3]);
      });
    if (turn % 2) join(sums, top, total, [&](int n, int d) { return mine[(n * KSTEPS + d) * 32 + lane]; });
    if (turn < TURNS / 2) {
#pragma unroll
      for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) { top[n][e] = sums.top[n][e]; total[n][e] = sums.total[n][e]; }
#pragma unroll
        for (int d = 0; d < KSTEPS; d++) {
          const float(&o)[4] = sums.o[n][d];
          mine[(n * KSTEPS + d) * 32 + lane] = make_float4(o[0], o[1], o[2], o[3]);
        }
      }
    }
  }
};

// Combines the states of a team's warps, for this lane's units of 8 rows.
__device__ __forceinline__ void team_sums(Sum (&to)[UNITS], const float* shared_o, const float2* shared_ml, int member,
                                          int lane) {
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int unit = (u * TEAM + member) * 32 + lane, row8 = unit / QUADS, d = unit % QUADS * 4;
    if (unit >= 8 * QUADS) {
      to[u] = identity();
      continue;
    }
    Sum s[TEAM];
#pragma unroll
    for (int w = 0; w < TEAM; w++) {
      const float2 ml = shared_ml[w * 8 + row8];
      s[w] = {ml.x, ml.y, *(const float4*)(shared_o + w * 8 * O_ROW + o_place(row8, d))};
    }
#pragma unroll
    for (int half = TEAM / 2; half; half /= 2)
#pragma unroll
      for (int w = 0; w < half; w++) s[w] = joined(s[w], s[w + half]);
    to[u] = s[0];
  }
}

// Joins the state of ``chunk`` with those of earlier chunks of a piece that starts with chunk ``first``. ``kept[l]`` is
// the state of 2^l chunks that waits for the next 2^l. For the last chunk, returns the state of the piece.
__device__ __forceinline__ Sum add_chunk(Sum s, Sum* kept, int chunk, int first, bool last) {
  int l = 0;
#pragma unroll 1
  for (; last ? chunk >> l > first >> l : chunk >> l & 1; l++)
    if (chunk >> l & 1 && chunk >> l > first >> l) s = joined(kept[l], s);
  if (!last) kept[l] = s;
  return s;
}

// Writes the result of a piece: the output, or a state to a slot.
__device__ __forceinline__ void write_sum(const Args& a, const Item& item, int start, int row, int d, float v_scale,
                                          Sum s) {
  if (item.slot >= 0) {
    post(a, item, row, d, s);
    return;
  }
  s.o.x *= v_scale; s.o.y *= v_scale; s.o.z *= v_scale; s.o.w *= v_scale;
  write_output(a, item, start, row, d, s.top, s.total, s.o);
}

// Joins a chunk's states of 8 rows with the piece's, and writes the result after the last chunk.
__device__ __forceinline__ void end_chunk(const Args& a, const Item& item, int start, int n, int rows, float v_scale,
                                          const Sum (&s)[UNITS], Sum (*kept)[LEVELS], int chunk, int first, bool last,
                                          int member, int lane) {
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int unit = (u * TEAM + member) * 32 + lane, row = n * 8 + unit / QUADS;
    const Sum sum = add_chunk(s[u], kept[u], chunk, first, last);
    if (last && unit < 8 * QUADS && row < rows) write_sum(a, item, start, row, unit % QUADS * 4, v_scale, sum);
  }
}

// Merges this team's share of a split line, like ``merge``, in the order of the tree. ``shift`` is the position in the
// tree of the line's first part among its siblings.
__device__ __forceinline__ void merge_fixed(const Args& a, const Item& item, int shift, int start, int queries,
                                            float v_scale, int member, int lane) {
  const Share share = share_of(a, item, queries);
  const int sharing = lanes_for(shift + share.parts), per_warp = 32 / sharing;
  const int mine = lane / sharing, sub = lane % sharing;
  int each_lane = 1;  // parts per lane
  while (sharing * each_lane < shift + share.parts) each_lane <<= 1;
#pragma unroll 1
  for (int unit0 = share.from + member * per_warp; unit0 < share.to; unit0 += TEAM * per_warp) {
    const int unit = unit0 + mine;
    const bool in = unit < share.to;
    Sum sum = identity();
#pragma unroll 1
    for (int k = 0; k < each_lane; k += PARTS) {
      Sum s[PARTS];
      const int p0 = sub * each_lane + k - shift;
      auto has = [&](int i) { return in && k + i < each_lane && p0 + i >= 0 && p0 + i < share.parts; };
      take(s, share, unit, has, [&](int i) { return p0 + i; });
      static_assert(PARTS == 4, "two levels of the tree");
      sum = joined(sum, joined(joined(s[0], s[1]), joined(s[2], s[3])));
    }
#pragma unroll 1
    for (int w = 1; w < sharing; w <<= 1) {
      Sum other;
      other.top = __shfl_xor_sync(~0u, sum.top, w);
      other.total = __shfl_xor_sync(~0u, sum.total, w);
      other.o.x = __shfl_xor_sync(~0u, sum.o.x, w); other.o.y = __shfl_xor_sync(~0u, sum.o.y, w);
      other.o.z = __shfl_xor_sync(~0u, sum.o.z, w); other.o.w = __shfl_xor_sync(~0u, sum.o.w, w);
      sum = joined(sum, other);
    }
    sum.o.x *= v_scale; sum.o.y *= v_scale; sum.o.z *= v_scale; sum.o.w *= v_scale;
    if (in && sub == 0) write_output(a, item, start, unit / QUADS, unit % QUADS * 4, sum.top, sum.total, sum.o);
  }
}

// Merges a share of the output for each piece of a split line; a worker may have several such pieces.
__device__ __forceinline__ void merge_cut_pieces(const Args& a, const int4* items, int pieces, int member, int lane) {
#pragma unroll 1
  for (int i = 0; pieces; i++) {
    const int4 i0 = __ldg(items + 2 * i), i1 = __ldg(items + 2 * i + 1);
    if (i1.y < 0) continue;
    Item cut;
    cut.request = i0.x; cut.head = i0.y; cut.block = i0.z; cut.slot = i1.y; cut.share = i1.w;
    const Queries who = queries_of(a, cut.request);
    const float v_scale = SCALED ? __ldg(a.v_scale + cut.head) : 1.f;
    merge_fixed(a, cut, i1.z, who.start, who.count, v_scale, member, lane);
    pieces--;
  }
}

#endif
