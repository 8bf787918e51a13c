// Decoding over a cache of raw keys: what the kernels are given. Strides and counts of elements unless bytes are said.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashrope {

constexpr int TILE_ROWS = 16;    // query rows of one tile: (row, head of the group) pairs that share a key head
constexpr int SLICE = 16;        // keys that one warp multiplies at a time
constexpr int FINE_ROWS = 1024;  // rows of the fine table, as in flashrope/angles.py
constexpr int MAX_SEQLEN_Q = 64;
constexpr int MAX_SPLITS = 256;

struct Strides {  // of (batch or pages, slots, heads, head_dim); head_dim is contiguous
  int64_t batch, row, head;
};

struct DecodeParams {
  const void* q;             // (batch, seqlen_q, heads_q, head_dim)
  const void* k_cache;       // (batch, capacity, heads_kv, head_dim), or (pages, page_size, heads_kv, head_dim)
  const void* v_cache;       // like k_cache
  void* out;                 // (batch, seqlen_q, heads_q, head_dim), contiguous
  float* lse;                // (batch, heads_q, seqlen_q), natural log
  float* partial_out;        // (num_splits, batch, seqlen_q, heads_q, head_dim)
  float* partial_lse;        // (num_splits, batch, seqlen_q, heads_q), base 2
  const int* cache_seqlens;  // (batch,)
  const int* cache_leftpad;  // (batch,) or null
  const int* block_table;    // (batch, max_pages) or null
  const int* bands;          // (num_bands, 4): distances start <= d < stop, the table's slot for queries, for keys (0: no turn)
  const float* table;        // (slots, table_rows, 2, table_pairs): cos and sin of flashrope.angles.two_level_table
  Strides q_strides, k_strides, v_strides;
  int batch, seqlen_q, heads_q, heads_kv, head_dim;
  int capacity;              // slots of a sequence
  int seqlen_new;            // keys behind cache_seqlens that are already in the cache
  int pages, page_bits, max_pages;  // page_size is 1 << page_bits
  int num_bands, table_rows, table_pairs;
  int rotary_dim;            // leading channels that are paired
  int turning_pairs;         // pairs from here on have frequency 0
  int num_splits;
  float score_scale;         // softmax_scale * temperature
  float log_n_factor, log_n_floor;  // the score at position i is scaled by max(floor, factor * ln(i + 1))
  bool bfloat16, interleaved;
};

struct AppendParams {
  const void* k;             // (batch, seqlen_new, heads_kv, head_dim)
  const void* v;             // like k
  void* k_cache;             // as in DecodeParams
  void* v_cache;
  const int* cache_seqlens;  // (batch,)
  const int* block_table;    // (batch, max_pages) or null
  Strides k_strides, v_strides, k_cache_strides, v_cache_strides;
  int batch, seqlen_new, heads_kv, head_dim;
  int capacity, pages, page_bits, max_pages;
};

// A block of 4 warps at head_dim 256 would not fit the 99 KB of sm_86 and sm_89.
constexpr int warps_for(int head_dim) { return head_dim > 128 ? 2 : 4; }
constexpr int stages_for(int head_dim) { return head_dim > 64 ? 2 : 3; }
// Blocks that shared memory lets stand on one multiprocessor anyway; to save registers for more would not pay.
constexpr int blocks_for(int head_dim) { return head_dim > 96 ? 2 : 3; }
// Rows in shared memory are 16 bytes longer than their channels, so that eight of them lie in different banks.
constexpr int pitch_for(int head_dim) { return head_dim + 8; }

// Bytes of shared memory of the split kernel: slices of K and V, the turned queries, one base angle per warp and pair.
constexpr size_t shared_bytes(int head_dim, int num_bands) {
  size_t slices = size_t(warps_for(head_dim)) * stages_for(head_dim) * 2 * SLICE * pitch_for(head_dim) * 2;
  size_t queries = size_t(num_bands) * TILE_ROWS * pitch_for(head_dim) * 2;
  return slices + queries + size_t(warps_for(head_dim)) * head_dim * 4;
}

// Both return null, or what CUDA says. stream is a cudaStream_t.
const char* launch_decode(const DecodeParams& params, void* stream);
const char* launch_append(const AppendParams& params, void* stream);

}  // namespace flashrope
