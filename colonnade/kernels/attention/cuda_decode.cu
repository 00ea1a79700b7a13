// Flash-Decoding in CUDA C++: split-KV attention over a paged cache, compiled at run time (cuda_decode.py).
//
// The warps of a block form teams. A team is one worker of the split plan and processes its pieces of keys in order; its
// warps process the tiles of a piece (16 tokens each) round-robin. Each warp has its own ring of tiles in shared memory,
// filled by 16-byte asynchronous copies. The main loop therefore needs no barrier, and the keys of the next piece are
// loaded while the last tiles of a piece are processed. In the tensor-core products S^T = K Q^T and O^T = V^T P^T, tokens
// are the M dimension and query rows are N; 8 rows fill a product.
//
// The states of a team's warps are combined in shared memory. A piece that covers a whole line writes the output. Other
// pieces write their states to slots: with MERGE, the teams that share a line each merge a part of its output; without
// it, a second kernel merges.
//
// MERGE needs no fence, counter or second launch. Slots contain NaN (all bits 1) before and after each launch. A state is
// written with plain stores and read by exactly one thread, which polls until no word is that NaN and then resets the
// slot. A team writes all its states before it polls, so there is no deadlock once all blocks are resident, which the
// cooperative launch guarantees.
//
// Lengths and page ids are bounds-checked here: tokens at or beyond the length and pages outside the cache are not read.

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int team = warp / TEAM, member = warp % TEAM, worker = team * gridDim.x + blockIdx.x;
  float* const shared_o = (float*)(smem + RING_BYTES) + team * TEAM * 8 * O_ROW;
  float2* const shared_ml = (float2*)(smem + RING_BYTES + O_BYTES) + team * TEAM * 8;
#if NT > 1
  uint2* const shared_q = (uint2*)(smem + RING_BYTES + O_BYTES + WARPS * 64), *const q = shared_q + lane;
  float* const shared_factor = (float*)(shared_q + NT * KSTEPS * 32);
#endif
  const u32 ring = shared_address(smem) + warp * STAGES * STAGE_BYTES;
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

  // A worker's first item has a fixed address, so it is loaded without waiting for the offset of the other items.
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

#if SHARED_Q
  // If the block is one team, queries pass through shared memory, 16 bytes per thread: fewer loads queue behind the keys.
  char* const shared_q = smem + RING_BYTES + O_BYTES + WARPS * 64;
  uint4 q_next[Q_EACH];
  auto ask_queries = [&](const Item& item, const Queries& who) { block_queries(a, q_next, item, who); };
  auto put_queries = [&]() { put_block_queries(q_next, shared_q); };
#elif NT == 1
  u32 q_next[KSTEPS][2];
  auto ask_queries = [&](const Item& item, const Queries& who) { raw_queries(a, q_next, 0, item, who, g, t); };
#endif

  // -- loading: the next tile and its page, which is looked up one or 32 tiles ahead
  int next = 0, head = f0.y, end = f1.x, tile = count ? first_tile(f0.w, member) : 0, last = (end + TOKENS - 1) / TOKENS;
#if FIXED && TEAM < 8
  int low = f0.w / TOKENS, base = f0.w / FIXED * CHUNK_TILES, turn = 0;  // first tile of the piece; of the chunk; stream
  auto to_stream = [&]() {  // advance to the next stream with a tile if this stream has none left
    while (tile >= min(last, base + CHUNK_TILES) && base < last) {
      if (++turn == TURNS) { turn = 0; base += CHUNK_TILES; }
      tile = stream_tile(base, turn, member, low);
    }
  };
  if (count) { tile = stream_tile(base, 0, member, low); to_stream(); }
#endif
  const int* table = a.pages + (i64)f0.x * a.pages_r;
// With pages of up to 64 tokens, nearly every tile of a warp is on another page. Wider heads did not become faster.
#define PAGES_AHEAD (H <= 64 && PAGE <= 64 && !(FIXED && TEAM < 8))
#if !PAGES_AHEAD
  int page = 0;
  auto look_up_pages = [&]() {  // page of the next tile
    const int column = tile * TOKENS / PAGE;
    page = column < a.columns ? __ldg(table + column) : -1;
  };
  auto page_of_tile = [&]() { return page; };
#else
  // Lane i has the pages of this warp's next tiles i and i + 32: a look-up one tile ahead would queue behind loads of
  // keys that were issued before it.
  int pages_now = 0, pages_later = 0, nth = 0;
  auto pages_from = [&](int first) {
    const int at = first + lane * STREAMS, column = at * TOKENS / PAGE;
    return at < last && column < a.columns ? __ldg(table + column) : -1;
  };
  auto look_up_pages = [&]() {
    pages_now = pages_from(tile);
    pages_later = pages_from(tile + 32 * STREAMS);
    nth = 0;
  };
  auto page_of_tile = [&]() {
    if (nth == 32) {
      pages_now = pages_later;
      pages_later = pages_from(tile + 32 * STREAMS);
      nth = 0;
    }
    return __shfl_sync(~0u, pages_now, nth++);
  };
#endif
  int stage = 0;
  u32 pages_there = 0;  // one bit per stage: whether the page is in the cache
  int4 n0 = f0, n1 = f1;  // lane i has item i of 32
  auto seek = [&]() {
    bool moved = !PAGES_AHEAD;
    while (tile >= last && next < count) {
      if (++next == count) break;
      if (next % 32 == 0 && next + lane < count) {
        n0 = __ldg(items + 2 * (next + lane));
        n1 = __ldg(items + 2 * (next + lane) + 1);
      }
      moved = true;
      const int from = next % 32;
      table = a.pages + (i64)__shfl_sync(~0u, n0.x, from) * a.pages_r;
      head = __shfl_sync(~0u, n0.y, from);
      end = __shfl_sync(~0u, n1.x, from);
      last = (end + TOKENS - 1) / TOKENS;
#if FIXED && TEAM < 8
      const int first = __shfl_sync(~0u, n0.w, from);
      low = first / TOKENS; base = first / FIXED * CHUNK_TILES; turn = 0;
      tile = stream_tile(base, 0, member, low);
      to_stream();
#else
      tile = first_tile(__shfl_sync(~0u, n0.w, from), member);
#endif
    }
    if (moved && tile < last) look_up_pages();
  };
  auto load = [&]() {
    if (tile < last) {
      const int page = page_of_tile();
      const bool there = (u32)page < (u32)a.cache_pages;
      const int token0 = tile * TOKENS, left = there ? end - token0 : 0;
      const i64 at = there ? page : 0;
      const char* const k = a.k + at * a.k_page + (token0 % PAGE) * a.k_p + head * a.k_k;
      const char* const v = a.v + at * a.v_page + (token0 % PAGE) * a.v_p + head * a.v_k;
      const u32 to = ring + stage * STAGE_BYTES;
      pages_there = (pages_there & ~(1u << stage)) | ((u32)there << stage);
      copy_tokens(to, k, a.k_p, left, lane, policy);
      copy_tokens(to + TILE_BYTES, v, a.v_p, left, lane, policy);
      tile += STREAMS;
#if FIXED && TEAM < 8
      to_stream();
#endif
      seek();
    }
    commit();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  };
  // Loads whose results are needed later are issued late, so that the copies start after two dependent loads.
  if (tile < last) look_up_pages();
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
  if (tile >= last) seek();  // the first piece may be too short to have a tile for this warp
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; i++) load();
#if NT == 1
  if (!SINGLE && count) ask_queries(item_next, who_next);
#endif
  int4 m0, m1;  // items again, for the consumer
  Queries of = {0, 0, 0};
  auto look_up = [&](int i) {
    if (i + lane < count) {
      m0 = __ldg(items + 2 * (i + lane));
      m1 = __ldg(items + 2 * (i + lane) + 1);
      of = queries_of(a, m0.x);
    }
  };

#if MERGE
  // Overlaps with the loads of the first keys.
  write_empty_lines(a, nothing ? __ldg(a.plan) : 0);
#endif
#if FIXED
  Sum kept[NT * UNITS][LEVELS];  // local memory
  int cut_pieces = 0;
#elif MERGE
  Item cut_first, cut_last;  // only a worker's first and last piece can be part of a split line
  Queries who_first, who_last;
  cut_first.slot = cut_last.slot = -1;
#endif

  const Places places = places_of(lane);

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

  int used = 0;  // stage of the next tile to process
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
    View view;
    const float scale = a.scale * (SCALED ? __ldg(a.k_scale + item.head) : 1.f) * (CAPPED || SLOPES ? 1.f : LOG2E);
#if NT == 1
#if SHARED_Q
#pragma unroll
    for (int s = 0; s < KSTEPS; s += 2)  // if KSTEPS is odd, the last load also reads from another row; unused
      load_matrices(q[s], shared_address(shared_q + q_place(lane % 8, 2 * s + lane / 8)));
#else
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) { q[s][0] = q_next[s][0]; q[s][1] = q_next[s][1]; }
#endif
    view.factor[0][0] = view.factor[0][1] = scale;
#if CACHE
    const float back = to_half(q);
    view.factor[0][0] *= __shfl_sync(~0u, back, 8 * t);
    view.factor[0][1] *= __shfl_sync(~0u, back, 8 * t + 4);
#endif
#else
    for (int n = warp; n < NT; n += WARPS) {
      u32 x[KSTEPS][2];
      raw_queries(a, x, n, item, who, g, t);
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
      view.factor[n][0] = scale * (CACHE ? shared_factor[n * 8 + 2 * t] : 1.f);
      view.factor[n][1] = scale * (CACHE ? shared_factor[n * 8 + 2 * t + 1] : 1.f);
    }
#endif
    view.row0 = item.block * ROWS;
    view.rows = rows_of(item, who.count);
    view.high = min(item.end, who.length);
    view.before = who.length - who.count;
    // Every row attends to all tokens in [plain_from, plain_to), so tiles inside need no mask.
    const int plain_to = min(view.high, view.before + view.row0 / GROUP + 1);
    const int plain_from = WINDOWED ? view.before + (view.row0 + view.rows - 1) / GROUP - a.window + 1 : 0;
    const int end_tile = (item.end + TOKENS - 1) / TOKENS;
#if SLOPES
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = n * 8 + 2 * t + e;
        view.slope[n][e] = row < view.rows ? __ldg(a.slopes + item.head * GROUP + (view.row0 + row) % GROUP) : 0.f;
      }
#endif
    State sums;
    sums.clear();

    bool ahead = i + 1 < count;
    auto attend_tile = [&](int mine) {
      wait<STAGES - 2>();
      __syncwarp();
      if (LOAD_FIRST) load();
#if COMPUTE
      const u32 at = ring + used * STAGE_BYTES;
      const int token0 = mine * TOKENS;
      const bool there = pages_there >> used & 1;
      const bool plain = there && token0 >= plain_from && token0 + TOKENS <= plain_to;
      float s[NT][2][4];
      u32 p[NT][2];
      scores(s, at, places, q);
      if (!plain && token0 + TOKENS > view.high) clear_values(at, token0, view.high, lane);
      u32 values[VALUES_FIRST ? KSTEPS : 1][4];
      if (VALUES_FIRST) load_values(values, at, places);
      weigh(a, s, p, sums, view, token0, there, plain, g, t);
      if (VALUES_FIRST) add_values(sums, values, p);
      else weighted_values(sums, at, places, p);
#endif
      __syncwarp();
      if (!LOAD_FIRST) load();
      used = used + 1 == STAGES ? 0 : used + 1;
    };
    // The next piece and its queries are loaded while the first tile of this piece is processed.
    auto around = [&](bool any, int mine) {
      if (ahead && i % 32 == 31) look_up(i + 1);
      if (ahead && i == 0) look_up(0);
      const bool look = ahead;
      ahead = false;
      if (any) attend_tile(mine);
      if (look) {
        item_next = item_at(i + 1, who_next);
#if NT == 1
        ask_queries(item_next, who_next);
#endif
      }
    };
    const float v_scale = SCALED && COMPUTE ? __ldg(a.v_scale + item.head) : 1.f;
#if FIXED
    const int first_chunk = item.first / FIXED, last_chunk = (item.end - 1) / FIXED;
#pragma unroll 1
    for (int chunk = first_chunk; chunk <= last_chunk; chunk++) {
      Streams streams;
      const int stop = min(end_tile, (chunk + 1) * CHUNK_TILES);
#pragma unroll 1
      for (int turn = 0; turn < TURNS; turn++) {
        sums.clear();
        int mine = stream_tile(chunk * CHUNK_TILES, turn, member, item.first / TOKENS);
        for (; mine < stop; mine += STREAMS) around(true, mine);
        add_lanes(sums);
        streams.add(sums, turn, (float4*)(shared_o + member * 8 * O_ROW), lane);
      }
      const bool last = chunk == last_chunk;
      if (last && ahead) around(false, 0);  // this warp had no tile in the piece
      if (TURNS > 1) __syncwarp();
#pragma unroll
      for (int n = 0; n < NT; n++) {
        leave_state(sums, n, shared_o + member * 8 * O_ROW, shared_ml + member * 8, g, t);
        team_barrier(team);
        Sum s[UNITS];
        team_sums(s, shared_o, shared_ml, member, lane);
#if SHARED_Q
        if (last && i + 1 < count) put_queries();
#endif
        if (n + 1 < NT || !last || i + 1 < count) team_barrier(team);
        end_chunk(a, item, who.start, n, view.rows, v_scale, s, kept + n * UNITS, chunk, first_chunk, last, member,
                  lane);
      }
    }
    cut_pieces += item.slot >= 0;
#else
    for (int mine = first_tile(item.first, member); mine < end_tile || ahead; mine += TEAM)
      around(mine < end_tile, mine);

#if COMPUTE
    // -- combine the states of the warps, 8 rows at a time
#pragma unroll
    for (int n = 0; n < NT; n++) {
      leave_state(sums, n, shared_o + member * 8 * O_ROW, shared_ml + member * 8, g, t);
      team_barrier(team);
      write_states(a, item, who.start, n, view.rows, v_scale, shared_o, shared_ml, member, lane);
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
#endif
  }
#if FIXED
  merge_cut_pieces(a, items, cut_pieces, member, lane);
#elif MERGE && COMPUTE
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
