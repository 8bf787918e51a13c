// Products of decoding with vdpbf16ps, which vdpbf16.h describes.

#pragma once

#include "decode_words.h"

namespace flashrope {

// The queries of a band: (rows, words).
struct RoundedQueries {
  alignas(64) int32_t words[MAX_ROWS * MAX_WORDS];

  void set(const float* x, int rows, int stride, int words_per_row) {
    for (int r = 0; r < rows; ++r) round_row(x + r * stride, stride, words + r * words_per_row);
  }
};

template <int ROWS>
inline void multiply_rows(const int32_t* queries, const BFloat16* const* keys, int words_per_row,
                          const Ahead<BFloat16>& ahead, Vec* sums_of_rows) {
  Vec products[ROWS][LANES];
  for (int t = 0; t < LANES; t += SCORE_KEYS) {
    Vec total[ROWS][SCORE_KEYS] = {};
    for (int p = 0; p < words_per_row; p += LANES) {
      __m512bh query[ROWS];
      for (int r = 0; r < ROWS; ++r) query[r] = (__m512bh)load(queries + r * words_per_row + p);
      ahead(2 * p, t, t + SCORE_KEYS);
      for (int n = 0; n < SCORE_KEYS; ++n) {
        const __m512bh key = (__m512bh)_mm512_loadu_si512(keys[t + n] + 2 * p);
        for (int r = 0; r < ROWS; ++r) total[r][n] = _mm512_dpbf16_ps(total[r][n], query[r], key);
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int n = 0; n < SCORE_KEYS; ++n) products[r][t + n] = total[r][n];
  }
  for (int r = 0; r < ROWS; ++r) sums_of_rows[r] = sums(products[r]);
}

// Computes the scores of LANES keys: lane t of sums[r] is the product of row r and key t.
inline void multiply_keys(const RoundedQueries& queries, int rows, const BFloat16* const* keys, int words_per_row,
                          const Ahead<BFloat16>& ahead, Vec* sums) {
  int r = 0;
  for (; r + SCORE_ROWS <= rows; r += SCORE_ROWS)
    multiply_rows<SCORE_ROWS>(queries.words + r * words_per_row, keys, words_per_row,
                              r ? Ahead<BFloat16>{nullptr} : ahead, sums + r);
  for (; r < rows; ++r)
    multiply_rows<1>(queries.words + r * words_per_row, keys, words_per_row, Ahead<BFloat16>{nullptr}, sums + r);
}

template <int ROWS>
inline void add_to_rows(const int32_t* weights, const int32_t* strip, int vectors, float* acc, int stride) {
  Vec sum[ROWS][STRIP_VECTORS] = {};
  for (int r = 0; r < ROWS; ++r)
    for (int h = 0; h < vectors; ++h) sum[r][h] = load(acc + r * stride + h * LANES);
  for (int n = 0; n < BLOCK / 2; ++n)
    for (int h = 0; h < STRIP_VECTORS; ++h) {
      const __m512bh values = (__m512bh)load(strip + n * STRIP + h * LANES);
      for (int r = 0; r < ROWS; ++r)
        sum[r][h] = _mm512_dpbf16_ps(sum[r][h], (__m512bh)_mm512_set1_epi32(weights[r * BLOCK / 2 + n]), values);
    }
  for (int r = 0; r < ROWS; ++r)
    for (int h = 0; h < vectors; ++h) store(acc + r * stride + h * LANES, sum[r][h]);
}

// Adds the weighted values of a strip to all rows of acc, which are `stride` numbers apart. weights: (rows, BLOCK / 2).
// vectors: how many vectors of the strip have values.
inline void add_strip(const int32_t* weights, int rows, const int32_t* strip, int vectors, float* acc, int stride) {
  int r = 0;
  for (; r + SCORE_ROWS <= rows; r += SCORE_ROWS)
    add_to_rows<SCORE_ROWS>(weights + r * BLOCK / 2, strip, vectors, acc + r * stride, stride);
  for (; r < rows; ++r) add_to_rows<1>(weights + r * BLOCK / 2, strip, vectors, acc + r * stride, stride);
}

}  // namespace flashrope
