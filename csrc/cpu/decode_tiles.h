// Computes the products of decoding for a head_dim that is known only at run time. A tile of a few queries and keys is
// held in registers.
//
// For every cache line that is read, one that is read later is prefetched. If many lines were prefetched at once, they
// would wait for one another, and the computation would wait for them.

#pragma once

#include "decode.h"

namespace flashrope {

// Half of the registers hold sums. A vector of a key or value is loaded once for SCORE_ROWS queries, or for MOST_ROWS if
// there are as many.
constexpr int ACCUMULATORS = REGISTERS / 2, SCORE_ROWS = 4, SCORE_KEYS = ACCUMULATORS / SCORE_ROWS;
constexpr int MOST_ROWS = ACCUMULATORS / 2;

// Prefetches rows into the L2 cache, because wide rows do not fit in L1.
template <typename T>
struct Ahead {
  const T* const* row;  // nullptr: none
  static constexpr int LINE = 64 / sizeof(T);  // channels of a cache line

  bool begins(int c) const { return row && c % LINE == 0; }  // whether to prefetch lines that begin at channel c
  void prefetch(int t, int c) const { __builtin_prefetch(row[t] + c, 0, 2); }

  // Prefetches the lines of the rows [first, end) that begin at channel c, if lines begin there.
  void operator()(int c, int first, int end) const {
    if (begins(c))
      for (int t = first; t < end; ++t) prefetch(t, c);
  }
};

// Says which vectors of a key rotate. All fields count vectors. Pair n is the vectors first + n and first + half + n.
struct RotatingVectors {
  int first, half, rotating;  // the pairs from rotating on do not rotate
};

// Computes the products of ROWS queries, which are `stride` apart, and KEYS keys. products: (ROWS, LANES).
template <int ROWS, int KEYS, typename K, typename T>
inline void multiply_tile(const float* queries, int stride, const K* const* keys, int vectors, Vec* products,
                          const Ahead<T>& ahead) {
  Vec total[ROWS][KEYS] = {};
  for (int c = 0; c < vectors * LANES; c += LANES) {
    Vec query[ROWS];
    for (int r = 0; r < ROWS; ++r) query[r] = load(queries + r * stride + c);
    ahead(c, 0, KEYS);
    for (int t = 0; t < KEYS; ++t) {
      const Vec key = load(keys[t] + c);
      for (int r = 0; r < ROWS; ++r) total[r][t] += query[r] * key;
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < KEYS; ++t) products[r * LANES + t] = total[r][t];
}

// Computes the products of one query and KEYS keys, which are weighted and rotated in registers. products: (LANES,).
// weight: nullptr if keys are not weighted. cos: one pointer per key. sin is at cos + sin_offset.
template <int KEYS, typename T>
inline void multiply_rotated(const float* query, const T* const* keys, const float* const* cos, int64_t sin_offset,
                             const float* weight, const RotatingVectors& rotates, int vectors, Vec* products,
                             const Ahead<T>& ahead) {
  Vec total[KEYS] = {};
  int fetched = 0;  // channels; lines are prefetched in the order of memory, which is not the order of reading
  auto fetch = [&] { ahead(fetched, 0, KEYS), fetched += LANES; };
  auto add_plain = [&](int from, int until) {
    for (int c = from * LANES; c < until * LANES; c += LANES) {
      const Vec q = load(query + c);
      fetch();
      for (int t = 0; t < KEYS; ++t) total[t] += q * load(keys[t] + c);
    }
  };
  const int start = rotates.first * LANES, half = rotates.half * LANES;
  add_plain(0, rotates.first);
  for (int m = 0; m < rotates.rotating * LANES; m += LANES) {
    const int c = start + m;
    const Vec q = load(query + c), q_second = load(query + c + half);
    fetch(), fetch();
    for (int t = 0; t < KEYS; ++t) {
      Vec first = load(keys[t] + c), second = load(keys[t] + c + half);
      if (weight) first *= load(weight + c), second *= load(weight + c + half);
      const Vec c_cos = load(cos[t] + m), c_sin = load(cos[t] + sin_offset + m);
      total[t] += q * (first * c_cos - second * c_sin);
      total[t] += q_second * (second * c_cos + first * c_sin);
    }
  }
  add_plain(rotates.first + rotates.rotating, rotates.first + rotates.half);
  add_plain(rotates.first + rotates.half + rotates.rotating, vectors);
  for (int t = 0; t < KEYS; ++t) products[t] = total[t];
}

// Adds COLUMNS vectors of the values [first, end) to ROWS rows. c: their first channel, a multiple of COLUMNS * LANES.
// weights: (ROWS, BLOCK); acc: rows are `stride` apart.
template <int ROWS, int COLUMNS, typename V, typename T>
inline void add_weighted(const float* weights, const V* const* values, int first, int end, int c, float* acc, int stride,
                         const Ahead<T>& ahead) {
  Vec sum[ROWS][COLUMNS];
  for (int n = 0; n < ROWS; ++n)
    for (int i = 0; i < COLUMNS; ++i) sum[n][i] = load(acc + n * stride + c + i * LANES);
  const bool lines_begin = ahead.begins(c);
  for (int t = first; t < end; ++t)
    for (int i = 0; i < COLUMNS; ++i) {
      if (lines_begin && i * LANES % ahead.LINE == 0) ahead.prefetch(t, c + i * LANES);
      const Vec x = load(values[t] + c + i * LANES);
      for (int n = 0; n < ROWS; ++n) sum[n][i] += weights[n * BLOCK + t] * x;
    }
  for (int n = 0; n < ROWS; ++n)
    for (int i = 0; i < COLUMNS; ++i) store(acc + n * stride + c + i * LANES, sum[n][i]);
}

}  // namespace flashrope
