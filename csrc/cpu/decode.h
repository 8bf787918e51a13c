// The arguments of a decoding call, the angles of its queries, and the addresses of a block's keys in the cache.

#pragma once

#include "common.h"

namespace flashrope {

constexpr int BLOCK = 64;   // keys
constexpr int CHUNK = 512;  // keys
constexpr int MAX_ROWS = 16;

struct DecodeBand {
  Band band;
  int64_t group, last;  // the query at position p rotates by slope * min(p mod chunk / group, last) + offset
  double slope, offset;
  // Tables of cos and sin. fine: of slope * n, (2, BLOCK, pairs). middle: of slope * BLOCK * n, (BLOCK, 2, pairs).
  // coarse: of slope * BLOCK * BLOCK * n, (rows for the longest sequence, 2, pairs). nullptr: keys do not rotate.
  const float* fine;
  const double *middle, *coarse;

  int64_t mapped(int64_t position) const { return (band.chunk ? position % band.chunk : position) / group; }
};

// Keys of a sequence with consecutive slots and positions. cpu/library.py mirrors the struct.
struct Run {
  int64_t sequence, first_slot, keys;
  int64_t order;    // the query row r sees at most the first order + r + 1 keys of the run
  int64_t seqlen;   // number of keys of all runs of the sequence
  double position;  // position of the run's first key
};

struct DecodeCall {  // mirrored in backends/cpu/library.py
  TensorView q, k, v, out;
  TensorView k_scale, v_scale;  // float32 (batch or pages, rows, heads), of a quantized cache
  float* lse;                  // (batch, heads_q, seqlen_q)
  const int64_t* bounds;       // (batch, 2): first slot and end of every sequence; nullptr if runs are given
  const int32_t* block_table;  // (batch, max_pages), or nullptr
  int64_t max_pages, pages, page_size;
  int64_t batch, seqlen_q, heads_q, heads_kv, head_dim, head_dim_v;
  const float* key_weight;  // (head_dim,), multiplies keys before their rotation; nullptr: 1
  const double* inv_freq;  // (pairs,)
  int64_t pairs, rotating_pairs, interleaved;  // the pairs from rotating_pairs on have a frequency of 0
  int64_t first_channel;                       // the first channel of the first pair
  DecodeBand bands[MAX_BANDS];
  int64_t num_bands;
  const Run* runs;          // (num_runs,), in order, at least one per sequence; nullptr: each sequence is one run
  const double* positions;  // of the queries, (batch, seqlen_q); only with runs
  int64_t num_runs;         // the batch size if runs is nullptr
  double scale, log_n_factor, log_n_floor;
  double log_n_every, log_n_first;  // log_n_every is 0 if log n grows with every position, not in steps
  double length_scale;              // 0: queries are not scaled by the length of the sequence
  double rotated_scale;             // the factor on the query channels that are in pairs
  int64_t dtype, threads;  // dtype: 0 float32, 1 float16, 2 bfloat16; 3: cache Int8, queries float32
  ParallelFor parallel_for;

  Run run(int64_t n) const {
    if (runs) return runs[n];
    const int64_t first = bounds[2 * n], keys = bounds[2 * n + 1] - first;
    return {n, first, keys, keys, keys, 0};
  }
  double position(const Run& run, int64_t row) const {  // the position of a query
    return positions ? positions[run.sequence * seqlen_q + row] : double(run.seqlen - seqlen_q + row);
  }
  // The distance of a query from the run's first key, rounded down.
  int64_t distance(const Run& run, int64_t row) const { return int64_t(std::floor(position(run, row) - run.position)); }
};

// cos and sin of the queries' angles, (runs, bands, seqlen_q, 2, pairs). Positions are relative to the first key of
// each run.
struct QueryAngles {
  const DecodeCall& call;
  std::unique_ptr<double[]> angles{new double[call.num_runs * call.num_bands * call.seqlen_q * 2 * call.pairs + 1]};

  double* of(int64_t run, int64_t b, int64_t row) const {
    return angles.get() + ((run * call.num_bands + b) * call.seqlen_q + row) * 2 * call.pairs;
  }

  void fill(int64_t n) {
    const Run run = call.run(n);
    for (int64_t b = 0; b < call.num_bands; ++b)
      for (int64_t row = 0; row < call.seqlen_q; ++row) {
        const DecodeBand& band = call.bands[b];
        const int64_t distance = call.distance(run, row), mapped = std::min(band.mapped(distance), band.last);
        const double fraction = call.position(run, row) - run.position - double(distance);
        const double position = band.slope * (double(mapped) + fraction) + band.offset;
        double* cos = of(n, b, row);
        for (int m = 0; m < call.pairs; ++m) {
          const double angle = m < call.rotating_pairs ? position * call.inv_freq[m] : 0;
          cos[m] = std::cos(angle), cos[call.pairs + m] = std::sin(angle);
        }
      }
  }
};

// The addresses of a block's rows, of K or of V.
template <typename T>
struct BlockRows {
  const T* row[BLOCK];
  const float* scale[BLOCK];  // the scales of quantized rows
  bool adjacent;              // whether all scales are adjacent in memory

  // Sets the rows [first, end), which are consecutive in the cache.
  void set(int first, int end, const T* x, int64_t stride, const float* s, int64_t scale_stride) {
    for (int t = first; t < end; ++t) row[t] = x + (t - first) * stride;
    if (!IS_CODE<T>) return;
    for (int t = first; t < end; ++t) scale[t] = s + (t - first) * scale_stride;
    adjacent = end - first == BLOCK && scale_stride == 1;
  }

  void read_scales(float* to) const {
    if (adjacent)
      std::memcpy(to, scale[0], BLOCK * sizeof(float));
    else
      for (int t = 0; t < BLOCK; ++t) to[t] = *scale[t];
  }

  // Prefetches the scale of row t. Adjacent scales share cache lines, so only every LANES-th row does.
  void prefetch_scale(int t) const {
    if (t % LANES == 0 || !adjacent) __builtin_prefetch(scale[t]);
  }
};

}  // namespace flashrope
