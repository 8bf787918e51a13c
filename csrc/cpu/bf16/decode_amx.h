// Products of decoding with the tiles of AMX, which amx.h describes.

#pragma once

#include "decode_words.h"

namespace flashrope {

// The queries of a band as the operand `b` of tdpbf16ps: (words, LANES), a column per row.
struct RoundedQueries {
  alignas(64) int32_t words[MAX_WORDS * LANES];

  void set(const float* x, int rows, int stride, int words_per_row) {
    alignas(64) int32_t rounded_rows[MAX_ROWS * MAX_WORDS];
    for (int r = 0; r < rows; ++r) round_row(x + r * stride, stride, rounded_rows + r * words_per_row);
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
    ahead(2 * p, 0, LANES);
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

}  // namespace flashrope
