// Flash-Decoding in CUDA C++ for a few keys: one tile per warp, in registers, without a split plan (cuda_decode.py).
//
// With at most about a hundred keys, a call is bound by the latency of dependent loads and of first instruction fetches.
// So a team of TEAM warps processes one line, given by the block's index, and each warp one tile of it: there is no
// plan, no loop and no ring. Lengths, page ids and queries are loaded together, then all keys and values. A lane loads 16
// bytes, 8 elements of a token. The products sum over elements in any order, so keys and queries need no rearrangement;
// values are transposed in registers (movmatrix), and two lanes exchange halves of their outputs to write 16 bytes each.
//
// Lengths and page ids are bounds-checked here, as in cuda_decode.cu.

constexpr int ROW_BLOCKS = (GROUP + 7) / 8;  // per head: more rows per warp are slower than reading keys twice
constexpr int SPANS = H / 32;  // spans of 32 elements: 4 lanes load one span of a token
constexpr int VALUE_BYTES = TOKENS * H * 2;  // values of a tile; a state of 8 rows takes as many bytes
constexpr int HALVES = HALF ? 1 : 2;  // groups of 8 tokens per tile; HALF: no request has more than 8
static_assert(SHORT && H % 32 == 0 && !CACHE && SINGLE && NT == 1, "16 bits, whole spans, one query per request, 8 rows");
static_assert(!HALF || TEAM == 1, "8 tokens are one tile");
// Limits registers so that two blocks of up to 8 warps fit on a multiprocessor: otherwise only one block fits for heads
// of 256, and a step of 192 lines takes two waves. Several smaller blocks fit anyway.
constexpr int MOST_THREADS = HALF || THREADS > 256 ? THREADS : 256, RESIDENT = THREADS > 128 && THREADS <= 256 ? 2 : 1;

// Loads nothing unless ``any`` is set. The registers then keep their old values, for rows and tokens that do not exist,
// whose results are dropped.
__device__ __forceinline__ void load_16_bytes(u32 (&to)[4], const char* from, bool any) {
#if HALF
  asm volatile("{.reg .pred any; setp.ne.u32 any, %5, 0; @any ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3]) : "l"(from), "r"((u32)any) : "memory");
#else
  to[0] = to[1] = to[2] = to[3] = 0;
  if (any)
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from) : "memory");
#endif
}

__device__ __forceinline__ void own_16_bytes(u32 (&to)[4], u32 from) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// A product over 8 tokens, without an accumulator input.
__device__ __forceinline__ void mma_8_tokens(float* c, u32 a0, u32 a1, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a0), "r"(a1), "r"(b), "f"(0.f));
}

// Waits for this lane's copies, but only after the largest score is known: otherwise ptxas moves the wait above the last
// loads of keys, which are then no longer in flight together with the values. No maximum has the excluded bit pattern.
__device__ __forceinline__ void wait_after(float top) {
  asm volatile("{.reg .pred known; setp.ne.u32 known, %0, 0x7fc12345; @known cp.async.wait_group 0;}"
               ::"r"(__float_as_uint(top)) : "memory");
}

// Writes the output of a line that one warp has processed: row 2t in lanes with even g, row 2t + 1 in odd ones.
__device__ __forceinline__ void write_rows(const Args& a, State& sums, const Item& item, int g, int t) {
  const int odd = g & 1;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    float each[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = item.block * 8 + 2 * t + e, head = item.head * GROUP + row;
      float top = sums.top[n][e], total = sums.total[n][e], shrink = 1.f;
#pragma unroll
      for (int w = 4; w < 32; w <<= 1) total += __shfl_xor_sync(~0u, total, w);
#if SINKS
      const float sink = row < GROUP ? read(a.sinks + head) * LOG2E : -INF, higher = fmaxf(top, sink);
      shrink = power2(top - finite_or_0(higher));
      total = total * shrink + power2(sink - finite_or_0(higher));
      top = higher;
#endif
      each[e] = total == 0.f ? 0.f : inverse(total) * shrink;
      if (g == 0 && row < GROUP)
        a.lse[(i64)item.request * a.heads + head] = total == 0.f ? -INF : (top + log_2(total)) * LN2;
    }
    // Of each 8 elements, the even lane has the even ones and the odd lane the odd ones.
    const int row = item.block * 8 + 2 * t + odd;
    const u32 first = odd ? 0x1054 : 0x5410, second = odd ? 0x3276 : 0x7632;
    u16* const to = a.o + ((i64)item.request * a.heads + item.head * GROUP + row) * H + g / 2 * 8;
#pragma unroll
    for (int c = 0; c < SPANS; c++) {
      u32 out[4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float(&o)[4] = sums.o[n][2 * c + half];
        const u32 row0 = pack_output(o[0] * each[0], o[2] * each[0]), row1 = pack_output(o[1] * each[1], o[3] * each[1]);
        const u32 kept = odd ? row1 : row0, taken = __shfl_xor_sync(~0u, odd ? row0 : row1, 4);
        out[2 * half] = __byte_perm(kept, taken, first);
        out[2 * half + 1] = __byte_perm(kept, taken, second);
      }
      if (row < GROUP) *(uint4*)(to + c * 32) = make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, RESIDENT) attend_short(const __grid_constant__ Args a) {
  extern __shared__ __align__(16) char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int team = warp / TEAM, member = warp % TEAM, line = blockIdx.x * TEAMS + team;
  if (line >= a.lines) return;
  // With programmatic dependent launch these blocks start before the previous kernel ends; they read nothing until it has
  // ended. Only then may the next kernel launch: otherwise waiting blocks of many launches would occupy multiprocessors.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  Item item;
  item.request = a.lines_inverse ? __umulhi(line, a.lines_inverse) : line;
  const int of_request = line - item.request * (a.heads / GROUP * ROW_BLOCKS);
  item.head = of_request / ROW_BLOCKS; item.block = of_request % ROW_BLOCKS; item.slot = -1;
  const int row0 = item.block * 8, rows = min(8, GROUP - row0);
  const int token0 = member * TOKENS, column = token0 / PAGE;
  const int full = read(a.lengths + item.request), length = HALF ? min(full, 8) : full;
  const int page = column < a.columns ? read(a.pages + (i64)item.request * a.pages_r + column) : -1;
  const u32 mine = shared_address(smem) + warp * VALUE_BYTES + lane * 16;
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  State sums;
  sums.clear();
  u32 q[NT][SPANS][4];
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const char* const from = a.q + item.request * a.q_t + (item.head * GROUP + row0 + g) * a.q_n + t * 16;
#pragma unroll
    for (int c = 0; c < SPANS; c++) load_16_bytes(q[n][c], from + c * 64, g < rows);
  }
  if (TEAM == 1 || token0 < length) {
    const bool there = (u32)page < (u32)a.cache_pages;
    const int left = there ? length - token0 : 0;
    const i64 at = there ? page : 0, token = token0 % PAGE + g;
    const char* const k_from = a.k + at * a.k_page + token * a.k_p + item.head * a.k_k + t * 16;
    const char* const v_from = a.v + at * a.v_page + token * a.v_p + item.head * a.v_k + t * 16;
#if HALF
    u32 v[SPANS][4];
#pragma unroll
    for (int c = 0; c < SPANS; c++) {
      v[c][0] = v[c][1] = v[c][2] = v[c][3] = 0;
      load_16_bytes(v[c], v_from + c * 64, g < left);
    }
#else
    // Values are copied to shared memory, each lane's to its own location. If they were loaded to registers, ptxas would
    // move the loads below the products with the keys; it moves none across the barrier, at which no lane waits.
#pragma unroll
    for (int c = 0; c < SPANS; c++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        copy16(mine + (c * 2 + half) * 512, v_from + half * 8 * a.v_p + c * 64, g + half * 8 < left ? 16 : 0, policy);
    commit();
#endif
    __syncwarp();
    u32 k[SPANS][HALVES][4];  // tokens g and g + 8
#pragma unroll
    for (int c = 0; c < SPANS; c++)
#pragma unroll
      for (int half = 0; half < HALVES; half++)
        load_16_bytes(k[c][half], k_from + half * 8 * a.k_p + c * 64, g + half * 8 < left);

    View view;
    view.row0 = row0; view.rows = rows; view.high = length; view.before = length - 1;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        view.factor[n][e] = a.scale * (CAPPED || SLOPES ? 1.f : LOG2E);
#if SLOPES
        const int row = 2 * t + e;
        view.slope[n][e] = row < rows ? read(a.slopes + item.head * GROUP + row0 + row) : 0.f;
#endif
      }
    float s[NT][2][4];
    u32 p[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][0][e] = s[n][1][e] = 0;
#pragma unroll
      for (int c = 0; c < SPANS; c++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
#if HALF
          // A lane's 16 bytes are used as an operand without rearrangement: only half of the sums of each product are
          // needed, rows g of the first and rows g + 8 of the second. The others belong to no token.
          mma(s[n][half], k[c][0], q[n][c][half], q[n][c][half + 2]);
#else
          const int i = 2 * half;
          const u32 f[4] = {k[c][0][i], k[c][1][i], k[c][0][i + 1], k[c][1][i + 1]};
          mma(s[n][half], f, q[n][c][i], q[n][c][i + 1]);
#endif
        }
#if HALF
      s[n][1][0] = s[n][1][2];
      s[n][1][1] = s[n][1][3];
#endif
    }
    const bool plain = there && token0 + TOKENS <= length && (!WINDOWED || token0 >= length - a.window);
    weigh(a, s, p, sums, view, token0, there, plain, g, t);
#if HALF
#pragma unroll
    for (int c = 0; c < SPANS; c++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        mma_8_tokens(sums.o[0][2 * c + half], transpose(v[c][2 * half]), transpose(v[c][2 * half + 1]), p[0][0]);
#else
    wait_after(sums.top[0][0]);
#pragma unroll
    for (int c = 0; c < SPANS; c++) {
      u32 v[2][4];
      own_16_bytes(v[0], mine + c * 1024);
      own_16_bytes(v[1], mine + c * 1024 + 512);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = 2 * half;
        const u32 f[4] = {transpose(v[0][i]), transpose(v[0][i + 1]), transpose(v[1][i]), transpose(v[1][i + 1])};
#pragma unroll
        for (int n = 0; n < NT; n++) mma(sums.o[n][2 * c + half], f, p[n][0], p[n][1]);
      }
    }
#endif
  }
  if (TEAM == 1) {
    write_rows(a, sums, item, g, t);
    return;
  }
  // States of 8 rows overwrite the values.
  float* const shared_o = (float*)smem + team * TEAM * 8 * O_ROW;
  float2* const shared_ml = (float2*)(smem + O_BYTES) + team * TEAM * 8;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < NT; n++) {
    if (n) team_barrier(team);
    leave_state(sums, n, shared_o + member * 8 * O_ROW, shared_ml + member * 8, g, t);
    team_barrier(team);
    write_states(a, item, item.request, n, rows, 1.f, shared_o, shared_ml, member, lane);
  }
}
