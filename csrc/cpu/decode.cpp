// Computes attention_with_cache for a few queries per sequence, for every type of queries and cache.

#include "decode_call.h"

namespace flashrope {

template <typename T, typename Q = T>
int decode(const DecodeCall& call) {
  const bool plain = call.head_dim_v == call.head_dim && !call.first_channel && !call.key_weight;
  switch (plain ? call.head_dim : 0) {
    case 64: return decode_chunks<Chunk<T, Q, 64>>(call);
    case 128: return decode_chunks<Chunk<T, Q, 128>>(call);
    default: return decode_chunks<Chunk<T, Q, 0>>(call);
  }
}

}  // namespace flashrope

extern "C" int flashrope_decode(const flashrope::DecodeCall* call) {
  switch (call->dtype) {
    case 0: return flashrope::decode<float>(*call);
    case 1: return flashrope::decode<flashrope::Float16>(*call);
    case 2: return flashrope::decode<flashrope::BFloat16>(*call);
    case 3: return flashrope::decode<flashrope::Int8, float>(*call);
    default: return flashrope::decode<flashrope::Int4, float>(*call);
  }
}
