// attention: tiles of query rows against blocks of keys, with one online softmax over all bands.
//
// First all keys are rotated and transposed into blocks, once per slope, and the values are padded to whole vectors.
// Then every tile of queries visits the blocks of each band. Only blocks that straddle an edge of the band are masked.

#include "tiles.h"

namespace flashrope {

struct Workspace {
  int64_t blocks, padded_dim, k_block_size, v_block_size;  // the last two: elements
  Floats k, v;  // k: (copy, batch, head, block, head_dim, BLOCK_N); v: (batch, head, block, BLOCK_N, padded_dim)

  explicit Workspace(const ForwardCall& call)
      : blocks((call.seqlen_k + BLOCK_N - 1) / BLOCK_N),
        padded_dim((call.head_dim_v + GEMM_COLUMNS - 1) / GEMM_COLUMNS * GEMM_COLUMNS),
        k_block_size(call.head_dim * BLOCK_N),
        v_block_size(BLOCK_N * padded_dim),
        k(floats(call.num_copies * call.batch * call.heads_kv * blocks * k_block_size)),
        v(floats(call.batch * call.heads_kv * blocks * v_block_size)) {}

  // head: batch index * heads_kv + head
  float* k_block(const ForwardCall& call, int64_t copy, int64_t head, int64_t block) const {
    return k.get() + ((copy * call.batch * call.heads_kv + head) * blocks + block) * k_block_size;
  }
  float* v_block(int64_t head, int64_t block) const { return v.get() + (head * blocks + block) * v_block_size; }
};

template <typename T>
void pack_block(const ForwardCall& call, const Workspace& workspace, int64_t head, int64_t block) {
  const int64_t b = head / call.heads_kv, first = block * BLOCK_N;
  const int keys = int(std::min<int64_t>(BLOCK_N, call.seqlen_k - first));
  const int head_dim = int(call.head_dim), head_dim_v = int(call.head_dim_v);
  alignas(64) float row[MAX_HEAD_DIM];
  for (int64_t copy = 0; copy < call.num_copies; ++copy) {
    float* k = workspace.k_block(call, copy, head, block);
    if (keys < BLOCK_N) std::fill_n(k, workspace.k_block_size, 0.0f);
    for (int t = 0; t < keys; ++t) {
      const T* x = call.k.row<const T>(b, first + t, head % call.heads_kv);
      rotate_row(x, row, call.k_copies[copy], b, first + t, call);
      for (int c = 0; c < head_dim; ++c) k[c * BLOCK_N + t] = row[c];
    }
  }
  float* v = workspace.v_block(head, block);
  if (keys < BLOCK_N || workspace.padded_dim > head_dim_v) std::fill_n(v, workspace.v_block_size, 0.0f);
  for (int t = 0; t < keys; ++t) {
    const T* x = call.v.row<const T>(b, first + t, head % call.heads_kv);
    for (int c = 0; c < head_dim_v; ++c) v[t * workspace.padded_dim + c] = to_float(x[c]);
  }
}

// The query rows [first_row, first_row + rows) of one head.
template <typename T>
struct Tile {
  const ForwardCall& call;
  const Workspace& workspace;
  const int64_t b, head_q, first_row;
  const int rows, head_dim, head_dim_v, padded_dim;
  const int padded_rows = (rows + GEMM_ROWS - 1) / GEMM_ROWS * GEMM_ROWS;
  const int64_t shift, head_kv;  // head_kv: as Workspace counts them
  alignas(64) float q[BLOCK_M * MAX_HEAD_DIM], scores[BLOCK_M * BLOCK_N], acc[BLOCK_M * MAX_HEAD_DIM];
  float row_max[BLOCK_M], row_sum[BLOCK_M];  // row_sum 0: no key seen

  Tile(const ForwardCall& call, const Workspace& workspace, int64_t b, int64_t head_q, int64_t first_row)
      : call(call), workspace(workspace), b(b), head_q(head_q), first_row(first_row),
        rows(int(std::min<int64_t>(BLOCK_M, call.seqlen_q - first_row))), head_dim(int(call.head_dim)),
        head_dim_v(int(call.head_dim_v)), padded_dim(int(workspace.padded_dim)), shift(call.seqlen_k - call.seqlen_q),
        head_kv(b * call.heads_kv + head_q / (call.heads_q / call.heads_kv)) {}

  void run() {
    std::fill_n(acc, padded_rows * padded_dim, 0.0f);
    std::fill_n(row_max, BLOCK_M, -INF);
    std::fill_n(row_sum, BLOCK_M, 0.0f);
    for (int n = 0; n < call.num_bands; ++n) visit(call.bands[n]);
    for (int r = 0; r < rows; ++r) {
      T* out = call.out.row<T>(b, first_row + r, head_q);
      const float factor = row_sum[r] == 0 ? 0 : 1 / row_sum[r];
      for (int c = 0; c < head_dim_v; ++c) from_float(acc[r * padded_dim + c] * factor, out + c);
      call.lse[(b * call.heads_q + head_q) * call.seqlen_q + first_row + r] =
          row_sum[r] == 0 ? -INF : float(row_max[r] + std::log(double(row_sum[r])));
    }
  }

  void visit(const ForwardBand& band) {
    const int64_t position = shift + first_row, last = position + rows - 1;
    const int64_t first_key = band.band.first_key(position), end_key = band.band.end_key(last, call.seqlen_k);
    if (first_key >= end_key) return;
    load_queries(band.q);
    // blocks in [full_from, full_until) are seen by every row in full
    const int64_t full_from = band.band.first_key(last), full_until = band.band.end_key(position, call.seqlen_k);
    for (int64_t block = first_key / BLOCK_N; block * BLOCK_N < end_key; ++block) {
      const int64_t key = block * BLOCK_N;
      multiply<false>(q, head_dim, workspace.k_block(call, band.k_copy, head_kv, block), BLOCK_N, scores, BLOCK_N,
                      padded_rows, BLOCK_N, head_dim);
      const bool masked = key < full_from || key + BLOCK_N > full_until;
      for (int r = 0; r < rows; ++r) {
        if (masked && !mask_row(band.band, r, key))
          std::fill_n(scores + r * BLOCK_N, BLOCK_N, 0.0f);
        else
          softmax_row(r);
      }
      multiply<true>(scores, BLOCK_N, workspace.v_block(head_kv, block), padded_dim, acc, padded_dim, padded_rows,
                     padded_dim, BLOCK_N);
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

  // Whether the row sees any key of the block.
  bool mask_row(const Band& band, int r, int64_t key) {
    const int64_t position = shift + first_row + r;
    const int64_t first = std::max<int64_t>(band.first_key(position) - key, 0);
    const int64_t end = std::min<int64_t>(band.end_key(position, call.seqlen_k) - key, BLOCK_N);
    if (first >= end) return false;
    std::fill_n(scores + r * BLOCK_N, first, -INF);
    std::fill(scores + r * BLOCK_N + end, scores + (r + 1) * BLOCK_N, -INF);
    return true;
  }

  void softmax_row(int r) {
    float* row_scores = scores + r * BLOCK_N;
    Vec highest = load(row_scores);
    for (int t = LANES; t < BLOCK_N; t += LANES) {
      const Vec x = load(row_scores + t);
      highest = x > highest ? x : highest;
    }
    const float high = maximum(highest), old_max = row_max[r];
    if (high > old_max) {
      row_max[r] = high;
      const float decay = exp(old_max - high);
      row_sum[r] *= decay;
      for (int c = 0; c < padded_dim; c += LANES)
        store(acc + r * padded_dim + c, load(acc + r * padded_dim + c) * decay);
    }
    Vec total{};
    for (int t = 0; t < BLOCK_N; t += LANES) {
      const Vec weights = exp(load(row_scores + t) - row_max[r]);
      store(row_scores + t, weights);
      total += weights;
    }
    row_sum[r] += sum(total);
  }
};

template <typename T>
int forward(const ForwardCall& call) {
  const Workspace workspace(call);
  if (!workspace.k || !workspace.v) return 1;
  const int64_t heads_kv = call.batch * call.heads_kv, heads_q = call.batch * call.heads_q;
  parallel(call.parallel_for, call.threads, heads_kv * workspace.blocks,
           [&](int64_t n) { pack_block<T>(call, workspace, n / workspace.blocks, n % workspace.blocks); });
  const int64_t tiles = (call.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  parallel(call.parallel_for, call.threads, heads_q * tiles, [&](int64_t n) {
    const int64_t head = n % heads_q, tile = tiles - 1 - n / heads_q;  // the longest first
    Tile<T>(call, workspace, head / call.heads_q, head % call.heads_q, tile * BLOCK_M).run();
  });
  return 0;
}

}  // namespace flashrope

extern "C" int flashrope_forward(const flashrope::ForwardCall* call) {
  switch (call->dtype) {
    case 0: return flashrope::forward<float>(*call);
    case 1: return flashrope::forward<flashrope::Float16>(*call);
    default: return flashrope::forward<flashrope::BFloat16>(*call);
  }
}
