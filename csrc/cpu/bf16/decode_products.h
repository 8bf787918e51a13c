// Products of decoding in bfloat16, for the query rows of one key head.

#pragma once

#include "../decode_tiles.h"
#include "products.h"

namespace flashrope {

constexpr int MAX_WORDS = MAX_HEAD_DIM / 2;  // of a row

// Rounds the floats of a row, 2 per word. words: a multiple of LANES.
inline void round_row(const float* x, int words, int32_t* to) {
  for (int p = 0; p < words; p += LANES) store(to + p, rounded(load(x + 2 * p), load(x + 2 * p + LANES)));
}

// Stores `channels` values from channel c on, of BLOCK keys, as a strip (BLOCK / 2, STRIP). Calls prefetch(t) for key t.
template <typename Prefetch>
inline void pack_strip(const BFloat16* const* values, int c, int channels, const Prefetch& prefetch, int32_t* strip) {
  const __mmask32 present = channels == STRIP ? ~0u : (1u << channels) - 1;
  for (int n = 0; n < BLOCK / 2; ++n) {
    prefetch(2 * n), prefetch(2 * n + 1);
    const __m512i first = _mm512_maskz_loadu_epi16(present, values[2 * n] + c);
    const __m512i second = _mm512_maskz_loadu_epi16(present, values[2 * n + 1] + c);
    for (int h = 0; h < STRIP_VECTORS; ++h) store(strip + n * STRIP + h * LANES, row_pair(first, second, h));
  }
}

#ifdef __AMX_BF16__

// The queries of a band as the operand `b` of tdpbf16ps: (words, LANES), a column per row.
struct RoundedQueries {
  alignas(64) int32_t words[MAX_WORDS * LANES];

  void set(const float* x, int rows, int stride, int words_per_row) {
    alignas(64) float row[MAX_WORDS * 2];
    alignas(64) int32_t rounded_rows[MAX_ROWS * MAX_WORDS];
    for (int r = 0; r < rows; ++r) {
      std::copy_n(x + r * stride, stride, row);
      std::fill(row + stride, row + 2 * words_per_row, 0.0f);
      round_row(row, words_per_row, rounded_rows + r * words_per_row);
    }
    for (int p = 0; p < words_per_row; p += LANES) {
      IntVec block[LANES];
      for (int r = 0; r < LANES; ++r) block[r] = r < rows ? load(rounded_rows + r * words_per_row + p) : IntVec{};
      transpose(block);
      for (int n = 0; n < LANES; ++n) store(words + (p + n) * LANES, block[n]);
    }
  }
};

// Computes the scores of LANES keys: lane t of sums[r] is the product of row r and key t.
inline void multiply_keys(const RoundedQueries& queries, int rows, const BFloat16* const* keys, int words_per_row,
                          const Ahead<BFloat16>& ahead, Vec* sums) {
  alignas(64) BFloat16 copy[LANES * MAX_WORDS * 2];
  const BFloat16* first = keys[0];
  int64_t stride = keys[1] - keys[0];
  for (int t = 2; t < LANES; ++t)
    if (keys[t] - keys[t - 1] != stride) {
      for (int n = 0; n < LANES; ++n) std::copy_n(keys[n], 2 * words_per_row, copy + n * 2 * words_per_row);
      first = copy, stride = 2 * words_per_row;
      break;
    }
  alignas(64) IntVec products[2][LANES];  // two sums, because each product waits for the one before it in its sum
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  for (int p = 0; p < words_per_row; p += LANES) {
    for (int t = 0; t < LANES; ++t) ahead(t, 2 * p);
    _tile_loadd(4, first + 2 * p, stride * 2);
    _tile_loadd(5, queries.words + p * LANES, 4 * LANES);
    if (p / LANES % 2)
      _tile_dpbf16ps(1, 4, 5);
    else
      _tile_dpbf16ps(0, 4, 5);
  }
  _tile_stored(0, products[0], 4 * LANES);
  _tile_stored(1, products[1], 4 * LANES);
  for (int t = 0; t < LANES; ++t) products[0][t] = (IntVec)((Vec)products[0][t] + (Vec)products[1][t]);
  transpose(products[0]);
  for (int r = 0; r < rows; ++r) sums[r] = (Vec)products[0][r];
}

// Adds the weighted values of a strip to all rows of acc, which are `stride` numbers apart. weights: (MAX_ROWS,
// BLOCK / 2). vectors: how many vectors of the strip have values.
inline void add_strip(const int32_t* weights, int /*rows*/, const int32_t* strip, int vectors, float* acc, int stride) {
  finish_stores();
  _tile_loadd(6, weights, BLOCK / 2 * 4);
  _tile_loadd(7, weights + LANES, BLOCK / 2 * 4);
  const int bytes = stride * 4;
  _tile_loadd(0, acc, bytes);
  _tile_loadd(4, strip, STRIP * 4);
  _tile_dpbf16ps(0, 6, 4);
  _tile_loadd(5, strip + LANES * STRIP, STRIP * 4);
  if (vectors > 1) {
    _tile_loadd(1, acc + LANES, bytes);
    _tile_loadd(2, strip + LANES, STRIP * 4);
    _tile_dpbf16ps(1, 6, 2);
    _tile_loadd(3, strip + LANES * STRIP + LANES, STRIP * 4);
    _tile_dpbf16ps(0, 7, 5);
    _tile_dpbf16ps(1, 7, 3);
    _tile_stored(1, acc + LANES, bytes);
  } else {
    _tile_dpbf16ps(0, 7, 5);
  }
  _tile_stored(0, acc, bytes);
}

#else

// The queries of a band: (rows, words).
struct RoundedQueries {
  alignas(64) int32_t words[MAX_ROWS * MAX_WORDS];

  void set(const float* x, int rows, int stride, int words_per_row) {
    alignas(64) float row[MAX_WORDS * 2];
    for (int r = 0; r < rows; ++r) {
      std::copy_n(x + r * stride, stride, row);
      std::fill(row + stride, row + 2 * words_per_row, 0.0f);
      round_row(row, words_per_row, words + r * words_per_row);
    }
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
      for (int n = 0; n < SCORE_KEYS; ++n) {
        ahead(t + n, 2 * p);
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

#endif

}  // namespace flashrope
