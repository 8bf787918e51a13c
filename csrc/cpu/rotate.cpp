// Rotates rows of queries or keys by tables of cos and sin. Also appends rows to the slots of a cache, unchanged or
// quantized. Rows without a slot or a page are dropped.

#include "tiles.h"

namespace flashrope {

constexpr int64_t RUN_BLOCK = 32;  // rows that a thread takes at a time

// Consecutive rows of x that belong to one sequence and have consecutive positions.
struct Run {
  int64_t batch, row, rows;  // of x
  int64_t position;          // of the first row; the table row of a row is its position, or 0 if that is negative
  int64_t sequence, slot;    // the first row's sequence, and its slot in that sequence
};

struct RotateCall {  // mirrored in backends/cpu/library.py
  TensorView x, out;
  TensorView v, v_cache;  // values, which are written to the same slots as x; v.data nullptr: no values
  TensorView k_scale, v_scale;  // float32 (pages, rows, heads), of a quantized cache
  Table table;
  const Run* runs;
  int64_t num_runs, heads, head_dim, head_dim_v, pairs, interleaved, first_channel;
  int64_t to_cache;            // 0: row r of x goes to row r of out, which has x's shape
  const int64_t* slots;        // (rows of x,), slots of the whole cache; nullptr: a run fills slots from `slot` on
  const int32_t* block_table;  // (sequences, max_pages), or nullptr
  int64_t max_pages, pages, page_size;  // without a block_table: 1, the number of sequences, the slots per sequence
  int64_t dtype, codes, threads;  // dtype: 0 float32, 1 float16, 2 bfloat16; codes: 3 Int8, 0 not quantized
  ParallelFor parallel_for;
};

struct Place {
  int64_t page, row;  // page is -1 if the row has no place
};

// Returns where row `row` of a run is written. row: counted from the run's first row.
inline Place find_place(const RotateCall& call, const Run& run, int64_t row) {
  if (!call.to_cache) return {run.batch, run.row + row};
  const int64_t slot = call.slots ? call.slots[run.row + row] : run.slot + row;
  if (slot < 0) return {-1, 0};
  const int64_t entry = slot / call.page_size;
  Place place{entry, slot % call.page_size};
  if (!call.slots) {
    if (entry >= call.max_pages) return {-1, 0};
    place.page = call.block_table ? call.block_table[run.sequence * call.max_pages + entry] : run.sequence;
  }
  return place.page < call.pages ? place : Place{-1, 0};
}

// Writes a row to a cache with elements of type C.
template <typename T, typename C>
void write(const T* x, const TensorView& cache, const TensorView& scales, Place place, int64_t head, int head_dim) {
  C* out = cache.row<C>(place.page, place.row, head);
  if constexpr (IS_CODE<C>)
    *scales.row<float>(place.page, place.row, head) = quantize(x, head_dim, out);
  else
    std::memcpy(out, x, head_dim * sizeof(T));
}

// T: type of the new rows; C: type of the destination.
template <typename T, typename C = T>
void rotate(const RotateCall& call) {
  ForwardCall shape{};  // only the fields that rotate_row reads are set
  shape.head_dim = call.head_dim, shape.pairs = call.pairs;
  shape.interleaved = call.interleaved, shape.first_channel = call.first_channel;
  auto starts = std::make_unique<int64_t[]>(call.num_runs + 1);
  for (int64_t n = 0; n < call.num_runs; ++n)
    starts[n + 1] = starts[n] + (call.runs[n].rows + RUN_BLOCK - 1) / RUN_BLOCK;
  parallel(call.parallel_for, call.threads, starts[call.num_runs], [&](int64_t n) {
    int64_t r = 0;
    while (starts[r + 1] <= n) ++r;
    const Run& run = call.runs[r];
    const int64_t first = (n - starts[r]) * RUN_BLOCK, end = std::min(first + RUN_BLOCK, run.rows);
    const int head_dim = int(call.head_dim);
    float y[MAX_HEAD_DIM];
    T rounded[MAX_HEAD_DIM];
    for (int64_t row = first; row < end; ++row) {
      const Place place = find_place(call, run, row);
      if (place.page < 0) continue;
      const int64_t position = std::max<int64_t>(run.position + row, 0);
      for (int64_t head = 0; head < call.heads; ++head) {
        const T* x = call.x.row<const T>(run.batch, run.row + row, head);
        if (call.v.data) {
          const T* v = call.v.row<const T>(run.batch, run.row + row, head);
          write<T, C>(v, call.v_cache, call.v_scale, place, head, int(call.head_dim_v));
        }
        if (call.table.cos) {
          rotate_row(x, y, call.table, run.batch, position, shape);
          for (int c = 0; c < head_dim; ++c) from_float(y[c], rounded + c);
          x = rounded;
        }
        write<T, C>(x, call.out, call.k_scale, place, head, head_dim);
      }
    }
  });
}

template <typename T>
void rotate_to(const RotateCall& call) {
  return call.codes ? rotate<T, Int8>(call) : rotate<T>(call);
}

}  // namespace flashrope

extern "C" void flashrope_rotate(const flashrope::RotateCall* call) {
  switch (call->dtype) {
    case 0: return flashrope::rotate_to<float>(*call);
    case 1: return flashrope::rotate_to<flashrope::Float16>(*call);
    default: return flashrope::rotate_to<flashrope::BFloat16>(*call);
  }
}
