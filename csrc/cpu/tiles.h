// Code that the forward and the backward share: the call, products of tiles, the rotation of a row by tables.

#pragma once

#include "common.h"

#include <algorithm>

namespace flashrope {

constexpr int BLOCK_N = 64;  // keys of a block
// multiply holds BEST_ROWS rows of a product in registers at a time, two vectors per row. The number of rows must be a
// multiple of GEMM_ROWS. The last rows may be fewer than BEST_ROWS.
constexpr int BEST_ROWS = REGISTERS == 32 ? 8 : 6, GEMM_ROWS = REGISTERS == 32 ? 8 : 2;
constexpr int GEMM_COLUMNS = 2 * LANES;

// cos and sin of every row: y[c] = x[c] * cos[c] + x[the other channel of its pair] * sin[c - first_channel].
struct Table {
  const float *cos, *sin;  // (rows, head_dim) and (rows, 2 pairs); nullptr: cos is 1, or sin is 0
  int64_t cos_batch, cos_row, sin_batch, sin_row;  // strides
};

struct ForwardBand {
  Band band;
  Table q;
  int64_t k_copy;  // index into ForwardCall::k_copies
};

struct ForwardCall {  // mirrored in backends/cpu/library.py
  TensorView q, k, v, out;
  TensorView k_scale, v_scale;  // float32 (batch, rows, heads), of a quantized cache
  float* lse;                   // (batch, heads_q, seqlen_q)
  int64_t batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v, pairs, interleaved, first_channel;
  const float* key_weight;  // (head_dim,), multiplies keys before their rotation; nullptr: 1. Only the forwards read it
  ForwardBand bands[MAX_BANDS];
  Table k_copies[MAX_BANDS];
  int64_t num_bands, num_copies;
  int64_t shift;  // the query row r is at position shift + r, counted from the first key
  double scale;
  // 0 float32, 1 float16, 2 bfloat16. With 3 the keys are Int8; the queries are then float32, and in bf16/
  // bfloat16.
  int64_t dtype;
  int64_t float32_out, threads;  // float32_out: only bf16/ reads it; other targets write out in the type of the queries
  ParallelFor parallel_for;
};

// Computes c (m, n) = a (m, k) b (k, n), or with ADD c += a b. m must be a multiple of GEMM_ROWS, and n a multiple of
// GEMM_COLUMNS. panel: distance between neighboring panels of b, each of which has GEMM_COLUMNS columns.
template <bool ADD, int ROWS = BEST_ROWS>
void multiply(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int m, int n, int k,
              int panel = GEMM_COLUMNS) {
  int i = 0;
  for (; i + ROWS <= m; i += ROWS)
    for (int j = 0; j < n; j += GEMM_COLUMNS) {
      const float* columns = b + j / GEMM_COLUMNS * panel;
      Vec acc[ROWS][2];
      for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) acc[r][h] = ADD ? load(c + (i + r) * ldc + j + h * LANES) : Vec{};
      for (int p = 0; p < k; ++p) {
        const Vec low = load(columns + p * ldb), high = load(columns + p * ldb + LANES);
        for (int r = 0; r < ROWS; ++r) {
          const Vec x = broadcast(a[(i + r) * lda + p]);
          acc[r][0] += x * low;
          acc[r][1] += x * high;
        }
      }
      for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) store(c + (i + r) * ldc + j + h * LANES, acc[r][h]);
    }
  if constexpr (ROWS > GEMM_ROWS)
    if (i < m)
      multiply<ADD, (ROWS > 4 ? 4 : GEMM_ROWS)>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, m - i, n, k, panel);
}

// Writes the rows x (GEMM_COLUMNS, stride) transposed, as the panel `to` (channels, GEMM_COLUMNS). Takes a few channels
// at a time, so that the part of `to` that is being written fits into the L1 cache.
inline void write_panel(const float* x, int stride, int channels, float* to) {
  constexpr int COLUMNS = 8;  // divides head_dim
  for (int first = 0; first < channels; first += COLUMNS)
    for (int r = 0; r < GEMM_COLUMNS; ++r)
      for (int c = first; c < first + COLUMNS; ++c) to[c * GEMM_COLUMNS + r] = x[r * stride + c];
}

template <typename T>
void rotate_row(const T* x, float* y, const Table& table, int64_t b, int64_t row, const ForwardCall& call) {
  const int head_dim = int(call.head_dim), pairs = int(call.pairs), start = int(call.first_channel);
  if (table.sin && !call.interleaved && pairs % LANES == 0 && head_dim % LANES == 0 && start % LANES == 0) {
    const float* cos = table.cos + b * table.cos_batch + row * table.cos_row;
    const float* sin = table.sin + b * table.sin_batch + row * table.sin_row;
    for (int c = 0; c < start; c += LANES) store(y + c, load(x + c) * load(cos + c));
    for (int m = 0; m < pairs; m += LANES) {
      const int c = start + m;
      const Vec first = load(x + c), second = load(x + c + pairs);
      store(y + c, first * load(cos + c) + second * load(sin + m));
      store(y + c + pairs, second * load(cos + c + pairs) + first * load(sin + m + pairs));
    }
    for (int c = start + 2 * pairs; c < head_dim; c += LANES) store(y + c, load(x + c) * load(cos + c));
    return;
  }
  convert(x, y, head_dim);
  if (!table.cos) return;
  const float* cos = table.cos + b * table.cos_batch + row * table.cos_row;
  if (!table.sin) {
    for (int c = 0; c < head_dim; ++c) y[c] *= cos[c];
    return;
  }
  const float* sin = table.sin + b * table.sin_batch + row * table.sin_row;
  for (int c = 0; c < start; ++c) y[c] *= cos[c];
  for (int c = start + 2 * pairs; c < head_dim; ++c) y[c] *= cos[c];
  y += start, cos += start;
  if (call.interleaved) {
    for (int m = 0; m < pairs; ++m) {
      const float first = y[2 * m], second = y[2 * m + 1];
      y[2 * m] = first * cos[2 * m] + second * sin[2 * m];
      y[2 * m + 1] = second * cos[2 * m + 1] + first * sin[2 * m + 1];
    }
  } else {
    for (int m = 0; m < pairs; ++m) {
      const float first = y[m], second = y[m + pairs];
      y[m] = first * cos[m] + second * sin[m];
      y[m + pairs] = second * cos[m + pairs] + first * sin[m + pairs];
    }
  }
}

// Multiplies a key by key_weight, if there are weights, rotates it and writes it to y.
template <typename T>
void rotate_key(const T* x, float* y, const Table& table, int64_t b, int64_t row, const ForwardCall& call) {
  if (!call.key_weight) return rotate_row(x, y, table, b, row, call);
  alignas(64) float weighted[MAX_HEAD_DIM];
  convert(x, weighted, int(call.head_dim));
  for (int c = 0; c < call.head_dim; ++c) weighted[c] *= call.key_weight[c];
  rotate_row(weighted, y, table, b, row, call);
}

// Applies the transpose of rotate_row to the gradient of a rotated row, in place.
inline void unrotate_row(float* y, const Table& table, int64_t b, int64_t row, const ForwardCall& call) {
  const int head_dim = int(call.head_dim), pairs = int(call.pairs), start = int(call.first_channel);
  if (!table.cos) return;
  const float* cos = table.cos + b * table.cos_batch + row * table.cos_row;
  const float* sin = table.sin ? table.sin + b * table.sin_batch + row * table.sin_row : nullptr;
  if (!sin) {
    for (int c = 0; c < head_dim; ++c) y[c] *= cos[c];
    return;
  }
  for (int c = 0; c < start; ++c) y[c] *= cos[c];
  for (int c = start + 2 * pairs; c < head_dim; ++c) y[c] *= cos[c];
  y += start, cos += start;
  auto unrotate = [&](int i, int j) {
    const float first = y[i], second = y[j];
    y[i] = first * cos[i] + second * sin[j];
    y[j] = second * cos[j] + first * sin[i];
  };
  int m = 0;
  if (call.interleaved) {
    for (; m < pairs; ++m) unrotate(2 * m, 2 * m + 1);
  } else {
    for (; m + LANES <= pairs; m += LANES) {
      const Vec first = load(y + m), second = load(y + m + pairs);
      store(y + m, first * load(cos + m) + second * load(sin + m + pairs));
      store(y + m + pairs, second * load(cos + m + pairs) + first * load(sin + m));
    }
    for (; m < pairs; ++m) unrotate(m, m + pairs);
  }
}

inline int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace flashrope
