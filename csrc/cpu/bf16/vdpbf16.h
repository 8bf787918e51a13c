// Products with vdpbf16ps, which multiplies two pairs of bfloat16 elementwise and adds both products to a float32.
//
// A panel holds PANEL rows of the operand `a`. For each pair of neighbors along k, the dimension that the product sums
// over, it holds one word of each row, side by side. Each lane holds one column of `b`. A word of `a` is broadcast to
// all lanes.

#pragma once

#include "words.h"

namespace flashrope {

constexpr int PANEL = 8, PAIR_STEP = 1;  // a product sums over a multiple of PAIR_STEP words

// The rows of the operand `a` of one product. Word p of row r is words[r * ROW_STEP + p * STEP].
template <int ROW_STEP, int STEP>
struct Rows {
  const int32_t* words;
};

// Returns a panel of `pairs` words per row, from pair `first` on.
inline Rows<1, PANEL> packed_rows(const int32_t* panel, int /*pairs*/, int first = 0) { return {panel + first * PANEL}; }

// Returns rows that are stored one after the other, PAIRS words each.
template <int PAIRS>
Rows<PAIRS, 1> stored_rows(const int32_t* words) {
  return {words};
}

// The operand `a` of `add_product` for a strip (PAIRS, STRIP): row r of the operand is column r of the strip.
template <int PAIRS>
struct StripRows : Rows<1, STRIP> {
  explicit StripRows(const int32_t* words) : Rows<1, STRIP>{words} {}
};

// Adds the product of `a` and a strip to a tile of PANEL rows and STRIP columns. k: number of words along the dimension
// that is summed over.
template <int ROW_STEP, int STEP>
inline void add_product(Rows<ROW_STEP, STEP> a, const int32_t* strip, int k, Vec (&acc)[PANEL][STRIP_VECTORS]) {
  for (int p = 0; p < k; ++p) {
    __m512bh columns[STRIP_VECTORS];
    for (int h = 0; h < STRIP_VECTORS; ++h) columns[h] = (__m512bh)load(strip + p * STRIP + h * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < PANEL; ++r) {
      const __m512bh row = (__m512bh)_mm512_set1_epi32(a.words[r * ROW_STEP + p * STEP]);
      for (int h = 0; h < STRIP_VECTORS; ++h) acc[r][h] = _mm512_dpbf16_ps(acc[r][h], row, columns[h]);
    }
  }
}

// Sets a tile to the product of `a` and a strip.
template <typename A>
inline void set_product(A a, const int32_t* strip, int k, Vec (&tile)[PANEL][STRIP_VECTORS]) {
  for (auto& row : tile)
    for (Vec& x : row) x = Vec{};
  add_product(a, strip, k, tile);
}

// Adds the product of `a` and a strip to a tile in memory, whose rows are `stride` numbers apart. decay: numbers
// by which the columns of the tile are multiplied first, or nullptr.
template <typename A>
inline void add_product(A a, const int32_t* strip, int k, float* to, int stride, const float* decay = nullptr) {
  Vec tile[PANEL][STRIP_VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < PANEL; ++r)
    for (int h = 0; h < STRIP_VECTORS; ++h) tile[r][h] = load(to + r * stride + h * LANES);
  if (decay)
#pragma GCC unroll 8
    for (int r = 0; r < PANEL; ++r)
      for (int h = 0; h < STRIP_VECTORS; ++h) tile[r][h] *= load(decay + h * LANES);
  add_product(a, strip, k, tile);
#pragma GCC unroll 8
  for (int r = 0; r < PANEL; ++r)
    for (int h = 0; h < STRIP_VECTORS; ++h) store(to + r * stride + h * LANES, tile[r][h]);
}

struct ProductsOfThread {
  ProductsOfThread() {}  // vdpbf16ps needs no preparation
};

}  // namespace flashrope
