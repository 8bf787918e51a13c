// Computes the products of decoding for a head_dim that is known only at run time. A tile of a few queries and keys is
// held in registers.
//
// While a cache line of this block is read, a line of the next block is prefetched. If all lines were prefetched at
// once, they would wait for one another, and the computation would wait for them.

#pragma once

#include "decode.h"

namespace flashrope {

// Half of the registers hold sums. A vector of a key is loaded once for SCORE_ROWS queries.
constexpr int ACCUMULATORS = REGISTERS / 2, SCORE_ROWS = 4, SCORE_KEYS = ACCUMULATORS / SCORE_ROWS;

// Prefetches some rows of the next block into the L2 cache, because wide rows do not fit in L1. Several passes over a
// block share its rows: a processor can wait for only a few lines at a time, and a pass that prefetches more of them
// waits instead of computing.
template <typename T>
struct Ahead {
  const T* const* row;  // nullptr: none
  int pass = 0, passes = 1;  // prefetches row t if t % passes is pass; passes is a power of 2

  // Prefetches the line of row t that begins at channel c, a multiple of LANES, if a line begins there.
  void operator()(int t, int c) const {
    constexpr int STEP = 64 * PER_ELEMENT<T> / sizeof(T);  // channels of a line
    if (row && c % STEP == 0 && (t & (passes - 1)) == pass) __builtin_prefetch(channel(row[t], c), 0, 2);
  }
  Ahead from(int t) const { return {row ? row + t : nullptr, (pass - t) & (passes - 1), passes}; }
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
    for (int t = 0; t < KEYS; ++t) {
      ahead(t, c);
      const Vec key = load(channel(keys[t], c));
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
  auto add_plain = [&](int from, int until) {
    for (int c = from * LANES; c < until * LANES; c += LANES) {
      const Vec q = load(query + c);
      for (int t = 0; t < KEYS; ++t) {
        ahead(t, c);
        total[t] += q * load(channel(keys[t], c));
      }
    }
  };
  const int start = rotates.first * LANES, half = rotates.half * LANES;
  add_plain(0, rotates.first);
  for (int m = 0; m < rotates.rotating * LANES; m += LANES) {
    const int c = start + m;
    const Vec q = load(query + c), q_second = load(query + c + half);
    for (int t = 0; t < KEYS; ++t) {
      ahead(t, c), ahead(t, c + half);
      Vec first = load(channel(keys[t], c)), second = load(channel(keys[t], c + half));
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

// Adds COLUMNS vectors of the values [first, end) to ROWS rows. weights: (ROWS, BLOCK); acc: rows are `stride` apart.
template <int ROWS, int COLUMNS, typename V, typename T>
inline void add_weighted(const float* weights, const V* const* values, int first, int end, int c, float* acc, int stride,
                         const Ahead<T>& ahead) {
  Vec sum[ROWS][COLUMNS];
  for (int n = 0; n < ROWS; ++n)
    for (int i = 0; i < COLUMNS; ++i) sum[n][i] = load(acc + n * stride + c + i * LANES);
  for (int t = first; t < end; ++t)
    for (int i = 0; i < COLUMNS; ++i) {
      ahead(t, c + i * LANES);
      const Vec x = load(channel(values[t], c + i * LANES));
      for (int n = 0; n < ROWS; ++n) sum[n][i] += weights[n * BLOCK + t] * x;
    }
  for (int n = 0; n < ROWS; ++n)
    for (int i = 0; i < COLUMNS; ++i) store(acc + n * stride + c + i * LANES, sum[n][i]);
}

}  // namespace flashrope
