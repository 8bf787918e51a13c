// Fragments of 16-bit matrices as lanes hold them (PTX ISA, "Matrix Fragments for mma.m16n8k16").
#pragma once

#include "opcodes.h"

namespace executor {

using Decode = float (*)(uint16_t);

// A (16, 16) from four registers.
template <Decode F>
void load_a(Warp& w, const Operand* o, float a[16][16]) {
  for (int n = 0; n < 4; n++) {
    const uint32_t* p = w.at<uint32_t>(o[n]);
    for (int l = 0; l < LANES; l++) {
      int row = l / 4 + 8 * (n & 1), k = 2 * (l % 4) + 8 * (n >> 1);
      a[row][k] = F(static_cast<uint16_t>(p[l])), a[row][k + 1] = F(static_cast<uint16_t>(p[l] >> 16));
    }
  }
}

// D (16, 8), four registers.
inline void load_d(Warp& w, const Operand* o, float d[16][8]) {
  for (int n = 0; n < 4; n++) {
    const float* p = w.at<float>(o[n]);
    for (int l = 0; l < LANES; l++) d[l / 4 + 8 * (n >> 1)][2 * (l % 4) + (n & 1)] = p[l];
  }
}
inline void store_d(Warp& w, const Operand* o, const float d[16][8]) {
  for (int n = 0; n < 4; n++) {
    float* p = w.at<float>(o[n]);
    for (int l = 0; l < LANES; l++) p[l] = d[l / 4 + 8 * (n >> 1)][2 * (l % 4) + (n & 1)];
  }
}

// D += A B. Products of 16-bit numbers are exact in float32. The sum is rounded after each addition.
inline void multiply_add(const float a[16][16], const float b[16][8], float d[16][8]) {
  for (int r = 0; r < 16; r++)
    for (int k = 0; k < 16; k++)
      for (int c = 0; c < 8; c++) d[r][c] += a[r][k] * b[k][c];
}

}  // namespace executor
