// Vectors of words, and how float32 is rounded to words.
//
// A word is two bfloat16 numbers that are neighbors along the dimension that a product sums over. The first is in the
// low half.

#pragma once

#include "../common.h"

#ifndef __AVX512BF16__
#error "these sources need AVX512-BF16"
#endif

namespace flashrope {

constexpr int STRIP_VECTORS = 2, STRIP = STRIP_VECTORS * LANES;

using Words = std::unique_ptr<int32_t[], Free>;

inline Words words(int64_t count) { return allocate<int32_t>(count); }

inline IntVec load(const int32_t* x) {
  IntVec v;
  std::memcpy(&v, x, sizeof v);
  return v;
}
inline void store(int32_t* x, IntVec v) { std::memcpy(x, &v, sizeof v); }

// Rounds two vectors to nearest. The words of `first` come before those of `second`. A word holds two adjacent lanes.
inline IntVec rounded(Vec first, Vec second) { return (IntVec)_mm512_cvtne2ps_pbh(second, first); }

// Rounds the first `channels` numbers of x, a multiple of LANES, to words, and adds zeros up to a multiple of STRIP.
inline void round_row(const float* x, int channels, int32_t* to) {
  for (int c = 0; c < channels; c += STRIP)
    store(to + c / 2, rounded(load(x + c), c + LANES < channels ? load(x + c + LANES) : Vec{}));
}

// Rounds two vectors to nearest. Word n holds lane n of `first` and lane n of `second`.
inline IntVec rounded_pairs(Vec first, Vec second) {
  alignas(64) constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (IntVec)_mm512_permutexvar_epi16(_mm512_load_si512(ORDER), (__m512i)rounded(first, second));
}

// Interleaves half of two vectors of STRIP numbers each: elements with the same index become a word. half: 0 or 1.
inline IntVec row_pair(__m512i first, __m512i second, int half) {
  alignas(64) constexpr uint16_t ORDER[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                              8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i order = _mm512_add_epi16(_mm512_load_si512(ORDER), _mm512_set1_epi16(int16_t(half * LANES)));
  return (IntVec)_mm512_permutex2var_epi16(first, order, second);
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

}  // namespace flashrope
