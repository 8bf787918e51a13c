// Computes the gradients of attention. One thread takes a key head and all queries that read it, so no additions need
// to be atomic. This takes five matrix products per pair of tiles, and results are bitwise reproducible.
//
// Scores are computed transposed, keys by queries. Per query head and band, queries and keys are rotated into
// workspaces. Each band's gradients are summed in its rotated basis, then rotated back and added to the gradients of
// the other bands.

#include "backward.h"

namespace flashrope {

constexpr int BLOCK_M = 64;  // query rows of a tile

template <typename T>
struct KeyHead {
  const BackwardCall& backward;
  const ForwardCall& call;
  const int64_t b, head_kv, group, shift;
  const int head_dim, head_dim_v, width, width_v;  // widths: rounded up to GEMM_COLUMNS
  const int64_t rows, keys;   // rounded up to whole tiles
  // The shape is (rows or keys, width), with width_v for v and grad_out. Transposed tensors are in panels (rows /
  // GEMM_COLUMNS, head_dim or head_dim_v, GEMM_COLUMNS).
  Floats v, grad_v, grad_k, k, grad_rotated_k;
  Floats q, q_transposed, grad_out, grad_out_transposed, grad_q, grad_rotated_q;
  Floats lse, delta;  // (rows,)
  Floats poisoned;    // (rows,), 1 for a row whose q, grad_out, lse or delta is not finite
  alignas(64) float weights[BLOCK_N * BLOCK_M], grad_scores[BLOCK_N * BLOCK_M], transposed[BLOCK_M * BLOCK_N];
  Floats finite_q, finite_grad_out;  // (BLOCK_M, width or width_v): a tile whose poisoned rows are 0

  KeyHead(const BackwardCall& backward, int64_t head)
      : backward(backward), call(backward.forward), b(head / call.heads_kv), head_kv(head % call.heads_kv),
        group(call.heads_q / call.heads_kv), shift(call.shift), head_dim(int(call.head_dim)),
        head_dim_v(int(call.head_dim_v)), width(int(padded(head_dim, GEMM_COLUMNS))),
        width_v(int(padded(head_dim_v, GEMM_COLUMNS))), rows(padded(call.seqlen_q, BLOCK_M)),
        keys(padded(call.seqlen_k, BLOCK_N)), grad_rotated_k(floats(keys * width)),
        q_transposed(floats(rows * head_dim)), grad_out_transposed(floats(rows * head_dim_v)),
        grad_q(floats(rows * width)), grad_rotated_q(floats(rows * width)), lse(floats(rows)),
        finite_q(floats(BLOCK_M * width)), finite_grad_out(floats(BLOCK_M * width_v)) {
    const bool pad_rows = rows > call.seqlen_q, pad_keys = keys > call.seqlen_k;
    const bool pad = width > head_dim, pad_v = width_v > head_dim_v;
    v = array(keys * width_v, pad_keys || pad_v);
    k = array(keys * width, pad_keys || pad);
    q = array(rows * width, pad_rows || pad);
    grad_out = array(rows * width_v, pad_rows || pad_v);
    grad_v = array(keys * width_v, true);
    grad_k = array(keys * width, true);
    delta = array(rows, true);
    poisoned = array(rows, true);
  }

  // zero: whether the array, or its padding, is read before it is written.
  static Floats array(int64_t count, bool zero) {
    Floats x = floats(count);
    if (x && zero) std::fill_n(x.get(), count, 0.0f);
    return x;
  }

  bool allocated() const {
    for (const Floats* x : {&v, &grad_v, &grad_k, &k, &grad_rotated_k, &q, &grad_out, &grad_q, &grad_rotated_q,
                            &q_transposed, &grad_out_transposed, &lse, &delta, &poisoned, &finite_q, &finite_grad_out})
      if (!*x) return false;
    return true;
  }

  void run() {
    for (int64_t key = 0; key < call.seqlen_k; ++key) {
      const T* x = call.v.row<const T>(b, key, head_kv);
      convert(x, v.get() + key * width_v, head_dim_v);
    }
    for (int64_t head = head_kv * group; head < (head_kv + 1) * group; ++head) {
      load_head(head);
      for (int n = 0; n < call.num_bands; ++n) add_band(call.bands[n], head);
      for (int64_t row = 0; row < call.seqlen_q; ++row)
        write(backward.grad_q.row<T>(b, row, head), grad_q.get() + row * width, head_dim, float(call.scale));
    }
    for (int64_t key = 0; key < call.seqlen_k; ++key) {
      write(backward.grad_k.row<T>(b, key, head_kv), grad_k.get() + key * width, head_dim, 1);
      write(backward.grad_v.row<T>(b, key, head_kv), grad_v.get() + key * width_v, head_dim_v, 1);
    }
  }

  static void write(T* to, const float* from, int channels, float factor) {
    for (int c = 0; c < channels; ++c) from_float(from[c] * factor, to + c);
  }

  // Writes x (rows, stride) transposed, in panels.
  void transpose(const float* x, int stride, int channels, float* to) const {
    for (int64_t row = 0; row < rows; row += GEMM_COLUMNS)
      write_panel(x + row * stride, stride, channels, to + row * channels);
  }

  void load_head(int64_t head) {
    std::fill_n(grad_q.get(), rows * width, 0.0f);
    std::fill_n(lse.get(), rows, INF);  // rows that see no key keep INF, so their weights are exp(-INF) = 0
    for (int64_t row = 0; row < call.seqlen_q; ++row) {
      convert(backward.grad_out.row<const T>(b, row, head), grad_out.get() + row * width_v, head_dim_v);
      const RowOfBackward loaded = load_row<T>(backward, b, row, head);
      if (loaded.lse != -INF) lse[row] = loaded.lse;
      delta[row] = loaded.delta;
      poisoned[row] = !loaded.finite;
    }
    transpose(grad_out.get(), width_v, head_dim_v, grad_out_transposed.get());
  }

  void add_band(const ForwardBand& band, int64_t head) {
    for (int64_t row = 0; row < call.seqlen_q; ++row) {
      rotate_row(call.q.row<const T>(b, row, head), q.get() + row * width, band.q, b, row, call);
      for (int c = 0; c < head_dim; ++c) q[row * width + c] *= float(call.scale);
    }
    transpose(q.get(), width, head_dim, q_transposed.get());
    const Table& k_table = call.k_copies[band.k_copy];
    for (int64_t key = 0; key < call.seqlen_k; ++key)
      rotate_row(call.k.row<const T>(b, key, head_kv), k.get() + key * width, k_table, b, key, call);
    std::fill_n(grad_rotated_q.get(), rows * width, 0.0f);
    std::fill_n(grad_rotated_k.get(), keys * width, 0.0f);
    for_tiles_of_band(call, band.band, BLOCK_M, [&](int64_t key, int64_t row) { add_tile(band.band, key, row); });
    add_unrotated(grad_rotated_q.get(), grad_q.get(), call.seqlen_q, width, band.q, b, call);
    add_unrotated(grad_rotated_k.get(), grad_k.get(), call.seqlen_k, width, k_table, b, call);
  }

  void add_tile(const Band& band, int64_t key, int64_t row) {
    const float *tile_k = k.get() + key * width, *tile_q = q.get() + row * width;
    multiply<false>(tile_k, width, q_transposed.get() + row * head_dim, GEMM_COLUMNS, weights, BLOCK_M, BLOCK_N,
                    BLOCK_M, head_dim, head_dim * GEMM_COLUMNS);
    multiply<false>(v.get() + key * width_v, width_v, grad_out_transposed.get() + row * head_dim_v, GEMM_COLUMNS,
                    grad_scores, BLOCK_M, BLOCK_N, BLOCK_M, head_dim_v, head_dim_v * GEMM_COLUMNS);
    for (int t = 0; t < BLOCK_N; ++t) {
      float *w = weights + t * BLOCK_M, *g = grad_scores + t * BLOCK_M;
      for (int r = 0; r < BLOCK_M; r += LANES) store(w + r, exp(load(w + r) - load(lse.get() + row + r)));
      // rows [first, end) of the tile see the key
      const int64_t position = shift + row;
      const int first = int(std::clamp<int64_t>(band.first_position(key + t) - position, 0, BLOCK_M));
      const int end = int(std::clamp<int64_t>(band.end_position(key + t) - position, first, BLOCK_M));
      std::fill_n(w, first, 0.0f);
      std::fill(w + end, w + BLOCK_M, 0.0f);
      for (int r = 0; r < BLOCK_M; r += LANES)
        store(g + r, load(w + r) * (load(g + r) - load(delta.get() + row + r)));
      std::fill_n(g, first, 0.0f);  // the weights are 0 there, but 0 * NaN is NaN
      std::fill(g + end, g + BLOCK_M, 0.0f);
      for (int r = 0; r < BLOCK_M; ++r) transposed[r * BLOCK_N + t] = g[r];
    }
    const float* tile_grad_out = grad_out.get() + row * width_v;
    if (std::any_of(poisoned.get() + row, poisoned.get() + row + BLOCK_M, [](float x) { return x != 0; })) {
      add_poisoned(band, key, row);
      tile_q = finite_q.get();
      tile_grad_out = finite_grad_out.get();
    }
    multiply<true>(weights, BLOCK_M, tile_grad_out, width_v, grad_v.get() + key * width_v, width_v,
                   BLOCK_N, width_v, BLOCK_M);
    multiply<true>(grad_scores, BLOCK_M, tile_q, width, grad_rotated_k.get() + key * width, width, BLOCK_N, width,
                   BLOCK_M);
    multiply<true>(transposed, BLOCK_N, tile_k, width, grad_rotated_q.get() + row * width, width, BLOCK_M, width,
                   BLOCK_N);
  }

  // Adds the contribution of the poisoned rows of a tile to the keys that they see, and takes these rows out of the
  // products. If they stayed, 0 times NaN would reach the other keys of the tile.
  void add_poisoned(const Band& band, int64_t key, int64_t row) {
    std::copy_n(q.get() + row * width, BLOCK_M * width, finite_q.get());
    std::copy_n(grad_out.get() + row * width_v, BLOCK_M * width_v, finite_grad_out.get());
    for (int r = 0; r < BLOCK_M; ++r) {
      if (!poisoned[row + r]) continue;
      std::fill_n(finite_q.get() + r * width, width, 0.0f);
      std::fill_n(finite_grad_out.get() + r * width_v, width_v, 0.0f);
      for (int t = 0; t < BLOCK_N; ++t) {
        float &w = weights[t * BLOCK_M + r], &g = grad_scores[t * BLOCK_M + r];
        if (key + t < call.seqlen_k && shift + row + r >= band.first_position(key + t) &&
            shift + row + r < band.end_position(key + t)) {
          for (int c = 0; c < width; ++c) grad_rotated_k[(key + t) * width + c] += g * q[(row + r) * width + c];
          for (int c = 0; c < width_v; ++c) grad_v[(key + t) * width_v + c] += w * grad_out[(row + r) * width_v + c];
        }
        w = g = 0;
      }
    }
  }
};

template <typename T>
int backward(const BackwardCall& call) {
  std::atomic<int> failed{0};
  parallel(call.forward.parallel_for, call.forward.threads, call.forward.batch * call.forward.heads_kv,
           [&](int64_t head) {
             KeyHead<T> work(call, head);
             if (work.allocated())
               work.run();
             else
               failed = 1;
           });
  return failed;
}

}  // namespace flashrope

extern "C" int flashrope_backward(const flashrope::BackwardCall* call) {
  switch (call->forward.dtype) {
    case 0: return flashrope::backward<float>(*call);
    case 1: return flashrope::backward<flashrope::Float16>(*call);
    default: return flashrope::backward<flashrope::BFloat16>(*call);
  }
}
