// Computes attention over a cache of raw keys for a few query rows per sequence. The keys are divided into splits.
//
// The keys of a sequence are divided into blocks of warps * SLICE, counted from its first key, and split s takes the
// blocks s, s + num_splits, ... So the grid follows from shapes alone, and lengths are read on the device. A warp owns
// one slice of every block. It copies K and V into its own part of shared memory, one or two slices ahead, multiplies
// on tensor cores and keeps its own running softmax. There is no barrier in the loop. At the end, the results of the
// warps are merged. The combine kernel merges the results of the splits. The result of a query row does not depend on
// the other rows or sequences of the call.
//
// Queries are rotated once per band in float32, rounded once and stored in shared memory. Keys are rotated in
// registers, and only in bands that rotate keys. The angle of key j0 + r is the sum of the angle of key j0, looked up
// once per slice, and the angle of r < SLICE. The table rows of r stay in L1.

#include "decode.h"
#include "positions.cuh"
#include "ptx.h"

namespace flashrope {
namespace {

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// ---- queries

// Writes the tile's queries, rotated for every band, to rotated_q (num_bands, TILE_ROWS, pitch).
template <typename T, int D, bool INTERLEAVED>
__device__ void rotate_queries(const DecodeParams& p, const Work& w, int shift, uint16_t* rotated_q) {
  constexpr int PITCH = pitch_for(D);
  const int paired = p.rotary_dim / 2;
  for (int index = threadIdx.x; index < TILE_ROWS * D / 2; index += blockDim.x) {
    const int m = index / (D / 2), pair = index % (D / 2);
    const int x = pair >= paired ? p.rotary_dim + 2 * (pair - paired) : INTERLEAVED ? 2 * pair : pair;
    const int y = pair >= paired || INTERLEAVED ? x + 1 : x + paired;
    const uint16_t* q = row_of(p.q, w.b, w.query(m), w.head(m));
    const float2 raw = T::unpack(q[x] | uint32_t(q[y]) << 16);
    const int position = max(w.keys - p.seqlen_q + w.query(m) + shift, 0);
    for (int band = 0; band < p.num_bands; ++band) {
      const int rotation = p.bands[4 * band + 2];
      const bool rotates = rotation && pair < paired;
      const float2 xy = rotates ? rotate(raw.x, raw.y, cos_sin_at(p, rotation, position, pair)) : raw;
      const uint32_t packed = T::pack(xy.x, xy.y);
      uint16_t* row = rotated_q + (band * TILE_ROWS + m) * PITCH;
      row[x] = packed & 0xffff, row[y] = packed >> 16;
    }
  }
}

// ---- one slice of keys

// Copies the slice's rows of K and V, (SLICE, pitch) each. Rows beyond the last key repeat the last key, because the
// cache may hold NaN there.
template <int D>
__device__ void copy_slice(const DecodeParams& p, const Work& w, int key0, uint16_t* k, uint16_t* v) {
  constexpr int CHUNKS = D / 8, PITCH = pitch_for(D);  // CHUNKS: copies of 16 bytes per row
  const int lane = threadIdx.x % 32;
  Place place = place_of(p.layout, w.b, w.first + min(key0 + lane % SLICE, w.keys - 1));
  place.page = clamp(place.page, 0, p.layout.pages - 1);
#pragma unroll 2
  for (int i = 0; i < SLICE * CHUNKS / 32; ++i) {
    const int index = lane + 32 * i, row = index / CHUNKS, channel = index % CHUNKS * 8;
    const int page = __shfl_sync(0xffffffff, place.page, row), page_row = __shfl_sync(0xffffffff, place.row, row);
    copy_async(k + row * PITCH + channel, row_of(p.k_cache, page, page_row, w.head_kv) + channel);
    copy_async(v + row * PITCH + channel, row_of(p.v_cache, page, page_row, w.head_kv) + channel);
  }
}

// Loads 16 columns of tile (16, pitch), starting at column. x[0] holds rows 0-7 and x[1] rows 8-15 of the first eight
// columns; x[2] and x[3] hold the same rows of the other eight. In each 8x8 part a lane holds row lane / 4 and columns
// 2 * (lane % 4) and 2 * (lane % 4) + 1.
template <int D>
__device__ inline void load_tile(uint32_t (&x)[4], const uint16_t* tile, int column) {
  const int lane = threadIdx.x % 32;
  load_matrices(x, tile + (lane % 16) * pitch_for(D) + column + lane / 16 * 8);
}

// Adds q k^T over 16 channels to score, which is two 16x8 tiles.
template <typename T>
__device__ inline void add_products(float (&score)[2][4], const uint32_t (&q)[4], const uint32_t (&k)[4]) {
  multiply<T>(score[0], q, k[0], k[2]);
  multiply<T>(score[1], q, k[1], k[3]);
}

template <typename T, int D>
__device__ void score_unrotated(float (&score)[2][4], const uint16_t* q, const uint16_t* k, int channel) {
#pragma unroll 4
  for (; channel < D; channel += 16) {
    uint32_t a[4], b[4];
    load_tile<D>(a, q, channel);
    load_tile<D>(b, k, channel);
    add_products<T>(score, a, b);
  }
}

// Computes the scores for interleaved pairs. The channels 2m and 2m + 1 of a pair lie in one register. Channels from
// `rotated` on do not rotate.
template <typename T, int D>
__device__ void score_interleaved(float (&score)[2][4], const uint16_t* q, const uint16_t* k, const KeyCosSin& angles,
                                  int rotated) {
#pragma unroll 2
  for (int channel = 0; channel < rotated; channel += 16) {
    uint32_t a[4], b[4];
    load_tile<D>(a, q, channel);
    load_tile<D>(b, k, channel);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 x = T::unpack(b[e]);
      const float2 xy = rotate(x.x, x.y, angles.at(e % 2, channel / 2 + threadIdx.x % 4 + e / 2 * 4));
      b[e] = T::pack(xy.x, xy.y);
    }
    add_products<T>(score, a, b);
  }
  score_unrotated<T, D>(score, q, k, rotated);
}

// Computes the scores if a pair is channels m and m + paired, and paired is a multiple of 16. One lane then holds both
// channels, in two tiles. Pairs from rotated_pairs on do not rotate.
template <typename T, int D>
__device__ void score_halves(float (&score)[2][4], const uint16_t* q, const uint16_t* k, const KeyCosSin& angles,
                             int paired, int rotated_pairs) {
#pragma unroll 2
  for (int channel = 0; channel < paired; channel += 16) {
    uint32_t a[4], b[4], c[4];
    load_tile<D>(b, k, channel);
    load_tile<D>(c, k, channel + paired);
    if (channel < rotated_pairs) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        CosSin t[2];
        angles.two_at(t, e % 2, channel + threadIdx.x % 4 * 2 + e / 2 * 8);
        const float2 x = T::unpack(b[e]), y = T::unpack(c[e]);
        const float2 low = rotate(x.x, y.x, t[0]), high = rotate(x.y, y.y, t[1]);
        b[e] = T::pack(low.x, high.x), c[e] = T::pack(low.y, high.y);
      }
    }
    load_tile<D>(a, q, channel);
    add_products<T>(score, a, b);
    load_tile<D>(a, q, channel + paired);
    add_products<T>(score, a, c);
  }
  score_unrotated<T, D>(score, q, k, 2 * paired);
}

// Computes the scores if a pair is channels m and m + paired, for any `paired`. A lane reads the other channel of a
// pair from shared memory.
template <typename T, int D>
__device__ void score_any_halves(float (&score)[2][4], const uint16_t* q, const uint16_t* k, const KeyCosSin& angles,
                                 int paired) {
  const int lane = threadIdx.x % 32;
  for (int channel = 0; channel < D; channel += 16) {
    uint32_t a[4], b[4];
    load_tile<D>(a, q, channel);
    load_tile<D>(b, k, channel);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint16_t* key = k + (lane / 4 + e % 2 * 8) * pitch_for(D);
      const float2 raw = T::unpack(b[e]);
      float x[2] = {raw.x, raw.y};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int own = channel + lane % 4 * 2 + e / 2 * 8 + i;
        if (own >= 2 * paired) continue;
        const bool second = own >= paired;
        const float other = T::unpack(key[second ? own - paired : own + paired]).x;
        const CosSin t = angles.at(e % 2, second ? own - paired : own);
        x[i] = second ? rotate(other, x[i], t).y : rotate(x[i], other, t).x;
      }
      b[e] = T::pack(x[0], x[1]);
    }
    add_products<T>(score, a, b);
  }
}

// ---- the online softmax of one warp

// A lane holds tile rows lane / 4 and lane / 4 + 8. In a tile of 8 keys or channels it holds columns 2 * (lane % 4) and
// 2 * (lane % 4) + 1.
struct Queries {
  int position[2];
  float scale[2];  // the scale of the scores, times LOG2_E
};

template <int D>
struct SoftmaxState {
  float acc[D / 8][4];
  float row_max[2];  // in log2 units
  float row_sum[2];  // of this lane's keys only
};

// Computes the scores of the slice that starts at key0, in log2 units. If no band holds a key, its score stays -inf.
template <typename T, int D, bool INTERLEAVED>
__device__ void score_slice(float (&score)[2][4], const DecodeParams& p, const Work& w, const Queries& queries,
                            int key0, int shift, const uint16_t* rotated_q, const uint16_t* k, float* base) {
  const int lane = threadIdx.x % 32, paired = p.rotary_dim / 2;
  const int nearest = w.first_position - min(key0 + SLICE, w.keys) + 1, farthest = w.last_position - key0;
  for (int band = 0; band < p.num_bands; ++band) {
    const int start = p.bands[4 * band], stop = p.bands[4 * band + 1], rotation = p.bands[4 * band + 3];
    if (farthest < start || nearest >= stop) continue;
    const uint16_t* q = rotated_q + band * TILE_ROWS * pitch_for(D);
    float band_score[2][4] = {};
    if (!rotation) {
      score_unrotated<T, D>(band_score, q, k, 0);
    } else {
      __syncwarp();  // no lane still reads `base` of the previous band
      for (int pair = lane; pair < paired; pair += 32) {
        const CosSin t = cos_sin_at(p, rotation, key0 + shift, pair);
        base[pair] = t.cos, base[D / 2 + pair] = t.sin;
      }
      for (int pair = paired + lane; pair < D / 2; pair += 32) base[pair] = 1, base[D / 2 + pair] = 0;
      __syncwarp();
      const float* fine[2] = {table_row(p, rotation, lane / 4), table_row(p, rotation, lane / 4 + 8)};
      const KeyCosSin angles{base, {fine[0], fine[1]}, D / 2, p.table_pairs};
      if (INTERLEAVED) {
        score_interleaved<T, D>(band_score, q, k, angles, (p.rotated_pairs * 2 + 15) / 16 * 16);
      } else if (paired % 16 == 0) {
        score_halves<T, D>(band_score, q, k, angles, paired, p.rotated_pairs);
      } else {
        score_any_halves<T, D>(band_score, q, k, angles, paired);
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = key0 + tile * 8 + lane % 4 * 2 + e % 2, distance = queries.position[e / 2] - key;
        if (key < w.keys && distance >= start && distance < stop) {
          score[tile][e] = band_score[tile][e] * queries.scale[e / 2];
        }
      }
    }
  }
}

// Adds the slice's keys to the state.
template <typename T, int D>
__device__ void add_slice(SoftmaxState<D>& state, float (&score)[2][4], const uint16_t* v) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = fmaxf(fmaxf(score[0][2 * r], score[0][2 * r + 1]), fmaxf(score[1][2 * r], score[1][2 * r + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    top = fmaxf(state.row_max[r], fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2)));
    const float finite = top == -INFINITY ? 0 : top;  // if no key was seen, every weight below is 0
    const float kept = exp2_approx(state.row_max[r] - finite);
    state.row_max[r] = top;
    state.row_sum[r] *= kept;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        score[tile][e] = exp2_approx(score[tile][e] - finite);
        state.row_sum[r] += score[tile][e];
      }
    }
#pragma unroll
    for (int tile = 0; tile < D / 8; ++tile) state.acc[tile][2 * r] *= kept, state.acc[tile][2 * r + 1] *= kept;
  }
  const uint32_t weights[4] = {T::pack(score[0][0], score[0][1]), T::pack(score[0][2], score[0][3]),
                               T::pack(score[1][0], score[1][1]), T::pack(score[1][2], score[1][3])};
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < D / 8; tile += 2) {
    uint32_t b[4];
    load_matrices_transposed(b, v + (lane % 16) * pitch_for(D) + tile * 8 + lane / 16 * 8);
    multiply<T>(state.acc[tile], weights, b[0], b[1]);
    multiply<T>(state.acc[tile + 1], weights, b[2], b[3]);
  }
}

// ---- kernels

// Merges the results of the warps and writes the result of the split. In shared memory, out is (WARPS, TILE_ROWS,
// PITCH), and stats (2, WARPS, TILE_ROWS) holds row_max and row_sum.
template <int D>
__device__ void write_partial(const DecodeParams& p, const Work& w, const SoftmaxState<D>& state, float* out,
                              float* stats) {
  constexpr int WARPS = warps_for(D), PITCH = D + 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = state.row_sum[r];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    const int m = lane / 4 + 8 * r;
    if (lane % 4 == 0) {
      stats[warp * TILE_ROWS + m] = state.row_max[r];
      stats[(WARPS + warp) * TILE_ROWS + m] = sum;
    }
#pragma unroll
    for (int tile = 0; tile < D / 8; ++tile) {
      float* to = out + (warp * TILE_ROWS + m) * PITCH + tile * 8 + lane % 4 * 2;
      to[0] = state.acc[tile][2 * r], to[1] = state.acc[tile][2 * r + 1];
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < TILE_ROWS * D; index += blockDim.x) {
    const int m = index / D, channel = index % D;
    if (w.row0 + m >= w.rows) break;
    float top = -INFINITY, sum = 0, total = 0;
    for (int i = 0; i < WARPS; ++i) top = fmaxf(top, stats[i * TILE_ROWS + m]);
    const float finite = top == -INFINITY ? 0 : top;
    for (int i = 0; i < WARPS; ++i) {
      const float weight = exp2_approx(stats[i * TILE_ROWS + m] - finite);
      sum += weight * stats[(WARPS + i) * TILE_ROWS + m];
      total += weight * out[(i * TILE_ROWS + m) * PITCH + channel];
    }
    const int64_t row = ((int64_t(w.split) * p.layout.batch + w.b) * p.seqlen_q + w.query(m)) * p.heads_q + w.head(m);
    p.partial_out[row * D + channel] = top == -INFINITY ? 0 : total / sum;
    if (channel == 0) p.partial_lse[row] = top == -INFINITY ? -INFINITY : top + log2f(sum);
  }
}

// Computes one split of the keys for a tile of query rows. The grid is (batch * heads_kv, num_splits, query tiles).
template <typename T, int D, bool INTERLEAVED>
__global__ void __launch_bounds__(32 * warps_for(D), blocks_for(D))
    split_kernel(const __grid_constant__ DecodeParams p) {
  constexpr int WARPS = warps_for(D), STAGES = stages_for(D), TILE = SLICE * pitch_for(D);
  const Work w = find_work<WARPS * SLICE>(p);
  if (w.block >= w.end_block) {  // the combine kernel does not read partial_out where partial_lse is -inf
    const int m = threadIdx.x;
    if (m < TILE_ROWS && w.row0 + m < w.rows) {
      const int64_t row = ((int64_t(w.split) * p.layout.batch + w.b) * p.seqlen_q + w.query(m)) * p.heads_q + w.head(m);
      p.partial_lse[row] = -INFINITY;
    }
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint16_t* shared = reinterpret_cast<uint16_t*>(shared_memory());
  uint16_t* slices = shared + warp * STAGES * 2 * TILE;  // (STAGES, K and V, SLICE, pitch) of this warp
  uint16_t* rotated_q = shared + WARPS * STAGES * 2 * TILE;
  float* base = reinterpret_cast<float*>(rotated_q + p.num_bands * TILE) + warp * D;

  const auto copy = [&](int block, int stage) {
    const int key0 = (block * WARPS + warp) * SLICE;
    if (block < w.end_block && key0 < w.keys) {
      copy_slice<D>(p, w, key0, slices + stage * 2 * TILE, slices + (stage * 2 + 1) * TILE);
    }
    copy_commit();
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) copy(w.block + stage * p.num_splits, stage);

  const int shift = position_shift(p, w);
  rotate_queries<T, D, INTERLEAVED>(p, w, shift, rotated_q);
  SoftmaxState<D> state = {};
  Queries queries;
  for (int r = 0; r < 2; ++r) {
    state.row_max[r] = -INFINITY;
    queries.position[r] = w.keys - p.seqlen_q + w.query(lane / 4 + 8 * r);
    const float log_n = p.log_n_factor * logf(max(queries.position[r], 0) + 1.0f);
    queries.scale[r] = p.score_scale * LOG2_E * fmaxf(p.log_n_floor, log_n);
    if (p.length_scale) queries.scale[r] *= fmaxf(0.1f * logf(max(w.keys, 1) / p.length_scale) + 1.0f, 1.0f);
  }
  __syncthreads();

  int stage = 0;
  for (int block = w.block; block < w.end_block; block += p.num_splits) {
    copy_wait<STAGES - 2>();
    __syncwarp();  // the copies of all lanes have landed, and no lane still reads the stage that is filled next
    copy(block + (STAGES - 1) * p.num_splits, (stage + STAGES - 1) % STAGES);
    const int key0 = (block * WARPS + warp) * SLICE;
    if (key0 < w.keys) {
      const uint16_t* k = slices + stage * 2 * TILE;
      float score[2][4];
      for (int e = 0; e < 8; ++e) score[e / 4][e % 4] = -INFINITY;
      score_slice<T, D, INTERLEAVED>(score, p, w, queries, key0, shift, rotated_q, k, base);
      add_slice<T, D>(state, score, k + TILE);
    }
    stage = (stage + 1) % STAGES;
  }
  __syncthreads();  // the results overwrite the slices
  float* out = reinterpret_cast<float*>(shared);
  write_partial<D>(p, w, state, out, out + WARPS * TILE_ROWS * (D + 8));
}

// Combines the splits, with one warp per query row and head. out is the sum over splits s of 2^(lse_s - lse)
// partial_out_s, without splits that have no keys.
template <typename T>
__global__ void combine_kernel(const __grid_constant__ DecodeParams p) {
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t rows = int64_t(p.layout.batch) * p.seqlen_q * p.heads_q;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32;
  float top = -INFINITY, sum = 0;
  for (int split = lane; split < p.num_splits; split += 32) top = fmaxf(top, p.partial_lse[split * rows + row]);
  for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
  const float finite = top == -INFINITY ? 0 : top;
  for (int split = lane; split < p.num_splits; split += 32) {
    sum += exp2_approx(p.partial_lse[split * rows + row] - finite);
  }
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  for (int channel = 2 * lane; channel < p.head_dim; channel += 64) {
    float x = 0, y = 0;
    for (int split = 0; split < p.num_splits; ++split) {
      const float lse = p.partial_lse[split * rows + row];
      if (lse == -INFINITY) continue;
      const float weight = exp2_approx(lse - finite) / sum;
      const float* from = p.partial_out + (split * rows + row) * p.head_dim + channel;
      x += weight * from[0], y += weight * from[1];
    }
    reinterpret_cast<uint32_t*>(p.out)[(row * p.head_dim + channel) / 2] = T::pack(x, y);
  }
  if (lane == 0) {
    const int64_t head = row % p.heads_q, query = row / p.heads_q % p.seqlen_q, b = row / p.heads_q / p.seqlen_q;
    p.lse[(b * p.heads_q + head) * p.seqlen_q + query] = top == -INFINITY ? -INFINITY : LN_2 * (top + log2f(sum));
  }
}

// Writes new keys and values to the cache. A thread copies 16 bytes of k and of v. Keys without a slot or a page are
// dropped.
__global__ void append_kernel(const __grid_constant__ AppendParams p) {
  const int chunks = p.head_dim / 8;
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, row = index / chunks;
  const int head = row % p.heads_kv, t = row / p.heads_kv % p.layout.seqlen_new, channel = index % chunks * 8;
  const int64_t b = row / p.heads_kv / p.layout.seqlen_new;
  if (b >= p.layout.batch) return;
  const int slot = seqlen_of(p.layout, b) + t;
  if (slot >= p.layout.capacity) return;
  const Place place = place_of(p.layout, b, slot);
  if (place.page < 0 || place.page >= p.layout.pages) return;
  const auto move = [&](const TensorView& cache, const TensorView& added) {
    const uint16_t* from = row_of(added, b, t, head) + channel;
    uint16_t* to = row_of(cache, place.page, place.row, head) + channel;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  };
  move(p.k_cache, p.k);
  move(p.v_cache, p.v);
}

// ---- launchers

template <typename T, int D>
const char* launch_split(const DecodeParams& p, void* stream) {
  const int tiles = (p.seqlen_q * (p.heads_q / p.heads_kv) + TILE_ROWS - 1) / TILE_ROWS;
  const dim3 grid(p.layout.batch * p.heads_kv, p.num_splits, tiles);
  const auto kernel = p.interleaved ? split_kernel<T, D, true> : split_kernel<T, D, false>;
  return launch(kernel, grid, 32 * warps_for(D), shared_bytes(D, p.num_bands), stream, p);
}

template <typename T>
const char* launch_both(const DecodeParams& p, void* stream) {
  const char* error = p.head_dim == 64   ? launch_split<T, 64>(p, stream)
                      : p.head_dim == 96 ? launch_split<T, 96>(p, stream)
                      : p.head_dim == 128 ? launch_split<T, 128>(p, stream)
                      : p.head_dim == 256 ? launch_split<T, 256>(p, stream)
                                          : "head_dim must be 64, 96, 128 or 256";
  if (error) return error;
  const int64_t rows = int64_t(p.layout.batch) * p.seqlen_q * p.heads_q;
  return launch(combine_kernel<T>, dim3(static_cast<unsigned>((rows + 3) / 4), 1, 1), 128, 0, stream, p);
}

}  // namespace

const char* launch_decode(const DecodeParams& p, void* stream) {
  return p.bfloat16 ? launch_both<BFloat16>(p, stream) : launch_both<Float16>(p, stream);
}

const char* launch_append(const AppendParams& p, void* stream) {
  const int64_t chunks = int64_t(p.layout.batch) * p.layout.seqlen_new * p.heads_kv * (p.head_dim / 8);
  return launch(append_kernel, dim3(static_cast<unsigned>((chunks + 127) / 128), 1, 1), 128, 0, stream, p);
}

}  // namespace flashrope
