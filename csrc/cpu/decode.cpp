// attention_with_cache for a few queries per sequence. The keys of a sequence are divided into chunks, which the
// threads share. The thread that finishes the last chunk of a head combines the results of all its chunks in order.
//
// Chunks are counted from a sequence's first key and keys are read one row at a time, so the results do not depend on
// the batch, the layout of the cache or the number of threads. Within a block, key t is rotated by its distance t from
// the block's first key, and the query by its position relative to that key: only one small table is needed.

#include "common.h"

#include <algorithm>
#include <type_traits>

namespace flashrope {

constexpr int BLOCK = 64;   // keys
constexpr int CHUNK = 512;  // keys
constexpr int MAX_ROWS = 16;
constexpr int MAX_BANDS = 4;

struct DecodeBand {
  Band band;
  double slope, offset;
  const float* fine;    // (2, BLOCK, pairs): cos and sin of slope * t; nullptr: keys do not rotate
  const double* block;  // (2, pairs): cos and sin of slope * BLOCK
};

struct DecodeCall {  // cpu/library.py has the same
  TensorView q, k, v, out;
  float* lse;                  // (batch, heads_q, seqlen_q)
  const int64_t* bounds;       // (batch, 2): slots
  const int32_t* block_table;  // (batch, max_pages), or nullptr
  int64_t max_pages, pages, page_size;
  int64_t batch, seqlen_q, heads_q, heads_kv, head_dim;
  const double* inv_freq;  // (pairs,)
  int64_t pairs, interleaved;
  DecodeBand bands[MAX_BANDS];
  int64_t num_bands;
  double scale, log_n_factor, log_n_floor;
  double log_n_every, log_n_first;  // log_n_every 0: log n grows with every position, not in steps
  double length_scale;              // 0: no factor by the length of the sequence
  double rotated_scale;             // of the first 2 * pairs channels of the queries
  int64_t dtype, threads;  // dtype: 0 float32, 1 float16, 2 bfloat16
  ParallelFor parallel_for;
};

struct SoftmaxState {  // of the rows of one key head
  float acc[MAX_ROWS][MAX_HEAD_DIM], row_max[MAX_ROWS], row_sum[MAX_ROWS];  // row_sum 0: no key seen
};

// cos and sin (rows, pairs) of the queries' positions relative to a block, advanced from block to block.
struct RelativeAngles {
  double cos[MAX_ROWS][MAX_HEAD_DIM / 2], sin[MAX_ROWS][MAX_HEAD_DIM / 2];

  void start(const DecodeCall& call, const DecodeBand& band, int64_t first_position, int64_t key) {
    for (int r = 0; r < call.seqlen_q; ++r) {
      const double position = band.slope * double(first_position + r - key) + band.offset;
      for (int m = 0; m < call.pairs; ++m) {
        cos[r][m] = std::cos(position * call.inv_freq[m]);
        sin[r][m] = std::sin(position * call.inv_freq[m]);
      }
    }
  }

  void next_block(const DecodeCall& call, const DecodeBand& band) {
    const double *block_cos = band.block, *block_sin = band.block + call.pairs;
    for (int r = 0; r < call.seqlen_q; ++r)
      for (int m = 0; m < call.pairs; ++m) {
        const double c = cos[r][m], s = sin[r][m];
        cos[r][m] = c * block_cos[m] + s * block_sin[m];
        sin[r][m] = s * block_cos[m] - c * block_sin[m];
      }
  }
};

// One chunk of keys against the queries of one key head. D: head_dim, or 0 where it is known at run time only.
template <typename T, int D>
struct Chunk {
  const DecodeCall& call;
  int64_t sequence, head_kv, first_key, end_key;  // keys count from the sequence's first
  const int64_t head_dim = D ? D : call.head_dim;
  const int64_t padded_dim = (head_dim + LANES - 1) / LANES * LANES;
  const int64_t group = call.heads_q / call.heads_kv;
  const int rows = int(group * call.seqlen_q);  // row r: query r % seqlen_q of query head head_kv * group + r / seqlen_q
  const int64_t first_slot = call.bounds[2 * sequence], seqlen = call.bounds[2 * sequence + 1] - first_slot;
  const int64_t first_position = seqlen - call.seqlen_q;
  const Pairs pairs{int(call.pairs), call.interleaved != 0};

  alignas(64) float q[MAX_ROWS][MAX_HEAD_DIM];  // times the scale
  alignas(64) float rotated_q[MAX_ROWS][MAX_HEAD_DIM];
  alignas(64) float copies[BLOCK][MAX_HEAD_DIM];  // of k, rotated or converted, then of v
  alignas(64) float scores[MAX_ROWS][BLOCK];
  RelativeAngles angles[MAX_BANDS];
  const T *k_rows[BLOCK], *v_rows[BLOCK];
  const float* tile[BLOCK];

  Chunk(const DecodeCall& call, int64_t sequence, int64_t head_kv, int64_t first_key, int64_t end_key)
      : call(call), sequence(sequence), head_kv(head_kv), first_key(first_key), end_key(end_key) {}

  void run(SoftmaxState& state) {
    load_queries();
    for (int r = 0; r < rows; ++r) {
      std::memset(state.acc[r], 0, padded_dim * sizeof(float));
      state.row_max[r] = -INF, state.row_sum[r] = 0;
    }
    for (int b = 0; b < call.num_bands; ++b) angles[b].start(call, call.bands[b], first_position, first_key);
    for (int64_t key = first_key; key < end_key; key += BLOCK) {
      const int keys = int(end_key - key < BLOCK ? end_key - key : BLOCK);
      find_rows(key, keys);
      std::fill_n(&scores[0][0], rows * BLOCK, -INF);
      bool seen = false;
      for (int b = 0; b < call.num_bands; ++b) {
        seen |= add_scores(b, key, keys);
        if (call.bands[b].fine && key + BLOCK < end_key) angles[b].next_block(call, call.bands[b]);
      }
      if (seen) add_values(state, keys);
    }
  }

  void load_queries() {
    for (int r = 0; r < rows; ++r) {
      const int64_t row = r % call.seqlen_q, position = first_position + row;
      double scale = call.scale;
      const double counted = double(position > 0 ? position : 0);
      if (call.log_n_every)
        scale *= 1 + call.log_n_factor * std::log(1 + std::floor((counted + call.log_n_first) / call.log_n_every));
      else if (call.log_n_factor)
        scale *= std::fmax(call.log_n_factor * std::log(counted + 1), call.log_n_floor);
      if (call.length_scale) scale *= std::fmax(0.1 * std::log(double(seqlen) / call.length_scale) + 1, 1.0);
      const float scale_rotated = float(scale * call.rotated_scale), scale_rest = float(scale);
      const T* x = call.q.row<const T>(sequence, row, head_kv * group + r / call.seqlen_q);
      for (int c = 0; c < head_dim; ++c) q[r][c] = to_float(x[c]) * (c < 2 * call.pairs ? scale_rotated : scale_rest);
      for (int c = int(head_dim); c < padded_dim; ++c) rotated_q[r][c] = 0;
    }
  }

  // Page numbers outside the cache are clamped.
  void find_rows(int64_t key, int keys) {
    for (int t = 0; t < keys; ++t) {
      int64_t page = sequence, slot = first_slot + key + t;
      if (call.block_table) {
        page = call.block_table[sequence * call.max_pages + slot / call.page_size];
        page = page < 0 ? 0 : page < call.pages ? page : call.pages - 1;
        slot %= call.page_size;
      }
      k_rows[t] = call.k.row<const T>(page, slot, head_kv);
      v_rows[t] = call.v.row<const T>(page, slot, head_kv);
    }
  }

  // The tile of rows as float32, in place where possible.
  void convert(const T* const* from, int begin, int end) {
    if constexpr (std::is_same_v<T, float>) {
      if (padded_dim == head_dim) {
        for (int t = begin; t < end; ++t) tile[t] = from[t];
        return;
      }
    }
    for (int t = begin; t < end; ++t) {
      for (int c = 0; c < head_dim; ++c) copies[t][c] = to_float(from[t][c]);
      for (int c = int(head_dim); c < padded_dim; ++c) copies[t][c] = 0;
      tile[t] = copies[t];
    }
  }

  // The scores of one band. Returns whether any row sees a key in it.
  bool add_scores(int b, int64_t key, int keys) {
    const DecodeBand& band = call.bands[b];
    int first[MAX_ROWS], end[MAX_ROWS], begin_any = BLOCK, end_any = 0;
    for (int r = 0; r < rows; ++r) {
      const int64_t position = first_position + r % call.seqlen_q;
      const int64_t low = band.band.first_key(position) - key, high = band.band.end_key(position, seqlen) - key;
      first[r] = int(low < 0 ? 0 : low < keys ? low : keys), end[r] = int(high < 0 ? 0 : high < keys ? high : keys);
      if (first[r] < end[r]) {
        begin_any = first[r] < begin_any ? first[r] : begin_any;
        end_any = end[r] > end_any ? end[r] : end_any;
      }
    }
    if (begin_any >= end_any) return false;
    if (band.fine) {
      const float *cos = band.fine, *sin = band.fine + BLOCK * call.pairs;
      for (int t = begin_any; t < end_any; ++t) {
        rotate(k_rows[t], copies[t], cos + t * call.pairs, sin + t * call.pairs, pairs, int(head_dim));
        for (int c = int(head_dim); c < padded_dim; ++c) copies[t][c] = 0;
        tile[t] = copies[t];
      }
    } else {
      convert(k_rows, begin_any, end_any);
    }
    for (int r = 0; r < rows; ++r) {
      rotate_query(b, r);
      Vec row[MAX_VECTORS];
      for (int c = 0; c < padded_dim / LANES; ++c) row[c] = load(rotated_q[r] + c * LANES);
      for (int t = first[r]; t < end[r]; ++t) {
        Vec products = row[0] * load(tile[t]);
        for (int c = 1; c < padded_dim / LANES; ++c) products += row[c] * load(tile[t] + c * LANES);
        scores[r][t] = sum(products);
      }
    }
    return true;
  }

  void rotate_query(int b, int r) {
    const RelativeAngles& at = angles[b];
    const int64_t row = r % call.seqlen_q;
    float cos[MAX_HEAD_DIM / 2], sin[MAX_HEAD_DIM / 2];
    for (int m = 0; m < pairs.count; ++m) cos[m] = float(at.cos[row][m]), sin[m] = float(at.sin[row][m]);
    rotate(q[r], rotated_q[r], cos, sin, pairs, int(head_dim));
  }

  // Online softmax over the block's scores, and its values.
  void add_values(SoftmaxState& state, int keys) {
    convert(v_rows, 0, keys);
    for (int r = 0; r < rows; ++r) {
      Vec block_max = load(scores[r]);
      bool seen = false;
      for (int t = 0; t < keys; ++t) seen |= scores[r][t] != -INF;
      if (!seen) continue;
      for (int t = LANES; t < BLOCK; t += LANES) {
        const Vec x = load(scores[r] + t);
        block_max = x > block_max ? x : block_max;
      }
      const float old_max = state.row_max[r], high = maximum(block_max), row_max = high > old_max ? high : old_max;
      const float decay = row_max == old_max ? 1 : exp(old_max - row_max);
      Vec total{};
      for (int t = 0; t < BLOCK; t += LANES) {
        const Vec weights = exp(load(scores[r] + t) - row_max);
        store(scores[r] + t, weights);
        total += weights;
      }
      state.row_max[r] = row_max;
      state.row_sum[r] = state.row_sum[r] * decay + sum(total);
      Vec acc[MAX_VECTORS];
      for (int c = 0; c < padded_dim / LANES; ++c) acc[c] = load(state.acc[r] + c * LANES) * decay;
      for (int t = 0; t < keys; ++t) {
        const Vec weight = broadcast(scores[r][t]);
        for (int c = 0; c < padded_dim / LANES; ++c) acc[c] += weight * load(tile[t] + c * LANES);
      }
      for (int c = 0; c < padded_dim / LANES; ++c) store(state.acc[r] + c * LANES, acc[c]);
    }
  }
};

// Partial results of the chunks of one (sequence, key head): per chunk and row head_dim values, row_max and row_sum.
template <typename T>
void combine(const DecodeCall& call, int64_t sequence, int64_t head_kv, const float* partials, int64_t chunks) {
  const int64_t head_dim = call.head_dim, group = call.heads_q / call.heads_kv, rows = group * call.seqlen_q;
  const int64_t width = head_dim + 2;
  for (int64_t r = 0; r < rows; ++r) {
    float row_max = -INF, row_sum = 0, acc[MAX_HEAD_DIM] = {};
    for (int64_t n = 0; n < chunks; ++n) {
      const float high = partials[(n * rows + r) * width + head_dim];
      row_max = high > row_max ? high : row_max;
    }
    for (int64_t n = 0; n < chunks; ++n) {
      const float* partial = partials + (n * rows + r) * width;
      if (partial[head_dim + 1] == 0) continue;  // it sees no key
      const float weight = exp(partial[head_dim] - row_max);
      row_sum += weight * partial[head_dim + 1];
      for (int c = 0; c < head_dim; ++c) acc[c] += weight * partial[c];
    }
    const int64_t row = r % call.seqlen_q, head = head_kv * group + r / call.seqlen_q;
    T* out = call.out.row<T>(sequence, row, head);
    for (int c = 0; c < head_dim; ++c) from_float(row_sum == 0 ? 0 : acc[c] / row_sum, out + c);
    call.lse[(sequence * call.heads_q + head) * call.seqlen_q + row] =
        row_sum == 0 ? -INF : float(row_max + std::log(double(row_sum)));
  }
}

template <typename T, int D>
int decode(const DecodeCall& call) {
  const int64_t rows = call.heads_q / call.heads_kv * call.seqlen_q, width = call.head_dim + 2;
  // Task n is chunk n / heads_kv - begin of the sequence that holds it, and key head n % heads_kv.
  auto starts = std::make_unique<int64_t[]>(call.batch + 1);
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t chunks = (call.bounds[2 * b + 1] - call.bounds[2 * b] + CHUNK - 1) / CHUNK;
    starts[b + 1] = starts[b] + (chunks > 0 ? chunks : 1);
  }
  const Floats partials = floats(starts[call.batch] * call.heads_kv * rows * width);
  const auto finished = std::make_unique<std::atomic<int64_t>[]>(call.batch * call.heads_kv);
  if (!partials) return 1;

  parallel(call.parallel_for, call.threads, starts[call.batch] * call.heads_kv, [&](int64_t n) {
    const int64_t head = n % call.heads_kv;
    int64_t b = 0;
    while (starts[b + 1] <= n / call.heads_kv) ++b;
    const int64_t chunks = starts[b + 1] - starts[b], chunk = n / call.heads_kv - starts[b];
    const int64_t seqlen = call.bounds[2 * b + 1] - call.bounds[2 * b], key = chunk * CHUNK;
    SoftmaxState state;
    Chunk<T, D> work(call, b, head, key, key + CHUNK < seqlen ? key + CHUNK : seqlen);
    work.run(state);
    float* head_partials = partials.get() + (starts[b] * call.heads_kv + head * chunks) * rows * width;
    for (int64_t r = 0; r < rows; ++r) {
      float* partial = head_partials + (chunk * rows + r) * width;
      std::memcpy(partial, state.acc[r], call.head_dim * sizeof(float));
      partial[call.head_dim] = state.row_max[r], partial[call.head_dim + 1] = state.row_sum[r];
    }
    if (finished[b * call.heads_kv + head].fetch_add(1) == chunks - 1) combine<T>(call, b, head, head_partials, chunks);
  });
  return 0;
}

template <typename T>
int decode(const DecodeCall& call) {
  switch (call.head_dim) {
    case 64: return decode<T, 64>(call);
    case 128: return decode<T, 128>(call);
    default: return decode<T, 0>(call);
  }
}

}  // namespace flashrope

extern "C" int flashrope_decode(const flashrope::DecodeCall* call) {
  switch (call->dtype) {
    case 0: return flashrope::decode<float>(*call);
    case 1: return flashrope::decode<flashrope::Float16>(*call);
    default: return flashrope::decode<flashrope::BFloat16>(*call);
  }
}
