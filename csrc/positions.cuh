// Device code with which the decode kernels look up slots of the cache, the keys and query rows of a block, and the cos
// and sin of a position.
#pragma once

#include "decode.h"

namespace flashrope {
namespace {

__device__ inline int clamp(int x, int low, int high) { return max(low, min(x, high)); }

// ---- the cache

struct Place {
  int page, row;  // without a block_table, page is the index of the sequence
};

// Returns the page and row of a slot < capacity of sequence b. The page is not checked.
__device__ Place place_of(const CacheLayout& layout, int b, int slot) {
  if (!layout.block_table) return {b, slot};
  const int page = layout.block_table[int64_t(b) * layout.max_pages + (slot >> layout.page_bits)];
  return {page, slot & ((1 << layout.page_bits) - 1)};
}

__device__ uint16_t* row_of(const TensorView& x, int page, int row, int head) {
  return static_cast<uint16_t*>(x.data) + (page * x.stride_batch + row * x.stride_row + head * x.stride_head);
}

// Returns the number of slots that sequence b uses before the new keys, clamped to the capacity.
__device__ inline int seqlen_of(const CacheLayout& layout, int b) {
  return clamp(layout.seqlens[b], 0, layout.capacity);
}

// ---- the work of one block of threads

// The keys of one sequence and one tile of its query rows. Row m is query m / group of head m % group among the query
// heads that share head_kv. Positions count from the sequence's first key.
struct Work {
  int b, head_kv, split, group;
  int first, keys;                    // slots first, ..., first + keys - 1
  int row0, rows;                     // the tile's first row; the number of all rows, seqlen_q * group
  int first_position, last_position;  // of the tile's rows
  int block, end_block;               // this split's first block of keys; the tile sees no key from end_block on

  __device__ int row(int m) const { return min(row0 + m, rows - 1); }
  __device__ int query(int m) const { return row(m) / group; }
  __device__ int head(int m) const { return head_kv * group + row(m) % group; }
};

template <int BLOCK>
__device__ Work find_work(const DecodeParams& p) {
  Work w;
  w.b = blockIdx.x / p.heads_kv, w.head_kv = blockIdx.x % p.heads_kv, w.split = blockIdx.y;
  w.group = p.heads_q / p.heads_kv;
  const int end = min(seqlen_of(p.layout, w.b) + p.layout.seqlen_new, p.layout.capacity);
  w.first = p.layout.leftpad ? clamp(p.layout.leftpad[w.b], 0, end) : 0;
  w.keys = end - w.first;
  w.row0 = blockIdx.z * TILE_ROWS, w.rows = p.seqlen_q * w.group;
  w.first_position = w.keys - p.seqlen_q + w.query(0);
  w.last_position = w.keys - p.seqlen_q + w.query(TILE_ROWS - 1);
  int nearest = UNBOUNDED, farthest = -UNBOUNDED;
  for (int band = 0; band < p.num_bands; ++band) {
    nearest = min(nearest, p.bands[4 * band]), farthest = max(farthest, p.bands[4 * band + 1]);
  }
  const int key0 = max(0, w.first_position - farthest + 1);  // the tile sees keys key0 to key1 - 1
  const int key1 = min(w.keys, w.last_position - nearest + 1);
  w.end_block = key1 > key0 ? (key1 + BLOCK - 1) / BLOCK : 0;
  const int block0 = key0 / BLOCK;
  w.block = block0 + (w.split + p.num_splits - block0 % p.num_splits) % p.num_splits;
  return w;
}

// ---- rotation

// The cos and sin of an angle.
struct CosSin {
  float cos, sin;
};

__device__ inline CosSin add_angles(CosSin a, CosSin b) {
  return {a.cos * b.cos - a.sin * b.sin, a.sin * b.cos + a.cos * b.sin};
}

__device__ inline const float* table_row(const DecodeParams& p, int rotation, int row) {
  return p.table + (int64_t(rotation) * p.table_rows + row) * 2 * p.table_pairs;
}

__device__ inline CosSin load_cos_sin(const DecodeParams& p, const float* row, int pair) {
  return {row[pair], row[p.table_pairs + pair]};
}

// Returns cos and sin of a pair at a position, combined from a coarse and a fine row of the table.
__device__ inline CosSin cos_sin_at(const DecodeParams& p, int rotation, int position, int pair) {
  return add_angles(load_cos_sin(p, table_row(p, rotation, FINE_ROWS + position / FINE_ROWS), pair),
                    load_cos_sin(p, table_row(p, rotation, position % FINE_ROWS), pair));
}

// Rotates the two channels (x, y) of a pair.
__device__ inline float2 rotate(float x, float y, CosSin t) {
  return make_float2(x * t.cos - y * t.sin, y * t.cos + x * t.sin);
}

// Returns what to add to all positions of the tile before they are looked up, so that no position is negative. Rows
// before the first key have negative positions. They see keys only if a band holds keys after the query. If all
// positions are shifted alike, no score changes.
__device__ inline int position_shift(const DecodeParams& p, const Work& w) {
  bool sees_ahead = false;
  for (int band = 0; band < p.num_bands; ++band) sees_ahead |= p.bands[4 * band] < 0;
  return sees_ahead ? max(0, p.seqlen_q - w.keys) : 0;
}

// Finds cos and sin of a slice's keys. A key's angle is the angle of the slice's first key plus the angle of the key's
// row within the slice.
struct KeyCosSin {
  const float* base;     // (2, D / 2) in shared memory: cos and sin of the slice's first key
  const float* fine[2];  // table rows of this lane's keys, lane / 4 and lane / 4 + 8
  int half, pairs;       // D / 2, table_pairs

  __device__ CosSin at(int key, int pair) const {
    return add_angles(CosSin{base[pair], base[half + pair]}, CosSin{fine[key][pair], fine[key][pairs + pair]});
  }

  // Finds cos and sin of an even pair and of the next one.
  __device__ void two_at(CosSin (&t)[2], int key, int pair) const {
    const float2 cos = load_two(base + pair), sin = load_two(base + half + pair);
    const float2 fine_cos = load_two(fine[key] + pair), fine_sin = load_two(fine[key] + pairs + pair);
    t[0] = add_angles(CosSin{cos.x, sin.x}, CosSin{fine_cos.x, fine_sin.x});
    t[1] = add_angles(CosSin{cos.y, sin.y}, CosSin{fine_cos.y, fine_sin.y});
  }

  static __device__ float2 load_two(const float* x) { return *reinterpret_cast<const float2*>(x); }
};

}  // namespace
}  // namespace flashrope
