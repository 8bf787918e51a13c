// Products of bfloat16 matrices, and the layouts of their operands.
//
// For a product c (m, n) = a (m, k) b (k, n), `b` is stored in strips of STRIP columns and `a` in panels of PANEL rows.
// A strip has a word of every column for each pair of neighbors along k. amx.h and vdpbf16.h describe panels.

#pragma once

#include "../tiles.h"

#ifdef __AMX_BF16__
#include "amx.h"
#else
#include "vdpbf16.h"
#endif

namespace flashrope {

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Returns the factor that converts scores to exponents of 2. It is above 0, so that a masked score stays -infinity.
inline float score_factor(const ForwardCall& call) { return std::max(float(call.scale), 1e-30f) * LOG2_E; }

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

// Holds STRIP rows, rounded to bfloat16, and stores them in one of the layouts. pairs: number of words of a row.
struct RoundedRows {
  static constexpr int WIDTH = MAX_HEAD_DIM / 2;
  alignas(64) int32_t words[STRIP * WIDTH];

  // Sets row r to x. Sets the channels of x from head_dim up to a multiple of STRIP to 0.
  void set(int r, float* x, int head_dim) {
    const int whole = int(padded(head_dim, STRIP));
    std::fill(x + head_dim, x + whole, 0.0f);
    round_row(x, whole, words + r * WIDTH);
  }
  void clear(int r) { std::fill_n(words + r * WIDTH, WIDTH, 0); }

  // Stores the rows as the columns of a strip: (pairs, STRIP).
  void write_strip(int pairs, int32_t* to) const {
    for (int h = 0; h < STRIP_VECTORS; ++h)
      for_words(h * LANES, pairs, [&](int p, IntVec x) { store(to + p * STRIP + h * LANES, x); });
  }

  // Stores the rows as the rows of panels: (STRIP / PANEL, pairs, PANEL), or (STRIP, pairs) for AMX.
  void write_panels(int pairs, int32_t* to) const {
#ifdef __AMX_BF16__
    for (int r = 0; r < STRIP; ++r) std::memcpy(to + r * pairs, words + r * WIDTH, pairs * 4);
#else
    for (int h = 0; h < STRIP_VECTORS; ++h)
      for_words(h * LANES, pairs, [&](int p, IntVec x) {
        for (int n = 0; n < LANES / PANEL; ++n)
          std::memcpy(to + ((h * LANES / PANEL + n) * pairs + p) * PANEL, (const int32_t*)&x + n * PANEL, PANEL * 4);
      });
#endif
  }

  // Stores the rows in strips of channels that are `step` words apart, with a word per pair of rows:
  // (channels / STRIP, STRIP / 2, STRIP).
  void write_row_pairs(int channels, int32_t* to, int step) const {
    for (int n = 0; n < STRIP / 2; ++n)
      for (int c = 0; c < channels; c += LANES)
        store(to + c / STRIP * step + n * STRIP + c % STRIP, row_pair(n, c));
  }

  // Stores the channels as the rows of panels, with a word per pair of rows: (channels / PANEL, pairs, PANEL), or
  // (channels, pairs) for AMX. Writes STRIP / 2 of the panels' `pairs` words per channel, from word `first` on.
  void write_channel_panels(int channels, int pairs, int first, int32_t* to) const {
    for (int c = 0; c < channels; c += LANES) {
#ifdef __AMX_BF16__
      IntVec block[LANES];
      for (int n = 0; n < LANES; ++n) block[n] = row_pair(n, c);
      transpose(block);
      for (int n = 0; n < LANES; ++n) store(to + (c + n) * pairs + first, block[n]);
#else
      for (int n = 0; n < STRIP / 2; ++n) {
        const IntVec pair = row_pair(n, c);
        for (int half = 0; half < LANES / PANEL; ++half)
          std::memcpy(to + ((c / PANEL + half) * pairs + first + n) * PANEL, (const int32_t*)&pair + half * PANEL,
                      PANEL * 4);
      }
#endif
    }
  }

 private:
  // Returns the words of the rows 2 n and 2 n + 1: one per channel, for the LANES channels from c on.
  IntVec row_pair(int n, int c) const {
    const int32_t* first = words + 2 * n * WIDTH + c / STRIP * LANES;
    return flashrope::row_pair((__m512i)load(first), (__m512i)load(first + WIDTH), c % STRIP / LANES);
  }

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
