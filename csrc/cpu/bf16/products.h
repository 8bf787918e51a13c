// Products of bfloat16 matrices with vdpbf16ps, which multiplies pairs of bfloat16 and adds both to a float32.
//
// A word is two bfloat16 numbers that are neighbors along the dimension that a product sums over. The first is in the
// low half. For a product c (m, n) = a (m, k) b (k, n), b is stored in strips of STRIP columns and a in panels of PANEL
// rows. A strip has a word of every column for each pair of neighbors along k. A panel has a word of every row for each
// such pair. Each lane holds one column of b. A word of a is broadcast to all lanes.

#pragma once

#include "../tiles.h"

#ifndef __AVX512BF16__
#error "these sources need AVX512-BF16"
#endif

namespace flashrope {

constexpr int PANEL = 8, STRIP_VECTORS = 2, STRIP = STRIP_VECTORS * LANES;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Returns the factor that converts scores to exponents of 2. It is above 0, so that a masked score stays -infinity.
inline float score_factor(const ForwardCall& call) { return std::max(float(call.scale), 1e-30f) * LOG2_E; }

using Words = std::unique_ptr<int32_t[], Free>;

inline Words words(int64_t count) {  // nullptr if memory runs out
  return Words(static_cast<int32_t*>(std::aligned_alloc(64, (count * 4 / 64 + 1) * 64)));
}

inline IntVec load(const int32_t* x) {
  IntVec v;
  std::memcpy(&v, x, sizeof v);
  return v;
}
inline void store(int32_t* x, IntVec v) { std::memcpy(x, &v, sizeof v); }

// Adds the product of a and a strip to a tile of PANEL rows and STRIP columns. k: number of words along the dimension
// that is summed over. Word p of row r is a[r * ROW_STEP + p * STEP].
template <int ROW_STEP = 1, int STEP = PANEL>
inline void add_product(const int32_t* a, const int32_t* strip, int k, Vec (&acc)[PANEL][STRIP_VECTORS]) {
  for (int p = 0; p < k; ++p) {
    __m512bh columns[STRIP_VECTORS];
    for (int h = 0; h < STRIP_VECTORS; ++h) columns[h] = (__m512bh)load(strip + p * STRIP + h * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < PANEL; ++r) {
      const __m512bh row = (__m512bh)_mm512_set1_epi32(a[r * ROW_STEP + p * STEP]);
      for (int h = 0; h < STRIP_VECTORS; ++h) acc[r][h] = _mm512_dpbf16_ps(acc[r][h], row, columns[h]);
    }
  }
}

// Adds the same product to a tile in memory, whose rows are `stride` numbers apart.
template <int ROW_STEP = 1, int STEP = PANEL>
inline void add_product(const int32_t* a, const int32_t* strip, int k, float* to, int stride) {
  Vec tile[PANEL][STRIP_VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < PANEL; ++r)
    for (int h = 0; h < STRIP_VECTORS; ++h) tile[r][h] = load(to + r * stride + h * LANES);
  add_product<ROW_STEP, STEP>(a, strip, k, tile);
#pragma GCC unroll 8
  for (int r = 0; r < PANEL; ++r)
    for (int h = 0; h < STRIP_VECTORS; ++h) store(to + r * stride + h * LANES, tile[r][h]);
}

// Returns 2^x with a relative error of at most 2^-18. It is exact at x = 0, and 0 for -infinity. NaN stays NaN.
inline Vec exp2(Vec x) {
  const Vec r = _mm512_reduce_ps(x, 9);  // x - floor(x)
  Vec p = broadcast(0.013426685f);
  p = p * r + 0.052242473f;
  p = p * r + 0.2412802f;
  p = p * r + 0.69304484f;
  p = p * r + 1.0f;
  return _mm512_scalef_ps(p, x);
}

// Rounds two vectors to nearest. Word n holds lanes 2 n and 2 n + 1 of first, followed by second.
inline IntVec rounded(Vec first, Vec second) { return (IntVec)_mm512_cvtne2ps_pbh(second, first); }

// Rounds two vectors to nearest. Word n holds lane n of first and lane n of second.
inline IntVec rounded_pairs(Vec first, Vec second) {
  alignas(64) constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (IntVec)_mm512_permutexvar_epi16(_mm512_load_si512(ORDER), (__m512i)rounded(first, second));
}

// Transposes 16 vectors of 16 words.
inline void transpose(IntVec (&x)[LANES]) {
  __m512i a[LANES], b[LANES];
  for (int i = 0; i < LANES; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)x[i], (__m512i)x[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)x[i], (__m512i)x[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int n = 0; n < 2; ++n) {
      b[i + 2 * n] = _mm512_unpacklo_epi64(a[i + n], a[i + n + 2]);
      b[i + 2 * n + 1] = _mm512_unpackhi_epi64(a[i + n], a[i + n + 2]);
    }
  // Block m of four words in b[4 i + n] holds column 4 m + n of the rows 4 i to 4 i + 3.
  for (int n = 0; n < 4; ++n) {
    const __m512i low = _mm512_shuffle_i32x4(b[n], b[n + 4], 0x88), high = _mm512_shuffle_i32x4(b[n], b[n + 4], 0xdd);
    const __m512i low_2 = _mm512_shuffle_i32x4(b[n + 8], b[n + 12], 0x88);
    const __m512i high_2 = _mm512_shuffle_i32x4(b[n + 8], b[n + 12], 0xdd);
    x[n] = (IntVec)_mm512_shuffle_i32x4(low, low_2, 0x88);
    x[n + 8] = (IntVec)_mm512_shuffle_i32x4(low, low_2, 0xdd);
    x[n + 4] = (IntVec)_mm512_shuffle_i32x4(high, high_2, 0x88);
    x[n + 12] = (IntVec)_mm512_shuffle_i32x4(high, high_2, 0xdd);
  }
}

// Holds STRIP rows, rounded to bfloat16, and stores them in one of the layouts. pairs: number of words of a row.
struct RoundedRows {
  static constexpr int WIDTH = MAX_HEAD_DIM / 2;
  alignas(64) int32_t words[STRIP * WIDTH];

  // Sets row r to x. Sets the channels of x from head_dim up to a multiple of STRIP to 0.
  void set(int r, float* x, int head_dim) {
    const int whole = int(padded(head_dim, STRIP));
    std::fill(x + head_dim, x + whole, 0.0f);
    for (int c = 0; c < whole; c += 2 * LANES)
      store(words + r * WIDTH + c / 2, rounded(load(x + c), load(x + c + LANES)));
  }
  void clear(int r) { std::fill_n(words + r * WIDTH, WIDTH, 0); }

  // Stores the rows as the columns of a strip: (pairs, STRIP).
  void write_strip(int pairs, int32_t* to) const {
    for (int h = 0; h < STRIP_VECTORS; ++h)
      for_words(h * LANES, pairs, [&](int p, IntVec x) { store(to + p * STRIP + h * LANES, x); });
  }

  // Stores the rows as the rows of panels: (STRIP / PANEL, pairs, PANEL).
  void write_panels(int pairs, int32_t* to) const {
    for (int h = 0; h < STRIP_VECTORS; ++h)
      for_words(h * LANES, pairs, [&](int p, IntVec x) {
        for (int n = 0; n < LANES / PANEL; ++n)
          std::memcpy(to + ((h * LANES / PANEL + n) * pairs + p) * PANEL, (const int32_t*)&x + n * PANEL, PANEL * 4);
      });
  }

  // Stores the rows in strips of channels that are `step` words apart, with a word per pair of rows:
  // (channels / STRIP, STRIP / 2, STRIP).
  void write_row_pairs(int channels, int32_t* to, int step) const {
    // Interleaves two vectors: elements with the same index become adjacent.
    alignas(64) constexpr uint16_t ORDER[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(ORDER), high = _mm512_add_epi16(low, _mm512_set1_epi16(LANES));
    for (int n = 0; n < STRIP / 2; ++n)
      for (int c = 0; c < channels; c += STRIP) {
        const __m512i even = (__m512i)load(words + 2 * n * WIDTH + c / 2);
        const __m512i odd = (__m512i)load(words + (2 * n + 1) * WIDTH + c / 2);
        int32_t* strip = to + c / STRIP * step + n * STRIP;
        store(strip, (IntVec)_mm512_permutex2var_epi16(even, low, odd));
        store(strip + LANES, (IntVec)_mm512_permutex2var_epi16(even, high, odd));
      }
  }

 private:
  // Calls write(p, words) for every p. words: word p of each of the LANES rows from `first` on.
  template <typename Write>
  void for_words(int first, int pairs, const Write& write) const {
    for (int w = 0; w < pairs; w += LANES) {
      IntVec columns[LANES];
      for (int r = 0; r < LANES; ++r) columns[r] = load(words + (first + r) * WIDTH + w);
      transpose(columns);
      for (int p = 0; p < std::min(LANES, pairs - w); ++p) write(w + p, columns[p]);
    }
  }
};

}  // namespace flashrope
