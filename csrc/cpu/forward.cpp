// Computes attention, by tiles of query rows and blocks of keys, with one online softmax over all bands.
// First all keys are rotated and transposed into blocks, once per distinct rotation. The values are padded to whole
// vectors. Then every tile of queries visits the blocks of each band. Only blocks that straddle an edge of the band are
// masked. In a masked block only the rows that see a key are computed.

#include "forward.h"

namespace flashrope {

// A block of k has the panels (BLOCK_N / GEMM_COLUMNS, head_dim, GEMM_COLUMNS). A block of v has the panels (padded_dim
// / GEMM_COLUMNS, BLOCK_N, GEMM_COLUMNS). The kernel reads a panel again for every few query rows. A panel stays in the
// L1 cache, because it is contiguous.
struct Workspace : PackedBlocks<Floats> {
  int64_t padded_dim;
  int block_m;  // query rows of a tile

  explicit Workspace(const ForwardCall& call) : Workspace(call, padded(call.head_dim_v, GEMM_COLUMNS)) {}
  Workspace(const ForwardCall& call, int64_t padded_dim)
      : PackedBlocks(call, call.head_dim * BLOCK_N, BLOCK_N * padded_dim, floats), padded_dim(padded_dim),
        block_m(tile_rows(std::max(call.head_dim, padded_dim), GEMM_ROWS)) {}
};

// Packs a block of keys and values. Quantized values are multiplied by their scales, and so are keys after rotation.
template <typename T>
void pack_block(const ForwardCall& call, const Workspace& workspace, int64_t head, int64_t block) {
  const int64_t b = head / call.heads_kv, first = block * BLOCK_N;
  const int keys = int(std::min<int64_t>(BLOCK_N, call.seqlen_k - first));
  const int head_dim = int(call.head_dim), head_dim_v = int(call.head_dim_v);
  alignas(64) float rows[GEMM_COLUMNS * MAX_HEAD_DIM];  // the keys of a panel
  for (int64_t copy = 0; copy < call.num_copies; ++copy)
    for (int panel = 0; panel < BLOCK_N; panel += GEMM_COLUMNS) {
      for (int t = panel; t < panel + GEMM_COLUMNS; ++t) {
        float* row = rows + (t - panel) * head_dim;
        if (t >= keys) {
          std::fill_n(row, head_dim, 0.0f);
          continue;
        }
        const T* x = call.k.row<const T>(b, first + t, head % call.heads_kv);
        rotate_key(x, row, call.k_copies[copy], b, first + t, call);
        if (!IS_CODE<T>) continue;
        const float scale = *call.k_scale.row<const float>(b, first + t, head % call.heads_kv);
        for (int c = 0; c < head_dim; ++c) row[c] *= scale;
      }
      write_panel(rows, head_dim, head_dim, workspace.k_block(copy, head, block) + panel * head_dim);
    }
  float* v = workspace.v_block(head, block);
  if (keys < BLOCK_N || workspace.padded_dim > head_dim_v) std::fill_n(v, workspace.v_block_size, 0.0f);
  for (int t = 0; t < keys; ++t) {
    const T* x = call.v.row<const T>(b, first + t, head % call.heads_kv);
    const float scale = IS_CODE<T> ? *call.v_scale.row<const float>(b, first + t, head % call.heads_kv) : 1;
    for (int c = 0; c < head_dim_v; c += GEMM_COLUMNS) {
      float* y = v + c * BLOCK_N + t * GEMM_COLUMNS;
      const int count = std::min(GEMM_COLUMNS, head_dim_v - c);
      convert(x + c, y, count);
      if (IS_CODE<T>)
        for (int n = 0; n < count; ++n) y[n] *= scale;
    }
  }
}

// Computes the query rows [first_row, first_row + rows) of one head.
template <typename T>
struct Tile {
  const ForwardCall& call;
  const Workspace& workspace;
  const int64_t b, head_q, first_row;
  const int rows, head_dim, head_dim_v, padded_dim;
  const int padded_rows = int(padded(rows, GEMM_ROWS));
  const int64_t shift, head_kv;  // head_kv: batch index * heads_kv + key head
  alignas(64) float q[TILE_SIZE], scores[MAX_BLOCK_M * BLOCK_N], acc[TILE_SIZE];
  alignas(64) float row_sums[MAX_BLOCK_M * LANES];  // LANES partial sums per row; they are 0 if the row has seen no key
  float row_max[MAX_BLOCK_M];

  Tile(const ForwardCall& call, const Workspace& workspace, int64_t b, int64_t head_q, int64_t first_row)
      : call(call), workspace(workspace), b(b), head_q(head_q), first_row(first_row),
        rows(int(std::min<int64_t>(workspace.block_m, call.seqlen_q - first_row))), head_dim(int(call.head_dim)),
        head_dim_v(int(call.head_dim_v)), padded_dim(int(workspace.padded_dim)), shift(call.shift),
        head_kv(b * call.heads_kv + head_q / (call.heads_q / call.heads_kv)) {}

  void run() {
    std::fill_n(acc, padded_rows * padded_dim, 0.0f);
    std::fill_n(row_max, MAX_BLOCK_M, -INF);
    std::fill_n(row_sums, MAX_BLOCK_M * LANES, 0.0f);
    for (int n = 0; n < call.num_bands; ++n) visit(call.bands[n]);
    for (int r = 0; r < rows; ++r) {
      T* out = call.out.row<T>(b, first_row + r, head_q);
      const float row_sum = sum(load(row_sums + r * LANES)), factor = row_sum == 0 ? 0 : 1 / row_sum;
      for (int c = 0; c < head_dim_v; ++c) from_float(acc[r * padded_dim + c] * factor, out + c);
      call.lse[(b * call.heads_q + head_q) * call.seqlen_q + first_row + r] =
          row_sum == 0 ? -INF : float(row_max[r] + std::log(double(row_sum)));
    }
  }

  void visit(const ForwardBand& band) {
    const int64_t position = shift + first_row, last = position + rows - 1;
    const int64_t first_key = band.band.first_key(position), end_key = band.band.end_key(last, call.seqlen_k);
    if (first_key >= end_key) return;
    load_queries(band.q);
    // every row sees all keys in [full_from, full_until)
    const int64_t full_from = band.band.first_key(last), full_until = band.band.end_key(position, call.seqlen_k);
    for (int64_t block = first_key / BLOCK_N; block * BLOCK_N < end_key; ++block) {
      const int64_t key = block * BLOCK_N, last_key = std::min<int64_t>(key + BLOCK_N, call.seqlen_k) - 1;
      // rows [first_row, end_row) see some key of the block
      const int64_t first_row = std::clamp<int64_t>(band.band.first_position(key) - position, 0, rows);
      const int64_t end_row = std::clamp<int64_t>(band.band.end_position(last_key) - position, first_row, rows);
      const int first = int(first_row / GEMM_ROWS * GEMM_ROWS), count = int(padded(end_row, GEMM_ROWS)) - first;
      multiply<false>(q + first * head_dim, head_dim, workspace.k_block(band.k_copy, head_kv, block), GEMM_COLUMNS,
                      scores + first * BLOCK_N, BLOCK_N, count, BLOCK_N, head_dim, head_dim * GEMM_COLUMNS);
      const bool masked = key < full_from || key + BLOCK_N > full_until;
      for (int r = first; r < std::min(first + count, rows); ++r) {
        if (masked)
          masked_softmax_row(band.band, r, key);
        else
          softmax_row<false>(r, 0, BLOCK_N);
      }
      multiply<true>(scores + first * BLOCK_N, BLOCK_N, workspace.v_block(head_kv, block), GEMM_COLUMNS,
                     acc + first * padded_dim, padded_dim, count, padded_dim, BLOCK_N, BLOCK_N * GEMM_COLUMNS);
    }
  }

  void load_queries(const Table& table) {
    const float scale = float(call.scale);
    for (int r = 0; r < rows; ++r) {
      float* y = q + r * head_dim;
      rotate_row(call.q.row<const T>(b, first_row + r, head_q), y, table, b, first_row + r, call);
      for (int c = 0; c < head_dim; ++c) y[c] *= scale;
    }
    std::fill(q + rows * head_dim, q + padded_rows * head_dim, 0.0f);
  }

  void masked_softmax_row(const Band& band, int r, int64_t key) {
    const int64_t position = shift + first_row + r;
    const int64_t first = std::max<int64_t>(band.first_key(position) - key, 0);
    const int64_t end = std::min<int64_t>(band.end_key(position, call.seqlen_k) - key, BLOCK_N);
    if (first < end)
      softmax_row<true>(r, int(first), int(end));
    else
      std::fill_n(scores + r * BLOCK_N, BLOCK_N, 0.0f);
  }

  // MASKED: the row sees only the keys [first, end) of the block.
  template <bool MASKED>
  void softmax_row(int r, int first, int end) {
    float* row_scores = scores + r * BLOCK_N;
    Vec x[BLOCK_N / LANES], highest = broadcast(-INF);
    for (int n = 0; n < BLOCK_N / LANES; ++n) {
      x[n] = load(row_scores + n * LANES);
      const IntVec t = lane_numbers() + n * LANES;
      if (MASKED) x[n] = (t >= first) & (t < end) ? x[n] : broadcast(-INF);
      highest = x[n] > highest ? x[n] : highest;
    }
    const float high = maximum(highest), old_max = row_max[r];
    Vec total = load(row_sums + r * LANES);
    if (high > old_max) {
      row_max[r] = high;
      const float decay = exp(old_max - high);
      total *= decay;
      for (int c = 0; c < padded_dim; c += LANES)
        store(acc + r * padded_dim + c, load(acc + r * padded_dim + c) * decay);
    }
    for (int n = 0; n < BLOCK_N / LANES; ++n) {
      const Vec weights = exp(x[n] - row_max[r]);
      store(row_scores + n * LANES, weights);
      total += weights;
    }
    store(row_sums + r * LANES, total);
  }
};

// T: type of keys and values; Q: type of queries and results.
template <typename T, typename Q = T>
int forward(const ForwardCall& call) {
  const Workspace workspace(call);
  if (!workspace.allocated()) return 1;
  workspace.pack_all(call, [&](int64_t head, int64_t block) { pack_block<T>(call, workspace, head, block); });
  for_query_tiles(call, workspace.block_m, [&](int64_t b, int64_t head, int64_t first_row) {
    Tile<Q>(call, workspace, b, head, first_row).run();
  });
  return 0;
}

}  // namespace flashrope

extern "C" int flashrope_forward(const flashrope::ForwardCall* call) {
  switch (call->dtype) {
    case 0: return flashrope::forward<float>(*call);
    case 1: return flashrope::forward<flashrope::Float16>(*call);
    case 2: return flashrope::forward<flashrope::BFloat16>(*call);
    default: return flashrope::forward<flashrope::Int8, float>(*call);
  }
}
