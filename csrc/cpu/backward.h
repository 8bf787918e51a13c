// Code that the backwards in float32 and bfloat16 share.

#pragma once

#include "tiles.h"

namespace flashrope {

struct BackwardCall {  // mirrored in backends/cpu/library.py
  ForwardCall forward;  // holds the out and lse that the forward computed
  TensorView grad_out, grad_q, grad_k, grad_v;
  const float* grad_lse;  // (batch, heads_q, seqlen_q), or nullptr
};

// Delta of a query row, which is the sum of grad_out * out, minus the gradient of lse. finite: whether q, grad_out, lse
// and delta of the row are finite. An lse of -INF, of a row that sees no key, counts as finite.
struct RowOfBackward {
  float delta, lse;
  bool finite;
};

template <typename T>
RowOfBackward load_row(const BackwardCall& backward, int64_t b, int64_t row, int64_t head) {
  const ForwardCall& call = backward.forward;
  const int head_dim = int(call.head_dim), head_dim_v = int(call.head_dim_v);
  alignas(64) float q[MAX_HEAD_DIM], out[MAX_HEAD_DIM], grad_out[MAX_HEAD_DIM];
  convert_padded(call.q.row<const T>(b, row, head), q, head_dim);
  convert_padded(call.out.row<const T>(b, row, head), out, head_dim_v);
  convert_padded(backward.grad_out.row<const T>(b, row, head), grad_out, head_dim_v);
  Vec products{}, zeros{};  // zeros becomes NaN if a number is not finite
  for (int c = 0; c < head_dim; c += LANES) zeros += load(q + c) * 0.0f;
  for (int c = 0; c < head_dim_v; c += LANES) {
    products += load(out + c) * load(grad_out + c);
    zeros += load(grad_out + c) * 0.0f;
  }
  const int64_t n = (b * call.heads_q + head) * call.seqlen_q + row;
  const float lse = call.lse[n], delta = sum(products) - (backward.grad_lse ? backward.grad_lse[n] : 0);
  return {delta, lse, sum(zeros) == 0 && std::isfinite(delta) && lse < INF};
}

// Calls add(first key, first row) for every tile of BLOCK_N keys and `rows` queries in which some (query, key) pair may
// be in the band.
template <typename Add>
void for_tiles_of_band(const ForwardCall& call, const Band& band, int64_t rows, const Add& add) {
  for (int64_t key = 0; key < call.seqlen_k; key += BLOCK_N) {
    const int64_t last_key = std::min<int64_t>(key + BLOCK_N, call.seqlen_k) - 1;
    const int64_t first_row = std::max<int64_t>(band.first_position(key) - call.shift, 0);
    const int64_t end_row = std::min<int64_t>(band.end_position(last_key) - call.shift, call.seqlen_q);
    for (int64_t row = first_row / rows * rows; row < end_row; row += rows) add(key, row);
  }
}

// Rotates the `count` rows of `from` back, in place, and adds them to the rows of `to`. Rows are `width` numbers apart.
inline void add_unrotated(float* from, float* to, int64_t count, int width, const Table& table, int64_t b,
                          const ForwardCall& call) {
  for (int64_t row = 0; row < count; ++row) {
    unrotate_row(from + row * width, table, b, row, call);
    for (int c = 0; c < call.head_dim; ++c) to[row * width + c] += from[row * width + c];
  }
}

}  // namespace flashrope
