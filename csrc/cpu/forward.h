// Code that the forwards in float32 and bfloat16 share: the layout of packed keys and values, and the order of tiles.

#pragma once

#include "tiles.h"

namespace flashrope {

// Holds the keys, once per distinct rotation, and the values, packed in blocks of BLOCK_N keys. Buffer: Floats, or
// Words of two bfloat16 numbers.
template <typename Buffer>
struct PackedBlocks {
  int64_t heads, blocks, k_block_size, v_block_size;  // heads: batch * heads_kv; sizes are in elements of Buffer
  Buffer k, v;  // k: (copy, batch, head, block, k_block_size); v: (batch, head, block, v_block_size)

  PackedBlocks(const ForwardCall& call, int64_t k_block_size, int64_t v_block_size, Buffer (*allocate)(int64_t))
      : heads(call.batch * call.heads_kv),
        blocks((call.seqlen_k + BLOCK_N - 1) / BLOCK_N),
        k_block_size(k_block_size),
        v_block_size(v_block_size),
        k(allocate(call.num_copies * heads * blocks * k_block_size)),
        v(allocate(heads * blocks * v_block_size)) {}

  bool allocated() const { return k && v; }

  // head: batch index * heads_kv + head
  auto* k_block(int64_t copy, int64_t head, int64_t block) const {
    return k.get() + ((copy * heads + head) * blocks + block) * k_block_size;
  }
  auto* v_block(int64_t head, int64_t block) const { return v.get() + (head * blocks + block) * v_block_size; }

  // Calls pack(head, block) for all blocks of all heads, in parallel.
  template <typename Pack>
  void pack_all(const ForwardCall& call, const Pack& pack) const {
    parallel(call.parallel_for, call.threads, heads * blocks, [&](int64_t n) { pack(n / blocks, n % blocks); });
  }
};

// A tile has at most MAX_BLOCK_M query rows, and at most TILE_SIZE numbers. The more rows a tile has, the fewer times
// keys are read from memory.
constexpr int MAX_BLOCK_M = 128, TILE_SIZE = MAX_BLOCK_M * 256;

// Returns the number of query rows of a tile with `width` channels. It is a multiple of step, or MAX_BLOCK_M.
inline int tile_rows(int64_t width, int step) {
  return int(std::min<int64_t>(MAX_BLOCK_M, TILE_SIZE / width / step * step));
}

// Calls run(batch index, head, first row) for all tiles of `rows` queries, in parallel. The last tiles start first,
// because they take longest under a causal mask.
template <typename Run>
void for_query_tiles(const ForwardCall& call, int64_t rows, const Run& run) {
  const int64_t heads_q = call.batch * call.heads_q, tiles = (call.seqlen_q + rows - 1) / rows;
  parallel(call.parallel_for, call.threads, heads_q * tiles, [&](int64_t n) {
    const int64_t head = n % heads_q, tile = tiles - 1 - n / heads_q;
    run(head / call.heads_q, head % call.heads_q, tile * rows);
  });
}

}  // namespace flashrope
