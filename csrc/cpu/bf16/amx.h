// Products with the tiles of AMX: tdpbf16ps multiplies 16 rows by 16 columns of 32 bfloat16 numbers each, and adds the
// products to 16 by 16 float32 numbers.
//
// A panel has PANEL rows, which are stored one after the other. Operands have zeros up to a multiple of PAIR_STEP words
// along k. Four tiles of sums share two tiles of `a` and two of `b`, so a sum need not wait for the one before it.

#pragma once

#include "words.h"

namespace flashrope {

constexpr int TILE_ROWS = 16, PANEL = 2 * TILE_ROWS, PAIR_STEP = LANES;

// The rows of the operand `a` of one product: row r starts at words + r * row_words.
struct Rows {
  const int32_t* words;
  int row_words;
};

// Returns a panel of `pairs` words per row, from pair `first` on.
inline Rows packed_rows(const int32_t* panel, int pairs, int first = 0) { return {panel + first, pairs}; }

// Returns rows that are stored one after the other, PAIRS words each.
template <int PAIRS>
Rows stored_rows(const int32_t* words) {
  return {words, PAIRS};
}

// The operand `a` of `add_product` for a strip (PAIRS, STRIP): row r of the operand is column r of the strip. AMX reads
// rows, so the strip is transposed.
template <int PAIRS>
struct StripRows {
  alignas(64) int32_t words[PANEL * PAIRS];

  explicit StripRows(const int32_t* strip) {
    for (int h = 0; h < STRIP_VECTORS; ++h)
      for (int p = 0; p < PAIRS; p += LANES) {
        IntVec block[LANES];
        for (int n = 0; n < LANES; ++n) block[n] = load(strip + (p + n) * STRIP + h * LANES);
        transpose(block);
        for (int r = 0; r < LANES; ++r) store(words + (h * LANES + r) * PAIRS + p, block[r]);
      }
  }
  operator Rows() const { return {words, PAIRS}; }
};

// Adds the product of `a` and a strip to the tiles 0 to 3, and stores these tiles. k: number of words along the
// dimension that is summed over. Rows of the result are `stride` numbers apart.
inline void finish_product(Rows a, const int32_t* strip, int k, float* to, int stride) {
  const int64_t a_bytes = a.row_words * 4, b_bytes = STRIP * 4, bytes = int64_t(stride) * 4;
  for (int p = 0; p < k; p += PAIR_STEP) {
    _tile_loadd(4, a.words + p, a_bytes);
    _tile_loadd(6, strip + p * STRIP, b_bytes);
    _tile_loadd(7, strip + p * STRIP + LANES, b_bytes);
    _tile_loadd(5, a.words + p + TILE_ROWS * a.row_words, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, to, bytes);
  _tile_stored(1, to + LANES, bytes);
  _tile_stored(2, to + TILE_ROWS * stride, bytes);
  _tile_stored(3, to + TILE_ROWS * stride + LANES, bytes);
}

// Keeps the compiler from moving stores behind loads of tiles. It does not know that loads of tiles read memory.
inline void finish_stores() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Sets a tile to the product of `a` and a strip.
inline void set_product(Rows a, const int32_t* strip, int k, Vec (&tile)[PANEL][STRIP_VECTORS]) {
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  finish_product(a, strip, k, reinterpret_cast<float*>(tile), STRIP);
}

// Adds the product of `a` and a strip to a tile in memory, whose rows are `stride` numbers apart. decay: numbers
// by which the columns of the tile are multiplied first, or nullptr.
inline void add_product(Rows a, const int32_t* strip, int k, float* to, int stride, const float* decay = nullptr) {
  if (decay)
    for (int r = 0; r < PANEL; ++r)
      for (int h = 0; h < STRIP_VECTORS; ++h) {
        float* x = to + r * stride + h * LANES;
        store(x, load(x) * load(decay + h * LANES));
      }
  finish_stores();
  const int64_t bytes = int64_t(stride) * 4;
  _tile_loadd(0, to, bytes);
  _tile_loadd(1, to + LANES, bytes);
  _tile_loadd(2, to + TILE_ROWS * stride, bytes);
  _tile_loadd(3, to + TILE_ROWS * stride + LANES, bytes);
  finish_product(a, strip, k, to, stride);
}

// Gives all tiles of this thread 16 rows of 64 bytes. The destructor frees the tiles for other libraries.
struct ProductsOfThread {
  ProductsOfThread() {
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    finish_stores();
    _tile_loadconfig(&config);
  }
  ~ProductsOfThread() { _tile_release(); }
  ProductsOfThread(const ProductsOfThread&) = delete;
};

}  // namespace flashrope
