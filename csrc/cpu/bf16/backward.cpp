// Computes the gradients of attention in bfloat16. One thread takes a key head and all queries that read it, as in
// ../backward.cpp, so no additions need to be atomic, and results are bitwise reproducible.
//
// Scores are computed transposed, keys by queries, so that every lane of a vector belongs to one query. Weights and the
// gradients of scores are rounded and stored in the layouts of the three products that sum over queries or keys.
// Gradients are summed in float32.

#include "products.h"

#include "../backward.h"

namespace flashrope {
namespace {

constexpr int BLOCK_M = 64, STRIPS = BLOCK_M / STRIP;  // query rows of a tile
constexpr int NOT_FINITE = 2;

struct KeyHead {
  const BackwardCall& backward;
  const ForwardCall& call;
  const int64_t b, head_kv, group, shift;
  const int head_dim, head_dim_v, width, width_v;  // widths: rounded up to STRIP
  const int pairs, pairs_v;                        // number of channel pairs
  const int64_t rows, keys;                        // rounded up to whole tiles
  const float factor;                              // a score times factor is an exponent of 2
  // The layouts of a tile. A word of q, grad_out, k and v holds two adjacent channels of a row. q and grad_out are in
  // strips (STRIPS, pairs, STRIP), k and v in panels. A word of q_rows, grad_out_rows and k_rows holds one channel of
  // two adjacent rows. They are in strips of channels (width / STRIP, BLOCK_M / 2 or BLOCK_N / 2, STRIP).
  Words q, grad_out, k, v, q_rows, grad_out_rows, k_rows;
  Floats grad_v, grad_k, grad_rotated_k, grad_q, grad_rotated_q;  // (keys or rows, width)
  Floats lse, delta;                                              // (rows,); lse is to the base 2
  Words seen_first, seen_end;                                     // (rows,), the keys that a row sees in a band
  // The results of a tile. weights and grad_scores are (BLOCK_N, BLOCK_M / 2), with a word per pair of queries.
  // grad_scores_of_keys is (STRIPS, BLOCK_N / 2, STRIP), with a word per pair of keys.
  alignas(64) int32_t weights[BLOCK_N * BLOCK_M / 2], grad_scores[BLOCK_N * BLOCK_M / 2];
  alignas(64) int32_t grad_scores_of_keys[BLOCK_N / 2 * BLOCK_M];

  KeyHead(const BackwardCall& backward, int64_t head)
      : backward(backward), call(backward.forward), b(head / call.heads_kv), head_kv(head % call.heads_kv),
        group(call.heads_q / call.heads_kv), shift(call.shift), head_dim(int(call.head_dim)),
        head_dim_v(int(call.head_dim_v)), width(int(padded(head_dim, STRIP))),
        width_v(int(padded(head_dim_v, STRIP))), pairs(int(padded((head_dim + 1) / 2, PAIR_STEP))),
        pairs_v(int(padded((head_dim_v + 1) / 2, PAIR_STEP))),
        rows(padded(call.seqlen_q, BLOCK_M)), keys(padded(call.seqlen_k, BLOCK_N)),
        factor(score_factor(call)), q(words(rows * pairs)),
        grad_out(words(rows * pairs_v)), k(words(keys * pairs)), v(words(keys * pairs_v)),
        q_rows(words(rows / 2 * width)), grad_out_rows(words(rows / 2 * width_v)), k_rows(words(keys / 2 * width)),
        grad_v(floats(keys * width_v)), grad_k(floats(keys * width)), grad_rotated_k(floats(keys * width)),
        grad_q(floats(rows * width)), grad_rotated_q(floats(rows * width)), lse(floats(rows)), delta(floats(rows)),
        seen_first(words(rows)), seen_end(words(rows)) {}

  bool allocated() const {
    for (const Floats* x : {&grad_v, &grad_k, &grad_rotated_k, &grad_q, &grad_rotated_q, &lse, &delta})
      if (!*x) return false;
    for (const Words* x : {&q, &grad_out, &k, &v, &q_rows, &grad_out_rows, &k_rows, &seen_first, &seen_end})
      if (!*x) return false;
    return true;
  }

  // Writes all gradients and returns 0. If a row is not finite, stops and returns NOT_FINITE. Some gradients are then
  // not written.
  int run() {
    const ProductsOfThread products;
    std::fill_n(grad_v.get(), keys * width_v, 0.0f);
    std::fill_n(grad_k.get(), keys * width, 0.0f);
    for (int64_t tile = 0; tile < keys; tile += BLOCK_N)
      pack<BLOCK_N>(
          call.seqlen_k - tile, head_dim_v, [&](int t, float* x) {
            convert(call.v.row<const BFloat16>(b, tile + t, head_kv), x, head_dim_v);
          },
          [&](const RoundedRows& rounded, int t) {
            rounded.write_panels(pairs_v, v.get() + (tile + t) * pairs_v);
          });
    for (int64_t head = head_kv * group; head < (head_kv + 1) * group; ++head) {
      if (!load_head(head)) return NOT_FINITE;
      for (int n = 0; n < call.num_bands; ++n) add_band(call.bands[n], head);
      for (int64_t row = 0; row < call.seqlen_q; ++row)
        write(backward.grad_q.row<BFloat16>(b, row, head), grad_q.get() + row * width, head_dim, float(call.scale));
    }
    for (int64_t key = 0; key < call.seqlen_k; ++key) {
      write(backward.grad_k.row<BFloat16>(b, key, head_kv), grad_k.get() + key * width, head_dim, float(call.scale));
      write(backward.grad_v.row<BFloat16>(b, key, head_kv), grad_v.get() + key * width_v, head_dim_v, 1);
    }
    return 0;
  }

  static void write(BFloat16* to, const float* from, int channels, float factor) {
    for (int c = 0; c < channels; ++c) from_float(from[c] * factor, to + c);
  }

  // Rounds the rows of a tile, STRIP rows at a time: fill(r, x) writes row r to x, and write(rounded, first) stores the
  // STRIP rows that start at row `first`.
  template <int ROWS, typename Fill, typename Write>
  static void pack(int64_t count, int channels, const Fill& fill, const Write& write) {
    alignas(64) float row[MAX_HEAD_DIM];
    RoundedRows rounded;
    for (int first = 0; first < ROWS; first += STRIP) {
      for (int r = 0; r < STRIP; ++r) {
        if (first + r < count) {
          fill(first + r, row);
          rounded.set(r, row, channels);
        } else {
          rounded.clear(r);
        }
      }
      write(rounded, first);
    }
  }

  // Loads grad_out and lse of a head, and computes delta. Returns whether all rows of the head are finite.
  bool load_head(int64_t head) {
    bool all = true;
    std::fill_n(lse.get(), rows, INF);  // rows that see no key keep INF, so their weights are 0
    std::fill_n(delta.get(), rows, 0.0f);
    for (int64_t row = 0; row < call.seqlen_q; ++row) {
      const RowOfBackward loaded = load_row<BFloat16>(backward, b, row, head);
      if (loaded.lse != -INF) lse[row] = loaded.lse * LOG2_E;
      delta[row] = loaded.delta;
      all &= loaded.finite;
    }
    std::fill_n(grad_q.get(), rows * width, 0.0f);
    for (int64_t tile = 0; tile < rows; tile += BLOCK_M)
      pack<BLOCK_M>(
          call.seqlen_q - tile, head_dim_v, [&](int r, float* x) {
            convert(backward.grad_out.row<const BFloat16>(b, tile + r, head), x, head_dim_v);
          },
          [&](const RoundedRows& rounded, int r) {
            rounded.write_strip(pairs_v, grad_out.get() + (tile + r) * pairs_v);
            write_row_pairs<BLOCK_M>(rounded, grad_out_rows.get() + tile / 2 * width_v, head_dim_v, r);
          });
    return all;
  }

  // Stores rounded rows in a tile of ROWS rows, starting at row `first`.
  template <int ROWS>
  static void write_row_pairs(const RoundedRows& rounded, int32_t* tile, int channels, int first) {
    rounded.write_row_pairs(channels, tile + first / 2 * STRIP, ROWS / 2 * STRIP);
  }

  void add_band(const ForwardBand& band, int64_t head) {
    const Table& k_table = call.k_copies[band.k_copy];
    for (int64_t tile = 0; tile < rows; tile += BLOCK_M)
      pack<BLOCK_M>(
          call.seqlen_q - tile, head_dim, [&](int r, float* x) {
            rotate_row(call.q.row<const BFloat16>(b, tile + r, head), x, band.q, b, tile + r, call);
          },
          [&](const RoundedRows& rounded, int r) {
            rounded.write_strip(pairs, q.get() + (tile + r) * pairs);
            write_row_pairs<BLOCK_M>(rounded, q_rows.get() + tile / 2 * width, head_dim, r);
          });
    for (int64_t tile = 0; tile < keys; tile += BLOCK_N)
      pack<BLOCK_N>(
          call.seqlen_k - tile, head_dim, [&](int t, float* x) {
            rotate_row(call.k.row<const BFloat16>(b, tile + t, head_kv), x, k_table, b, tile + t, call);
          },
          [&](const RoundedRows& rounded, int t) {
            rounded.write_panels(pairs, k.get() + (tile + t) * pairs);
            write_row_pairs<BLOCK_N>(rounded, k_rows.get() + tile / 2 * width, head_dim, t);
          });
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t first = row < call.seqlen_q ? std::min(band.band.first_key(shift + row), call.seqlen_k) : 0;
      seen_first[row] = int(first);
      seen_end[row] = row < call.seqlen_q ? int(std::max(band.band.end_key(shift + row, call.seqlen_k), first)) : 0;
    }
    std::fill_n(grad_rotated_q.get(), rows * width, 0.0f);
    std::fill_n(grad_rotated_k.get(), keys * width, 0.0f);
    for_tiles_of_band(call, band.band, BLOCK_M, [&](int64_t key, int64_t row) { add_tile(key, row); });
    add_unrotated(grad_rotated_q.get(), grad_q.get(), call.seqlen_q, width, band.q, b, call);
    add_unrotated(grad_rotated_k.get(), grad_k.get(), call.seqlen_k, width, k_table, b, call);
  }

  void add_tile(int64_t key, int64_t row) {
    bool masked = false;
    for (int64_t r = row; r < std::min<int64_t>(row + BLOCK_M, call.seqlen_q); ++r)
      masked |= seen_first[r] > key || seen_end[r] < key + BLOCK_N;
    for (int s = 0; s < STRIPS; ++s)
      for (int t = 0; t < BLOCK_N; t += PANEL)
        masked ? add_scores<true>(key, row, s, t) : add_scores<false>(key, row, s, t);
    add_of_keys(weights, grad_out_rows.get() + row / 2 * width_v, width_v, grad_v.get() + key * width_v);
    add_of_keys(grad_scores, q_rows.get() + row / 2 * width, width, grad_rotated_k.get() + key * width);
    for (int r = 0; r < BLOCK_M; r += PANEL) {
      const StripRows<BLOCK_N / 2> a(grad_scores_of_keys + r / STRIP * (BLOCK_N / 2 * STRIP) + r % STRIP);
      for (int c = 0; c < width; c += STRIP)
        add_product(a, k_rows.get() + key / 2 * width + c * (BLOCK_N / 2), BLOCK_N / 2,
                    grad_rotated_q.get() + (row + r) * width + c, width);
    }
  }

  // Adds a product that sums over the tile's queries to the gradients of its keys or values. of_keys: weights or
  // grad_scores, (BLOCK_N, BLOCK_M / 2) words. of_rows: grad_out_rows or q_rows of the tile.
  static void add_of_keys(const int32_t* of_keys, const int32_t* of_rows, int width, float* to) {
    for (int t = 0; t < BLOCK_N; t += PANEL)
      for (int c = 0; c < width; c += STRIP)
        add_product(stored_rows<BLOCK_M / 2>(of_keys + t * (BLOCK_M / 2)), of_rows + c * (BLOCK_M / 2), BLOCK_M / 2,
                    to + t * width + c, width);
  }

  // Computes the weights and the gradients of the scores for a panel of keys and a strip of queries.
  template <bool MASKED>
  void add_scores(int64_t key, int64_t row, int s, int t) {
    Vec tile[PANEL][STRIP_VECTORS], grads[PANEL][STRIP_VECTORS];
    const int64_t first_row = row + s * STRIP;
    set_product(packed_rows(k.get() + (key + t) * pairs, pairs), q.get() + first_row * pairs, pairs, tile);
    for (int h = 0; h < STRIP_VECTORS; ++h) {
      const Vec row_lse = load(lse.get() + first_row + h * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < PANEL; ++r) tile[r][h] = exp2(tile[r][h] * factor - row_lse);
      if (MASKED) mask(tile, key + t, first_row, h);
    }
    for (int r = 0; r < PANEL; ++r)
      store(weights + (t + r) * (BLOCK_M / 2) + s * LANES, rounded(tile[r][0], tile[r][1]));
    set_product(packed_rows(v.get() + (key + t) * pairs_v, pairs_v), grad_out.get() + first_row * pairs_v, pairs_v,
                grads);
    for (int h = 0; h < STRIP_VECTORS; ++h) {
      const Vec row_delta = load(delta.get() + first_row + h * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < PANEL; ++r) grads[r][h] = tile[r][h] * (grads[r][h] - row_delta);
      if (MASKED) mask(grads, key + t, first_row, h);  // grads may be NaN where the weight is masked
    }
#pragma GCC unroll 8
    for (int r = 0; r < PANEL; ++r) {
      store(grad_scores + (t + r) * (BLOCK_M / 2) + s * LANES, rounded(grads[r][0], grads[r][1]));
      if (r % 2 == 0)
        for (int h = 0; h < STRIP_VECTORS; ++h)
          store(grad_scores_of_keys + (s * BLOCK_N / 2 + (t + r) / 2) * STRIP + h * LANES,
                rounded_pairs(grads[r][h], grads[r + 1][h]));
    }
  }

  void mask(Vec (&tile)[PANEL][STRIP_VECTORS], int64_t key, int64_t row, int h) const {
    const IntVec first = load(seen_first.get() + row + h * LANES) - int(key);
    const IntVec end = load(seen_end.get() + row + h * LANES) - int(key);
    for (int r = 0; r < PANEL; ++r) {
      const IntVec n = IntVec{} + r;
      tile[r][h] = (n >= first) & (n < end) ? tile[r][h] : Vec{};
    }
  }
};

int backward(const BackwardCall& call) {
  std::atomic<int> status{0};
  parallel(call.forward.parallel_for, call.forward.threads, call.forward.batch * call.forward.heads_kv,
           [&](int64_t head) {
             if (status.load() != 0) return;
             KeyHead work(call, head);
             if (const int found = work.allocated() ? work.run() : 1) status = found;
           });
  return status;
}

}  // namespace
}  // namespace flashrope

extern "C" int flashrope_backward_bf16(const flashrope::BackwardCall* call) { return flashrope::backward(*call); }
