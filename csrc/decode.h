// Defines the parameters of the kernels that decode over a cache of raw keys. Strides and counts are in elements unless
// a comment says bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashrope {

constexpr int TILE_ROWS = 16;    // query rows of one tile: (row, query head) pairs that share a key head
constexpr int SLICE = 16;        // keys that one warp multiplies at a time
constexpr int FINE_ROWS = 1024;  // the same as in flashrope/schemes/cos_sin.py
constexpr int MAX_SEQLEN_Q = 64;  // as in flashrope/backends/cuda.py, which also has TILE_ROWS
constexpr int MAX_SPLITS = 256;  // the same as in flashrope/calls/records.py
constexpr int UNBOUNDED = 1 << 30;  // a distance that no band reaches, as in flashrope/schemes/lowered.py

// A tensor (batch or pages, tokens or slots, heads, head_dim) of two-byte elements; head_dim is contiguous.
struct TensorView {
  void* data;
  int64_t stride_batch, stride_row, stride_head;
};

// Where the sequences are stored in a cache. Corresponds to CacheTables of flashrope/calls/cache_tables.py and
// CacheLayout of triton_kernels/arguments.py.
//
// Sequence b holds the slots from leftpad[b] up to seqlens[b] + seqlen_new. Slot s is row s of the cache, or row s %
// page_size of page block_table[b, s / page_size]. Positions count from leftpad.
struct CacheLayout {
  const int* seqlens;      // (batch,), without the seqlen_new keys that this call adds
  const int* leftpad;      // (batch,) or null
  const int* block_table;  // (batch, max_pages) or null
  int batch;
  int capacity;            // the largest number of slots of a sequence
  int seqlen_new;
  int pages;               // number of pages of the cache; without a block_table, the batch size
  int page_bits;           // page_size is 1 << page_bits
  int max_pages;
};

struct DecodeParams {
  TensorView q;              // (batch, seqlen_q, heads_q, head_dim)
  TensorView k_cache;        // (batch, capacity, heads_kv, head_dim), or (pages, page_size, heads_kv, head_dim)
  TensorView v_cache;        // like k_cache
  CacheLayout layout;        // the seqlen_new keys are already in the cache
  void* out;                 // (batch, seqlen_q, heads_q, head_dim), contiguous
  float* lse;                // (batch, heads_q, seqlen_q), natural log
  float* partial_out;        // (num_splits, batch, seqlen_q, heads_q, head_dim)
  float* partial_lse;        // (num_splits, batch, seqlen_q, heads_q), base 2
  const int* bands;          // (num_bands, 4): start, stop, q_rotation, k_rotation; rotation 0 is the identity
  const float* table;        // (rotations, table_rows, 2, table_pairs): two_level_table of schemes/cos_sin.py
  int head_dim, seqlen_q, heads_q, heads_kv;
  int num_bands, table_rows, table_pairs;
  int rotary_dim;            // leading channels that are paired
  int rotated_pairs;         // pairs up to the last one with a nonzero frequency
  int num_splits;
  float score_scale;         // softmax_scale * temperature
  float log_n_factor, log_n_floor;  // the query at position i is scaled by max(floor, factor * ln(i + 1))
  float length_scale;               // for n keys also by max(1, 0.1 * ln(n / length_scale) + 1); 0: not scaled
  bool bfloat16, interleaved;
};

struct AppendParams {
  TensorView k;        // (batch, seqlen_new, heads_kv, head_dim)
  TensorView v;        // like k
  TensorView k_cache;  // as in DecodeParams
  TensorView v_cache;
  CacheLayout layout;  // leftpad is not used
  int heads_kv, head_dim;
};

// A block of 4 warps at head_dim 256 would not fit into the 99 KB of sm_86 and sm_89.
constexpr int warps_for(int head_dim) { return head_dim > 128 ? 2 : 4; }
constexpr int stages_for(int head_dim) { return head_dim > 64 ? 2 : 3; }
// Returns how many blocks fit into a multiprocessor's shared memory. With fewer registers per thread no more blocks
// would fit.
constexpr int blocks_for(int head_dim) { return head_dim > 96 ? 2 : 3; }
// A row in shared memory is 16 bytes longer than its channels, which puts eight consecutive rows into different banks.
constexpr int pitch_for(int head_dim) { return head_dim + 8; }

// Returns the bytes of shared memory of the split kernel. It holds slices of K and V, the rotated queries, and for
// every warp cos and sin of the first key of its slice.
constexpr size_t shared_bytes(int head_dim, int num_bands) {
  size_t slices = size_t(warps_for(head_dim)) * stages_for(head_dim) * 2 * SLICE * pitch_for(head_dim) * 2;
  size_t queries = size_t(num_bands) * TILE_ROWS * pitch_for(head_dim) * 2;
  return slices + queries + size_t(warps_for(head_dim)) * head_dim * 4;
}

// The launchers return null, or CUDA's error message. stream is a cudaStream_t.
const char* launch_decode(const DecodeParams& params, void* stream);
const char* launch_append(const AppendParams& params, void* stream);

}  // namespace flashrope
