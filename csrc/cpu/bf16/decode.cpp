// Computes attention_with_cache in bfloat16 for one query per sequence and several query heads per key head. Rotated
// queries and keys, and the weights of the softmax, are rounded to bfloat16, and sums are float32.

#include "../decode_call.h"
#ifdef __AMX_BF16__
#include "decode_amx.h"
#else
#include "decode_vdpbf16.h"
#endif

namespace flashrope {
namespace {

// A chunk of keys. All rows belong to the same query token, so they see the same keys.
struct RoundedChunk : Chunk<BFloat16, BFloat16> {
  using Chunk::Chunk;

  RoundedQueries queries[MAX_BANDS];
  alignas(64) BFloat16 rounded_keys[LANES * MAX_WORDS * 2];
  alignas(64) int32_t weights[MAX_ROWS * BLOCK / 2] = {};  // words of two neighboring keys
  alignas(64) int32_t strip[BLOCK / 2 * STRIP];            // values: a word per pair of keys and channel
  const BFloat16 zeros[MAX_HEAD_DIM] = {};
  const ProductsOfThread products;
  const int words_per_row = int(padded(head_dim(), STRIP)) / 2;

  void rotate_queries(int b, int64_t key) {
    Chunk::rotate_queries(b, key);
    queries[b].set(rotated_q[b], rows, padded_dim(), words_per_row);
  }

  void add_scores(int b, int64_t key) {
    const bool keys_rotate = call.bands[b].fine != nullptr;
    if (keys_rotate) rotate_queries(b, call.bands[b].mapped(key));
    const KeyAngles angles = key_angles(b, key);
    const Span span = spans[b][0];
    for (int begin = span.first / LANES * LANES; begin < span.end; begin += LANES) {
      const BFloat16* keys[LANES];
      for (int t = 0; t < LANES; ++t) {
        keys[t] = block->k.row[begin + t];
        if (keys_rotate || head_dim() % STRIP)
          keys[t] = rounded_key(t, keys[t], keys_rotate ? angles(begin + t) : nullptr);
      }
      Vec sums[MAX_ROWS];
      multiply_keys(queries[b], rows, keys, words_per_row, ahead_of_key(0, begin), sums);
      for (int r = 0; r < rows; ++r) store_sums(b, r, begin, sums[r]);
    }
  }

  // Returns key t of a group, padded with zeros, and rotated if cos is not nullptr.
  const BFloat16* rounded_key(int t, const BFloat16* x, const float* cos) {
    alignas(64) float rotated[MAX_WORDS * 2];
    BFloat16* to = rounded_keys + t * MAX_WORDS * 2;
    if (cos)
      rotate_key(x, rotated, cos);
    else
      convert_padded(x, rotated, head_dim());
    round_row(rotated, padded_dim(), reinterpret_cast<int32_t*>(to));
    return to;
  }

  void add_values(SoftmaxState& state, int keys) {
    for (int r = 0; r < rows; ++r) {
      softmax_row(state, r);
      round_row(scores[r], BLOCK, weights + r * BLOCK / 2);
    }
    const BFloat16* values[BLOCK];
    for (int t = 0; t < BLOCK; ++t) values[t] = t < keys && is_seen(t) ? block->v.row[t] : zeros;
    const Ahead<BFloat16> ahead = ahead_of_value(0);
    for (int c = 0; c < head_dim_v(); c += STRIP) {
      const int channels = std::min(head_dim_v() - c, STRIP), vectors = (channels + LANES - 1) / LANES;
      pack_strip(values, c, channels, [&](int t) { ahead(c, t, t + 1); }, strip);
      add_strip(weights, rows, strip, vectors, state.acc + c, padded_dim_v());
    }
  }

  // Values of keys that no band sees are not read, because they may be NaN.
  bool is_seen(int t) const {
    for (int b = 0; b < call.num_bands; ++b)
      if (spans[b][0].first <= t && t < spans[b][0].end) return true;
    return false;
  }
};

}  // namespace
}  // namespace flashrope

extern "C" int flashrope_decode_bf16(const flashrope::DecodeCall* call) {
  return flashrope::decode_chunks<flashrope::RoundedChunk>(*call);
}
