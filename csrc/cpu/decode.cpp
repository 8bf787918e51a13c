// Computes attention_with_cache for a few queries per sequence, for every type of queries and cache.

#include "decode_call.h"

using flashrope::Chunk, flashrope::decode_chunks;

extern "C" int flashrope_decode(const flashrope::DecodeCall* call) {
  switch (call->dtype) {
    case 0: return decode_chunks<Chunk<float, float>>(*call);
    case 1: return decode_chunks<Chunk<flashrope::Float16, flashrope::Float16>>(*call);
    case 2: return decode_chunks<Chunk<flashrope::BFloat16, flashrope::BFloat16>>(*call);
    default: return decode_chunks<Chunk<flashrope::Int8, float>>(*call);
  }
}
