// Computes attention in bfloat16, by tiles of query rows and blocks of keys, with one online softmax over all bands.
//
// First all keys are rotated, rounded and packed into panels, once per distinct rotation, and the values of two
// adjacent keys are packed into words. Then every tile of queries visits the blocks of each band. Scores are computed
// transposed, keys by queries, so that every lane of a vector belongs to one query. So maxima and sums need no exchange
// between lanes, and weights are already in the layout that the product with values needs.

#include "products.h"

#include "../forward.h"

namespace flashrope {
namespace {

constexpr int MAX_STRIPS = MAX_BLOCK_M / STRIP;

constexpr int KEY_STEP = std::max(PANEL, 2 * PAIR_STEP);  // a strip of queries visits a multiple of KEY_STEP keys

// A block of k has panels of keys, with a word per pair of channels. A block of v has panels of channels, with a word
// per pair of keys.
struct Workspace : PackedBlocks<Words> {
  int64_t pairs, padded_dim_v;
  int block_m;  // query rows of a tile

  explicit Workspace(const ForwardCall& call)
      : Workspace(call, padded((call.head_dim + 1) / 2, PAIR_STEP), padded(call.head_dim_v, std::max(LANES, PANEL))) {}
  Workspace(const ForwardCall& call, int64_t pairs, int64_t padded_dim_v)
      : PackedBlocks(call, pairs * BLOCK_N, padded_dim_v * BLOCK_N / 2, words),
        pairs(pairs), padded_dim_v(padded_dim_v),
        block_m(tile_rows(std::max(2 * pairs, padded_dim_v), STRIP)) {}
};

template <typename T>
void pack_keys(const ForwardCall& call, const Workspace& workspace, int64_t copy, int64_t head, int64_t block) {
  const int64_t b = head / call.heads_kv, first = block * BLOCK_N;
  const int keys = int(std::min<int64_t>(BLOCK_N, call.seqlen_k - first)), pairs = int(workspace.pairs);
  int32_t* k = workspace.k_block(copy, head, block);
  alignas(64) float row[MAX_HEAD_DIM];
  RoundedRows rows;
  for (int t = 0; t < BLOCK_N; t += STRIP) {
    for (int r = 0; r < STRIP; ++r) {
      const int64_t key = first + t + r;
      if (t + r >= keys) {
        rows.clear(r);
        continue;
      }
      rotate_key(call.k.row<const T>(b, key, head % call.heads_kv), row, call.k_copies[copy], b, key, call);
      if constexpr (IS_CODE<T>) {
        const float scale = *call.k_scale.row<const float>(b, key, head % call.heads_kv);
        for (int c = 0; c < call.head_dim; ++c) row[c] *= scale;
      }
      rows.set(r, row, int(call.head_dim));
    }
    rows.write_panels(pairs, k + t * pairs);
  }
}

// Quantized values are small integers, which bfloat16 represents exactly. Their scales are applied to the weights.
template <typename T>
void pack_values(const ForwardCall& call, const Workspace& workspace, int64_t head, int64_t block) {
  const int64_t b = head / call.heads_kv, first = block * BLOCK_N;
  const int keys = int(std::min<int64_t>(BLOCK_N, call.seqlen_k - first)), padded_dim = int(workspace.padded_dim_v);
  alignas(64) float row[MAX_HEAD_DIM];
  RoundedRows rows;
  for (int t = 0; t < BLOCK_N; t += STRIP) {
    for (int r = 0; r < STRIP; ++r) {
      if (t + r >= keys) {
        rows.clear(r);
        continue;
      }
      convert(call.v.row<const T>(b, first + t + r, head % call.heads_kv), row, int(call.head_dim_v));
      rows.set(r, row, int(call.head_dim_v));
    }
    rows.write_channel_panels(padded_dim, BLOCK_N / 2, t / 2, workspace.v_block(head, block));
  }
}

// Computes the query rows [first_row, first_row + rows) of one head. T: type of keys and values; O: type of results.
template <typename T, typename O>
struct Tile {
  const ForwardCall& call;
  const Workspace& workspace;
  const int64_t b, head_q, first_row;
  const int rows, head_dim_v, pairs, padded_dim;
  const int64_t head_kv;  // batch index * heads_kv + key head
  const float factor;     // a score times factor is an exponent of 2
  // q is (strips, pairs, STRIP), and acc is (strips, padded_dim, STRIP).
  alignas(64) int32_t q[TILE_SIZE / 2];
  alignas(64) float acc[TILE_SIZE];
  alignas(64) float scores[BLOCK_N * STRIP];
  alignas(64) int32_t weights[BLOCK_N / 2 * STRIP];
  // Each array has one number per row. row_max: the largest score, before it is multiplied by factor. [seen_first,
  // seen_end): the keys that a row sees in a band.
  alignas(64) float row_max[MAX_BLOCK_M], row_sum[MAX_BLOCK_M], decay[STRIP];
  alignas(64) int32_t seen_first[MAX_BLOCK_M], seen_end[MAX_BLOCK_M];
  struct {
    int first, end, full_first, full_end;  // keys [first, end) are seen by some row, [full_first, full_end) by all
  } strips[MAX_STRIPS];

  Tile(const ForwardCall& call, const Workspace& workspace, int64_t b, int64_t head_q, int64_t first_row)
      : call(call), workspace(workspace), b(b), head_q(head_q), first_row(first_row),
        rows(int(std::min<int64_t>(workspace.block_m, call.seqlen_q - first_row))), head_dim_v(int(call.head_dim_v)),
        pairs(int(workspace.pairs)), padded_dim(int(workspace.padded_dim_v)),
        head_kv(b * call.heads_kv + head_q / (call.heads_q / call.heads_kv)),
        factor(score_factor(call)) {}

  void run() {
    const ProductsOfThread products;
    const int count = (rows + STRIP - 1) / STRIP;
    std::fill_n(acc, count * padded_dim * STRIP, 0.0f);
    std::fill_n(row_max, MAX_BLOCK_M, -INF);
    std::fill_n(row_sum, MAX_BLOCK_M, 0.0f);
    for (int n = 0; n < call.num_bands; ++n) visit(call.bands[n], count);
    for (int s = 0; s < count; ++s) write(s);
  }

  void visit(const ForwardBand& band, int count) {
    int first = BLOCK_N, end = 0;
    find_seen(band.band, count, first, end);
    if (first >= end) return;
    for (int s = 0; s < count; ++s) load_queries(band.q, s);
    for (int block = first / BLOCK_N; block * BLOCK_N < end; ++block) {
      const int key = block * BLOCK_N;
      const int32_t* k = workspace.k_block(band.k_copy, head_kv, block);
      const int32_t* v = workspace.v_block(head_kv, block);
      for (int s = 0; s < count; ++s) {
        const auto& seen = strips[s];
        const int from = std::max(seen.first - key, 0) / KEY_STEP * KEY_STEP;
        const int until = std::min(int(padded(std::max(seen.end - key, 0), KEY_STEP)), BLOCK_N);
        if (from >= until) continue;
        const bool changed = seen.full_first <= key + from && key + until <= seen.full_end
                                 ? add_scores<false>(s, k, key, from, until)
                                 : add_scores<true>(s, k, key, from, until);
        weigh(s, key, from, until);
        add_values(s, v, from, until, changed);
      }
    }
  }

  // Finds the keys that each row and each strip sees. Sets [first, end) to the keys that some row sees.
  void find_seen(const Band& band, int count, int& first, int& end) {
    first = int(call.seqlen_k);
    for (int s = 0; s < count; ++s) {
      strips[s] = {int(call.seqlen_k), 0, 0, int(call.seqlen_k)};
      for (int r = s * STRIP; r < (s + 1) * STRIP; ++r) {
        const int64_t position = call.shift + first_row + r;
        const int64_t from = r < rows ? std::min(band.first_key(position), call.seqlen_k) : 0;
        const int64_t until = r < rows ? std::max(band.end_key(position, call.seqlen_k), from) : 0;
        seen_first[r] = int(from), seen_end[r] = int(until);
        if (r >= rows) continue;
        strips[s].full_first = std::max(strips[s].full_first, seen_first[r]);
        strips[s].full_end = std::min(strips[s].full_end, seen_end[r]);
        if (from == until) continue;
        strips[s].first = std::min(strips[s].first, seen_first[r]);
        strips[s].end = std::max(strips[s].end, seen_end[r]);
      }
      first = std::min(first, strips[s].first);
      end = std::max(end, strips[s].end);
    }
  }

  void load_queries(const Table& table, int s) {
    alignas(64) float row[MAX_HEAD_DIM];
    RoundedRows rounded;
    for (int r = 0; r < STRIP; ++r) {
      if (s * STRIP + r >= rows) {
        rounded.clear(r);
        continue;
      }
      const int64_t index = first_row + s * STRIP + r;
      rotate_row(call.q.row<const BFloat16>(b, index, head_q), row, table, b, index, call);
      rounded.set(r, row, int(call.head_dim));
    }
    rounded.write_strip(pairs, q + s * pairs * STRIP);
  }

  // Computes the scores of the keys [from, until) of a block, and updates row_max. Returns whether the maximum of some
  // row grew.
  template <bool MASKED>
  bool add_scores(int s, const int32_t* k, int key, int from, int until) {
    Vec highest[STRIP_VECTORS];
    IntVec first[STRIP_VECTORS], end[STRIP_VECTORS];
    for (int h = 0; h < STRIP_VECTORS; ++h) {
      highest[h] = load(row_max + s * STRIP + h * LANES);
      first[h] = load(seen_first + s * STRIP + h * LANES) - key;
      end[h] = load(seen_end + s * STRIP + h * LANES) - key;
    }
    for (int t = from; t < until; t += PANEL) {
      Vec tile[PANEL][STRIP_VECTORS];
      set_product(packed_rows(k + t * pairs, pairs), q + s * pairs * STRIP, pairs, tile);
#pragma GCC unroll 8
      for (int r = 0; r < PANEL; ++r)
        for (int h = 0; h < STRIP_VECTORS; ++h) {
          Vec x = tile[r][h];
          const IntVec n = IntVec{} + (t + r);
          if (MASKED) x = (n >= first[h]) & (n < end[h]) ? x : broadcast(-INF);
          highest[h] = x > highest[h] ? x : highest[h];
          store(scores + (t + r) * STRIP + h * LANES, x);
        }
    }
    bool changed = false;
    for (int h = 0; h < STRIP_VECTORS; ++h) {
      float* to = row_max + s * STRIP + h * LANES;
      const Vec old_max = load(to);
      changed |= _mm512_cmp_ps_mask(highest[h], old_max, _CMP_NEQ_UQ) != 0;
      const Vec scaled = old_max * factor;
      store(decay + h * LANES, old_max == -INF ? broadcast(1) : exp2(scaled - reference(highest[h])));
      store(to, highest[h]);
    }
    return changed;
  }

  // Returns the number that is subtracted from scaled scores (score * factor). It is 0 for rows that have seen no key.
  Vec reference(Vec highest) const { return highest == -INF ? Vec{} : highest * factor; }

  void weigh(int s, int key, int from, int until) {
    Vec total[STRIP_VECTORS], high[STRIP_VECTORS];
    for (int h = 0; h < STRIP_VECTORS; ++h) {
      high[h] = reference(load(row_max + s * STRIP + h * LANES));
      total[h] = load(row_sum + s * STRIP + h * LANES) * load(decay + h * LANES);
    }
    for (int t = from; t < until; t += 2) {
      float scale[2] = {1, 1};
      if constexpr (IS_CODE<T>)
        for (int n = 0; n < 2; ++n)
          if (key + t + n < call.seqlen_k)
            scale[n] = *call.v_scale.row<const float>(b, key + t + n, head_kv % call.heads_kv);
      for (int h = 0; h < STRIP_VECTORS; ++h) {
        Vec w[2];
        for (int n = 0; n < 2; ++n) {
          w[n] = exp2(load(scores + (t + n) * STRIP + h * LANES) * factor - high[h]);
          total[h] += w[n];
          if (IS_CODE<T>) w[n] *= scale[n];
        }
        store(weights + t / 2 * STRIP + h * LANES, rounded_pairs(w[0], w[1]));
      }
    }
    for (int h = 0; h < STRIP_VECTORS; ++h) store(row_sum + s * STRIP + h * LANES, total[h]);
  }

  void add_values(int s, const int32_t* v, int from, int until, bool changed) {
    for (int c = 0; c < head_dim_v; c += PANEL)
      add_product(packed_rows(v + c * (BLOCK_N / 2), BLOCK_N / 2, from / 2), weights + from / 2 * STRIP,
                  (until - from) / 2, acc + (s * padded_dim + c) * STRIP, STRIP, changed ? decay : nullptr);
  }

  void write(int s) {
    alignas(64) float row[LANES][MAX_HEAD_DIM];
    for (int h = 0; h < STRIP_VECTORS; ++h) {
      const int first = s * STRIP + h * LANES, count = std::min(LANES, rows - first);
      if (count <= 0) return;
      const Vec sums = load(row_sum + first), inverse = sums == 0.0f ? Vec{} : 1.0f / sums;
      for (int c = 0; c < padded_dim; c += LANES) {
        IntVec columns[LANES];
        for (int n = 0; n < LANES; ++n) columns[n] = (IntVec)(load(acc + (s * padded_dim + c + n) * STRIP + h * LANES) * inverse);
        transpose(columns);
        for (int r = 0; r < count; ++r) store(row[r] + c, (Vec)columns[r]);
      }
      for (int r = 0; r < count; ++r) {
        O* out = call.out.row<O>(b, first_row + first + r, head_q);
        for (int c = 0; c < head_dim_v; ++c) from_float(row[r][c], out + c);
        const float row_sum = sums[r], high = row_max[first + r] * (factor * LN_2);
        call.lse[(b * call.heads_q + head_q) * call.seqlen_q + first_row + first + r] =
            row_sum == 0 ? -INF : float(high + std::log(double(row_sum)));
      }
    }
  }
};

template <typename T, typename O>
int forward(const ForwardCall& call) {
  const Workspace workspace(call);
  if (!workspace.allocated()) return 1;
  workspace.pack_all(call, [&](int64_t head, int64_t block) {
    for (int64_t copy = 0; copy < call.num_copies; ++copy) pack_keys<T>(call, workspace, copy, head, block);
    pack_values<T>(call, workspace, head, block);
  });
  for_query_tiles(call, workspace.block_m, [&](int64_t b, int64_t head, int64_t first_row) {
    Tile<T, O>(call, workspace, b, head, first_row).run();
  });
  return 0;
}

template <typename T>
int forward_to(const ForwardCall& call) {
  return call.float32_out ? forward<T, float>(call) : forward<T, BFloat16>(call);
}

}  // namespace
}  // namespace flashrope

extern "C" int flashrope_forward_bf16(const flashrope::ForwardCall* call) {
  return call->dtype == 2 ? flashrope::forward_to<flashrope::BFloat16>(*call)
                          : flashrope::forward_to<flashrope::Int8>(*call);
}
