// Where the decode kernels find things: slots of the cache, the keys and query rows of a block, angles of positions. Device code.
#pragma once

#include <ptx.h>  // csrc/ptx.h, or tests/emulator/ptx.h

#include "decode.h"

namespace flashrope {
namespace {

__device__ inline int clamp(int x, int low, int high) { return max(low, min(x, high)); }

// ---- where things lie -------------------------------------------------------------------------------------------------

struct Place {
  int page, row;
};

// Where slot of sequence b lies; pages outside the cache are left as they are. slot < capacity.
template <typename Params>
__device__ Place place_of(const Params& p, int b, int slot) {
  if (!p.block_table) return {b, slot};
  return {p.block_table[int64_t(b) * p.max_pages + (slot >> p.page_bits)], slot & ((1 << p.page_bits) - 1)};
}

__device__ int64_t offset_of(const Strides& strides, int page, int row, int head) {
  return page * strides.batch + row * strides.row + head * strides.head;
}

// The keys of one sequence and the query rows of one tile. Row m of all is row m / group of the queries, head m % group of those
// that share head_kv. Positions count from the sequence's first key.
struct Work {
  int b, head_kv, split, group;
  int first, keys;          // slots first, ..., first + keys - 1
  int row0, rows;           // of seqlen_q * group
  int low, high;            // positions of the tile's first and last row
  int block, blocks;        // this split's first block; blocks from `blocks` on hold no key for this tile

  __device__ int row(int m) const { return min(row0 + m, rows - 1); }
  __device__ int query(int m) const { return row(m) / group; }
  __device__ int head(int m) const { return head_kv * group + row(m) % group; }
};

template <int BLOCK>
__device__ Work find_work(const DecodeParams& p) {
  Work w;
  w.b = blockIdx.x / p.heads_kv, w.head_kv = blockIdx.x % p.heads_kv, w.split = blockIdx.y;
  w.group = p.heads_q / p.heads_kv;
  const int end = min(clamp(p.cache_seqlens[w.b], 0, p.capacity) + p.seqlen_new, p.capacity);
  w.first = p.cache_leftpad ? clamp(p.cache_leftpad[w.b], 0, end) : 0;
  w.keys = end - w.first;
  w.row0 = blockIdx.z * TILE_ROWS, w.rows = p.seqlen_q * w.group;
  w.low = w.keys - p.seqlen_q + w.query(0), w.high = w.keys - p.seqlen_q + w.query(TILE_ROWS - 1);
  int nearest = 1 << 30, farthest = -(1 << 30);
  for (int band = 0; band < p.num_bands; ++band) {
    nearest = min(nearest, p.bands[4 * band]), farthest = max(farthest, p.bands[4 * band + 1]);
  }
  const int key0 = max(0, w.low - farthest + 1), key1 = min(w.keys, w.high - nearest + 1);  // [key0, key1)
  w.blocks = key1 > key0 ? (key1 + BLOCK - 1) / BLOCK : 0;
  const int block0 = key0 / BLOCK;
  w.block = block0 + (w.split + p.num_splits - block0 % p.num_splits) % p.num_splits;
  return w;
}

// ---- angles -----------------------------------------------------------------------------------------------------------

struct Angle {
  float cos, sin;
};

__device__ inline Angle operator+(Angle a, Angle b) { return {a.cos * b.cos - a.sin * b.sin, a.sin * b.cos + a.cos * b.sin}; }

__device__ inline const float* table_row(const DecodeParams& p, int slot, int row) {
  return p.table + (int64_t(slot) * p.table_rows + row) * 2 * p.table_pairs;
}

__device__ inline Angle table_angle(const DecodeParams& p, const float* row, int pair) {
  return {row[pair], row[p.table_pairs + pair]};
}

__device__ inline Angle angle_at(const DecodeParams& p, int slot, int position, int pair) {
  return table_angle(p, table_row(p, slot, FINE_ROWS + position / FINE_ROWS), pair) +
         table_angle(p, table_row(p, slot, position % FINE_ROWS), pair);
}

// The two channels (x, y) of a pair, turned.
__device__ inline float2 turn(float x, float y, Angle t) { return make_float2(x * t.cos - y * t.sin, y * t.cos + x * t.sin); }

// Turning keeps distances, so both sides may count from another origin: rows before the first key, which only see keys ahead,
// then have positions in the table too. Causal rows keep their origin.
__device__ inline int origin(const DecodeParams& p, const Work& w) {
  bool ahead = false;
  for (int band = 0; band < p.num_bands; ++band) ahead |= p.bands[4 * band] < 0;
  return ahead ? max(0, p.seqlen_q - w.keys) : 0;
}

// Where a lane finds the angles of its keys: row r of the slice turns by base + fine row r.
struct KeyAngles {
  const float* base;     // (2, D / 2) in shared memory: cos and sin of the slice's first key
  const float* fine[2];  // table rows of the lane's keys lane / 4 and lane / 4 + 8
  int half, pairs;       // D / 2, table_pairs

  __device__ Angle at(int key, int pair) const {
    return Angle{base[pair], base[half + pair]} + Angle{fine[key][pair], fine[key][pairs + pair]};
  }

  // Of an even pair and the next.
  __device__ void two_at(Angle (&t)[2], int key, int pair) const {
    const float2 cos = two(base + pair), sin = two(base + half + pair);
    const float2 fine_cos = two(fine[key] + pair), fine_sin = two(fine[key] + pairs + pair);
    t[0] = Angle{cos.x, sin.x} + Angle{fine_cos.x, fine_sin.x};
    t[1] = Angle{cos.y, sin.y} + Angle{fine_cos.y, fine_sin.y};
  }

  static __device__ float2 two(const float* x) { return *reinterpret_cast<const float2*>(x); }
};

}  // namespace
}  // namespace flashrope
