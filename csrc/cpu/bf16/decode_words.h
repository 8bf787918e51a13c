// Operands of decoding in bfloat16, for the query rows of one key head. decode_amx.h and decode_vdpbf16.h multiply
// them.

#pragma once

#include "../decode_tiles.h"
#include "products.h"

namespace flashrope {

constexpr int MAX_WORDS = MAX_HEAD_DIM / 2;  // of a row

// Stores `channels` values from channel c on, of BLOCK keys, as a strip (BLOCK / 2, STRIP). Calls prefetch(t) for every
// key t.
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

}  // namespace flashrope
