// Computes a decoding call. The keys of a sequence are divided into chunks, which the threads share. The thread that
// finishes the last chunk of a head combines the results of all its chunks in order.
//
// Chunks are counted from a sequence's first key, so the results do not depend on the batch, the layout of the cache or
// the number of threads. Chunks that no query sees are not read.

#pragma once

#include "decode_chunk.h"

namespace flashrope {

// Combines the results of all chunks of a sequence and key head. partials: for every chunk and row, head_dim_v values,
// row_max and row_sum.
template <typename T>
void combine(const DecodeCall& call, int64_t sequence, int64_t head_kv, const float* partials, int64_t chunks) {
  const int64_t head_dim = call.head_dim_v, group = call.heads_q / call.heads_kv, rows = group * call.seqlen_q;
  const int64_t width = head_dim + 2;
  for (int64_t r = 0; r < rows; ++r) {
    float row_max = -INF, row_sum = 0, acc[MAX_HEAD_DIM] = {};
    for (int64_t n = 0; n < chunks; ++n) {
      const float high = partials[(n * rows + r) * width + head_dim];
      row_max = high > row_max ? high : row_max;
    }
    for (int64_t n = 0; n < chunks; ++n) {
      const float* partial = partials + (n * rows + r) * width;
      if (partial[head_dim + 1] == 0) continue;  // the row sees no key of this chunk
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

// Computes a call. Work: a Chunk. Returns 0, or 1 if memory runs out.
template <typename Work>
int decode_chunks(const DecodeCall& call) {
  const int64_t rows = call.heads_q / call.heads_kv * call.seqlen_q, width = call.head_dim_v + 2;
  // Task n computes chunk first_chunks[run] + n / heads_kv - starts[run] of its run, for key head n % heads_kv. The
  // chunks of sequence b have the numbers from sequence_starts[b] on.
  auto starts = std::make_unique<int64_t[]>(call.num_runs + 1), first_chunks = std::make_unique<int64_t[]>(call.num_runs);
  auto sequence_starts = std::make_unique<int64_t[]>(call.batch + 1);
  for (int64_t n = 0; n < call.num_runs; ++n) {
    const Run run = call.run(n);
    int64_t first_key = run.keys;
    for (int64_t b = 0; b < call.num_bands; ++b)
      for (int64_t row = 0; row < call.seqlen_q; ++row)
        first_key = std::min(first_key, call.bands[b].band.first_key(call.distance(run, row)));
    first_chunks[n] = first_key / CHUNK;
    const int64_t chunks = first_key < run.keys ? (run.keys + CHUNK - 1) / CHUNK - first_chunks[n] : 0;
    const bool alone = n + 1 == call.num_runs || call.run(n + 1).sequence != run.sequence;  // the sequence's last run
    starts[n + 1] = starts[n] + chunks;
    if (alone && starts[n + 1] == sequence_starts[run.sequence]) ++starts[n + 1];  // without keys: one task
    if (alone) sequence_starts[run.sequence + 1] = starts[n + 1];
  }
  const int64_t chunks = starts[call.num_runs];
  const Floats partials = floats(chunks * call.heads_kv * rows * width);
  const auto finished = std::make_unique<std::atomic<int64_t>[]>(call.batch * call.heads_kv);
  if (!partials) return 1;

  QueryAngles angles{call};
  parallel(call.parallel_for, call.threads, call.num_runs, [&](int64_t n) { angles.fill(n); });
  parallel(call.parallel_for, call.threads, chunks * call.heads_kv, [&](int64_t n) {
    const int64_t head = n % call.heads_kv;
    int64_t run = 0;
    while (starts[run + 1] <= n / call.heads_kv) ++run;
    const int64_t b = call.run(run).sequence, chunks = sequence_starts[b + 1] - sequence_starts[b];
    const int64_t chunk = n / call.heads_kv - sequence_starts[b];
    const int64_t first_key = (first_chunks[run] + n / call.heads_kv - starts[run]) * CHUNK;
    SoftmaxState state;
    Work work(call, angles, run, head, first_key);
    work.attend(work, state);
    const int padded_dim = work.padded_dim_v();
    float* head_partials = partials.get() + (sequence_starts[b] * call.heads_kv + head * chunks) * rows * width;
    for (int64_t r = 0; r < rows; ++r) {
      float* partial = head_partials + (chunk * rows + r) * width;
      std::memcpy(partial, state.acc + r * padded_dim, call.head_dim_v * sizeof(float));
      partial[call.head_dim_v] = state.row_max[r], partial[call.head_dim_v + 1] = state.row_sum[r];
    }
    if (finished[b * call.heads_kv + head].fetch_add(1) == chunks - 1)
      combine<typename Work::Result>(call, b, head, head_partials, chunks);
  });
  return 0;
}

}  // namespace flashrope
