// Code that the backwards in float32 and bfloat16 share.

#pragma once

#include "tiles.h"

namespace flashrope {

struct BackwardCall {  // mirrored in backends/cpu/library.py
  ForwardCall forward;  // holds the out and lse that the forward computed
  TensorView grad_out, grad_q, grad_k, grad_v;
  const float* grad_lse;  // (batch, heads_q, seqlen_q), or nullptr
};

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
