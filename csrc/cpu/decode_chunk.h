// Computes attention of the queries of one key head to one chunk of the keys of a sequence.
//
// Every row of the cache is read in place. Blocks that no query sees are not read. Within a block, a key is rotated by
// its distance from the block's first key. The query is rotated by its position relative to the block's first key,
// computed in float64. So the table for keys needs only as many rows as a block has keys.

#pragma once

#include "decode_tiles.h"

#include <type_traits>

namespace flashrope {

struct SoftmaxState {  // for the query rows of one key head
  alignas(64) float acc[MAX_ROWS * MAX_HEAD_DIM];  // (rows, padded_dim_v)
  float row_max[MAX_ROWS], row_sum[MAX_ROWS];      // row_sum is 0 if the row has seen no key
};

struct Span {  // keys of a block
  int first, end;
};

// The rows of a band's table `fine` by which the keys of a block rotate. Key t is at the position (skipped + t) / group
// relative to the mapped position of the block's first key.
struct KeyAngles {
  const float* fine;
  int64_t pairs, skipped, group;

  const float* operator()(int t) const { return fine + (group == 1 ? t : (skipped + t) / group) * pairs; }
};

// How many bytes before it is read a row is prefetched. With 128 KB, decoding over 512 channels takes about 8% longer on
// an Intel Xeon, and with 16 KB as much longer if a key head has several query heads.
constexpr size_t AHEAD_BYTES = 32 << 10;

// Computes attention of the queries of one key head to one chunk of keys. T: type of the cache; Q: type of queries and
// results.
template <typename T, typename Q>
struct Chunk {
  using Result = Q;
  const DecodeCall& call;
  const QueryAngles& query_angles;
  int64_t run_number;
  Run run;
  int64_t sequence, head_kv, first_key, end_key;  // counted from the run's first key
  const int64_t group = call.heads_q / call.heads_kv;
  const int rows = int(group * call.seqlen_q);  // row r is query r % seqlen_q of head head_kv * group + r / seqlen_q
  const Pairs pairs{int(call.pairs), call.interleaved != 0, int(call.first_channel)};
  // Whether rows of the cache can be read in whole vectors.
  const bool whole_vectors = head_dim() == padded_dim(), whole_vectors_v = head_dim_v() == padded_dim_v();
  // Number of vectors that hold the first members of all pairs that rotate.
  const int rotating_vectors = int((call.rotating_pairs + LANES - 1) / LANES);
  const bool vector_pairs =
      whole_vectors && !pairs.interleaved && pairs.count % LANES == 0 && pairs.first % LANES == 0;
  // Whether values are channels of the keys. They are then already in the processor's caches.
  const bool shared = call.v.stride_row == call.k.stride_row && call.v.stride_head == call.k.stride_head &&
                      call.v.stride_batch == call.k.stride_batch &&
                      uintptr_t(call.v.data) - uintptr_t(call.k.data) < row_bytes();

  alignas(64) float q[MAX_ROWS * MAX_HEAD_DIM];  // already multiplied by the scale
  alignas(64) float rotated_q[MAX_BANDS][MAX_ROWS * MAX_HEAD_DIM];
  struct Block {
    BlockRows<T> k, v;
  } blocks[2], *block = &blocks[0], *next = &blocks[1];
  alignas(64) float k_scale[BLOCK], v_scale[BLOCK];  // the scales of the block's quantized rows
  alignas(64) float copies[BLOCK * MAX_HEAD_DIM];    // holds LANES rotated or converted keys, or a block's values
  alignas(64) float scores[MAX_ROWS][BLOCK];
  Span spans[MAX_BANDS][MAX_ROWS];  // per band and row
  const T *ahead_of_keys[BLOCK], *ahead_of_values[BLOCK];  // the row that is prefetched while a row is read

  Chunk(const DecodeCall& call, const QueryAngles& query_angles, int64_t run_number, int64_t head_kv, int64_t first_key)
      : call(call), query_angles(query_angles), run_number(run_number), run(call.run(run_number)),
        sequence(run.sequence), head_kv(head_kv), first_key(first_key),
        end_key(std::min(first_key + CHUNK, run.keys)) {}

  int head_dim() const { return int(call.head_dim); }
  int head_dim_v() const { return int(call.head_dim_v); }
  int vectors() const { return (head_dim() + LANES - 1) / LANES; }
  int padded_dim() const { return vectors() * LANES; }
  int padded_dim_v() const { return (head_dim_v() + LANES - 1) / LANES * LANES; }
  size_t row_bytes() const { return head_dim() * sizeof(T); }

  // self: this chunk, as the struct that defines rotate_queries, add_scores and add_values.
  template <typename Self>
  void attend(Self& self, SoftmaxState& state) {
    std::fill_n(state.acc, rows * padded_dim_v(), 0.0f);
    for (int r = 0; r < rows; ++r) state.row_max[r] = -INF, state.row_sum[r] = 0;
    find_rows(first_key, *block);
    load_queries();
    for (int b = 0; b < call.num_bands; ++b)
      if (!call.bands[b].fine) self.rotate_queries(b, 0);
    for (int64_t key = first_key; key < end_key; key += BLOCK, std::swap(block, next)) {
      find_rows(key + BLOCK, *next);
      const int keys = int(std::min<int64_t>(end_key - key, BLOCK));
      bool seen[MAX_BANDS], any = false;
      for (int b = 0; b < call.num_bands; ++b) any |= seen[b] = find_spans(b, key, keys);
      if (!any) continue;
      find_rows_ahead();
      if (IS_CODE<T>) block->k.read_scales(k_scale), block->v.read_scales(v_scale);
      std::fill_n(&scores[0][0], rows * BLOCK, -INF);
      for (int b = 0; b < call.num_bands; ++b)
        if (seen[b]) self.add_scores(b, key);
      self.add_values(state, keys);
    }
  }

  void load_queries() {
    for (int r = 0; r < rows; ++r) {
      const int64_t row = r % call.seqlen_q;
      double scale = call.scale;
      const double counted = std::fmax(call.position(run, row), 0.0);
      if (call.log_n_every)
        scale *= 1 + call.log_n_factor * std::log(1 + std::floor((counted + call.log_n_first) / call.log_n_every));
      else if (call.log_n_factor)
        scale *= std::fmax(call.log_n_factor * std::log(counted + 1), call.log_n_floor);
      if (call.length_scale) scale *= std::fmax(0.1 * std::log(double(run.seqlen) / call.length_scale) + 1, 1.0);
      const float scale_rotated = float(scale * call.rotated_scale), scale_rest = float(scale);
      const Q* x = call.q.row<const Q>(sequence, row, head_kv * group + r / call.seqlen_q);
      float* y = q + r * padded_dim();
      for (int c = 0; c < head_dim(); ++c) {
        const bool paired = c >= pairs.first && c < pairs.first + 2 * pairs.count;
        y[c] = to_float(x[c]) * (paired ? scale_rotated : scale_rest);
      }
      for (int b = 0; b < call.num_bands; ++b)
        std::fill(rotated_q[b] + r * padded_dim() + head_dim(), rotated_q[b] + (r + 1) * padded_dim(), 0.0f);
    }
  }

  // Finds the keys of the block that each query sees. Returns whether any query sees a key.
  bool find_spans(int b, int64_t key, int keys) {
    const Band& band = call.bands[b].band;
    bool any = false;
    for (int r = 0; r < rows; ++r) {
      if (r >= call.seqlen_q) {
        spans[b][r] = spans[b][r - call.seqlen_q];
        continue;
      }
      const int64_t position = call.distance(run, r);
      const int64_t first = band.first_key(position), end = std::min(band.end_key(position, run.keys), run.order + r + 1);
      spans[b][r] = {int(std::clamp<int64_t>(first - key, 0, keys)), int(std::clamp<int64_t>(end - key, 0, keys))};
      any |= spans[b][r].first < spans[b][r].end;
    }
    return any;
  }

  // Finds the addresses of the block of keys that starts at `key`. For keys beyond the chunk's last key, it sets
  // addresses of other keys, which are safe to prefetch. Page numbers outside the cache are clamped.
  void find_rows(int64_t key, Block& found) const {
    const int keys = int(std::clamp<int64_t>(end_key - key, 0, BLOCK));
    for (int t = 0, end; t < keys; t = end) {
      int64_t page = sequence, slot = run.first_slot + key + t;
      end = keys;
      if (call.block_table) {
        page = call.block_table[sequence * call.max_pages + slot / call.page_size];
        page = std::clamp<int64_t>(page, 0, call.pages - 1);
        slot %= call.page_size;
        end = int(std::min<int64_t>(keys, t + call.page_size - slot));
      }
      set_rows(found.k, t, end, call.k, call.k_scale, page, slot);
      set_rows(found.v, t, end, call.v, call.v_scale, page, slot);
    }
    if (keys == BLOCK) return;
    found.k.set(keys, BLOCK, block->k.row[0], 0, block->k.scale[0], 0);
    found.v.set(keys, BLOCK, block->v.row[0], 0, block->v.scale[0], 0);
  }

  void set_rows(BlockRows<T>& rows, int first, int end, const TensorView& x, const TensorView& scale, int64_t page,
                int64_t slot) const {
    const float* scales = IS_CODE<T> ? scale.row<const float>(page, slot, head_kv) : nullptr;
    rows.set(first, end, x.row<const T>(page, slot, head_kv), x.stride_row, scales, scale.stride_row);
  }

  // Rotates the queries by their positions relative to a block's first key. key: the mapped position of that key.
  void rotate_queries(int b, int64_t key) {
    const DecodeBand& band = call.bands[b];
    const int64_t count = pairs.count;
    const double* coarse = band.fine ? band.coarse + key / (BLOCK * BLOCK) * 2 * count : nullptr;
    const double* middle = band.fine ? band.middle + key / BLOCK % BLOCK * 2 * count : nullptr;
    const float* fine = band.fine && key % BLOCK ? band.fine + key % BLOCK * count : nullptr;
    for (int64_t row = 0; row < call.seqlen_q; ++row) {
      const double *query_cos = query_angles.of(run_number, b, row), *query_sin = query_cos + count;
      double cos[MAX_HEAD_DIM / 2], sin[MAX_HEAD_DIM / 2];
      std::copy_n(query_cos, count, cos), std::copy_n(query_sin, count, sin);
      if (coarse) subtract_angles(cos, sin, coarse, coarse + count), subtract_angles(cos, sin, middle, middle + count);
      if (fine) subtract_angles(cos, sin, fine, fine + BLOCK * count);
      float rounded_cos[MAX_HEAD_DIM / 2], rounded_sin[MAX_HEAD_DIM / 2];
      for (int m = 0; m < count; ++m) rounded_cos[m] = float(cos[m]), rounded_sin[m] = float(sin[m]);
      for (int64_t r = row; r < rows; r += call.seqlen_q)
        rotate(q + r * padded_dim(), rotated_q[b] + r * padded_dim(), rounded_cos, rounded_sin, pairs, head_dim());
    }
    if (call.key_weight) weigh_queries(b, band.fine != nullptr);
  }

  // Returns the number of pairs whose weights multiply the keys. The weights of all other channels multiply the queries
  // instead, which is the same because keys do not rotate in these channels.
  int weighted_pairs() const { return vector_pairs ? std::min(rotating_vectors * LANES, pairs.count) : pairs.count; }

  // Multiplies rotated queries by the weights that do not multiply keys. keys_rotate: whether the band's keys rotate.
  void weigh_queries(int b, bool keys_rotate) {
    const int weighted = keys_rotate ? weighted_pairs() : 0, first = pairs.first;
    auto weigh = [&](int from, int until) {
      for (int r = 0; r < rows; ++r)
        for (int c = from; c < until; ++c) rotated_q[b][r * padded_dim() + c] *= call.key_weight[c];
    };
    weigh(0, first);
    if (pairs.interleaved) {
      weigh(first + 2 * weighted, head_dim());
    } else {
      weigh(first + weighted, first + pairs.count);
      weigh(first + pairs.count + weighted, head_dim());
    }
  }

  template <typename Angle>
  void subtract_angles(double* cos, double* sin, const Angle* other_cos, const Angle* other_sin) const {
    for (int m = 0; m < pairs.count; ++m) {
      const double c = cos[m], s = sin[m];
      cos[m] = c * other_cos[m] + s * other_sin[m];
      sin[m] = s * other_cos[m] - c * other_sin[m];
    }
  }

  KeyAngles key_angles(int b, int64_t key) const {
    const DecodeBand& band = call.bands[b];
    return {band.fine, pairs.count, (band.band.chunk ? key % band.band.chunk : key) % band.group, band.group};
  }

  void add_scores(int b, int64_t key) {
    const DecodeBand& band = call.bands[b];
    int first = BLOCK, end = 0;
    for (int row = 0; row < call.seqlen_q; ++row) {
      if (spans[b][row].first >= spans[b][row].end) continue;
      first = std::min(first, spans[b][row].first), end = std::max(end, spans[b][row].end);
    }
    if (band.fine) rotate_queries(b, band.mapped(key));
    const KeyAngles angles = key_angles(b, key);
    for (int begin = first / LANES * LANES; begin < end; begin += LANES)
      add_group(b, begin, std::max(begin, first), std::min(begin + LANES, end), angles);
  }

  // Computes the scores of the keys [from, until), which lie in [begin, begin + LANES), for all queries.
  void add_group(int b, int begin, int from, int until, const KeyAngles& angles) {
    const bool keys_rotate = call.bands[b].fine != nullptr;
    if (keys_rotate && vector_pairs && rows == 1) return add_rotated(b, begin, from, until, angles);
    if (!keys_rotate && whole_vectors) return multiply_group(b, begin, from, until, block->k.row + begin);
    const float* keys[LANES];
    for (int t = from; t < until; ++t) {
      float* y = copies + (t - begin) * padded_dim();
      keys[t - begin] = y;
      if (keys_rotate)
        rotate_key(block->k.row[t], y, angles(t));
      else
        convert_padded(block->k.row[t], y, head_dim());
    }
    multiply_group(b, begin, from, until, keys);
  }

  void add_rotated(int b, int begin, int from, int until, const KeyAngles& angles) {
    constexpr int KEYS = 4;
    const RotatingVectors rotates{pairs.first / LANES, pairs.count / LANES, rotating_vectors};
    const float* cos[LANES];
    for (int t = from; t < until; ++t) cos[t - begin] = angles(t);
    Vec products[LANES] = {};
    auto multiply = [&](auto keys, int t, const Ahead<T>& next_keys) {
      multiply_rotated<keys>(rotated_q[b], block->k.row + begin + t, cos + t, BLOCK * pairs.count, call.key_weight,
                             rotates, vectors(), products + t, next_keys);
    };
    if (until - from == LANES)
      for (int t = 0; t < LANES; t += KEYS) {
        fetch_scales(begin + t, KEYS);
        multiply(std::integral_constant<int, KEYS>{}, t, ahead_of_key(0, begin + t));
      }
    else
      for (int t = from; t < until; ++t) multiply(std::integral_constant<int, 1>{}, t - begin, Ahead<T>{nullptr});
    store_scores(b, 0, begin, products);
  }

  // Finds the rows to prefetch. If keys and values have the same width, these are the rows that are read AHEAD_BYTES
  // later. A block's keys are read before its values. If values are channels of the keys, every second row is prefetched
  // while the values of the block before are read, so that the lines are spread over the whole time.
  void find_rows_ahead() {
    const bool same_width = head_dim() == head_dim_v();
    const int distance = shared || same_width ? int(std::clamp<size_t>(AHEAD_BYTES / row_bytes(), 1, BLOCK)) : BLOCK;
    const auto fill = [&](const T** ahead, const BlockRows<T>& rows, const BlockRows<T>& rows_after) {
      std::copy_n(rows_after.row, distance, std::copy(rows.row + distance, rows.row + BLOCK, ahead));
    };
    fill(ahead_of_keys, block->k, same_width && !shared ? block->v : next->k);
    fill(ahead_of_values, block->v, same_width ? next->k : next->v);
    if (!shared) return;
    for (int t = 0; t < BLOCK; t += 2) {
      ahead_of_keys[t + 1] = ahead_of_values[t] = block->k.row[t];  // already in the caches
      ahead_of_values[t + 1] = next->k.row[t + 1];
    }
  }

  // What to prefetch while the rows from r on are multiplied by the keys from t on. Only the first pass over the keys
  // prefetches.
  Ahead<T> ahead_of_key(int r, int t) const { return {r == 0 ? ahead_of_keys + t : nullptr}; }

  // The same for the products with all values.
  Ahead<T> ahead_of_value(int r) const { return {r == 0 ? ahead_of_values : nullptr}; }

  // keys: pointers to the block's keys, starting at key `begin`.
  template <typename K>
  void multiply_group(int b, int begin, int from, int until, const K* const* keys) {
    for (int r = 0; r < rows;) {
      if (rows - r >= MOST_ROWS)
        r += multiply_rows<MOST_ROWS, ACCUMULATORS / MOST_ROWS>(b, r, begin, from, until, keys);
      else if (rows - r >= SCORE_ROWS)
        r += multiply_rows<SCORE_ROWS, SCORE_KEYS>(b, r, begin, from, until, keys);
      else if (rows - r >= 2)
        r += multiply_rows<2, SCORE_KEYS>(b, r, begin, from, until, keys);
      else
        r += multiply_rows<1, 4>(b, r, begin, from, until, keys);
    }
  }

  template <int ROWS, int KEYS, typename K>
  int multiply_rows(int b, int r, int begin, int from, int until, const K* const* keys) {
    const float* queries = rotated_q[b] + r * padded_dim();
    Vec products[ROWS * LANES];
    if (until - from == LANES) {
      for (int t = 0; t < LANES; t += KEYS) {
        if (r == 0) fetch_scales(begin + t, KEYS);
        multiply_tile<ROWS, KEYS>(queries, padded_dim(), keys + t, vectors(), products + t, ahead_of_key(r, begin + t));
      }
    } else {
      std::fill_n(products, ROWS * LANES, Vec{});
      for (int t = from - begin; t < until - begin; ++t)
        multiply_tile<ROWS, 1>(queries, padded_dim(), keys + t, vectors(), products + t, Ahead<T>{nullptr});
    }
    for (int n = 0; n < ROWS; ++n) store_scores(b, r + n, begin, products + n * LANES);
    return ROWS;
  }

  // Prefetches scales of the next block's rows.
  void fetch_scales(int t, int count) const {
    if constexpr (IS_CODE<T>)
      for (int n = t; n < t + count; ++n) next->k.prefetch_scale(n), next->v.prefetch_scale(n);
  }

  void rotate_key(const T* x, float* y, const float* cos) const {
    const float* sin = cos + BLOCK * pairs.count;
    const float* weight = call.key_weight;
    const int start = pairs.first, half = pairs.count;
    if (vector_pairs) {
      auto key = [&](int c) { return weight ? load(x + c) * load(weight + c) : load(x + c); };
      auto copy = [&](int from, int until) {
        for (int c = from; c < until; c += LANES) store(y + c, load(x + c));
      };
      copy(0, start);
      for (int m = 0; m < rotating_vectors * LANES; m += LANES) {
        const int c = start + m;
        const Vec first = key(c), second = key(c + half);
        store(y + c, first * load(cos + m) - second * load(sin + m));
        store(y + c + half, second * load(cos + m) + first * load(sin + m));
      }
      copy(start + rotating_vectors * LANES, start + half);
      copy(start + half + rotating_vectors * LANES, padded_dim());
    } else {
      if (IS_CODE<T> || weight) {
        float numbers[MAX_HEAD_DIM];
        convert(x, numbers, head_dim());
        if (weight)
          for (int c = start; c < start + 2 * half; ++c) numbers[c] *= weight[c];
        rotate(numbers, y, cos, sin, pairs, head_dim());
      } else if constexpr (!IS_CODE<T>) {
        rotate(x, y, cos, sin, pairs, head_dim());
      }
      std::fill(y + head_dim(), y + padded_dim(), 0.0f);
    }
  }

  // Stores the scores of row r with the LANES keys from `begin` on. A score is the sum of the lanes of a product.
  // Overwrites the products.
  void store_scores(int b, int r, int begin, Vec* products) { store_sums(b, r, begin, sums(products)); }

  // Stores a score for each of the LANES keys from `begin` on that row r sees in the band.
  void store_sums(int b, int r, int begin, Vec sum_of_each) {
    const Span span = spans[b][r];
    const IntVec t = lane_numbers() + begin;
    float* to = scores[r] + begin;
    if (IS_CODE<T>) sum_of_each *= load(k_scale + begin);
    store(to, (t >= span.first) & (t < span.end) ? sum_of_each : load(to));
  }

  // Adds the block's scores to the online softmax, and its weighted values to the result.
  void add_values(SoftmaxState& state, int keys) {
    const float* tile[BLOCK];
    if (!whole_vectors_v)
      for (int t = 0; t < keys; ++t) {
        tile[t] = copies + t * padded_dim_v();
        convert_padded(block->v.row[t], copies + t * padded_dim_v(), head_dim_v());
      }
    for (int r = 0; r < rows; ++r) softmax_row(state, r);
    whole_vectors_v ? add_columns(state, block->v.row) : add_columns(state, tile);
  }

  // For every band, divides the rows into groups of at most `most` consecutive rows that see the same keys, and calls
  // add(first row, count, span) for each group. add returns how many of these rows it has processed. The next group
  // starts after them. Values of keys that a query does not see are not read, because they may be NaN.
  template <typename Add>
  void for_rows_of_a_span(int most, const Add& add) {
    for (int b = 0; b < call.num_bands; ++b)
      for (int r = 0, count; r < rows; r += count) {
        const Span span = spans[b][r];
        count = 1;
        while (r + count < rows && count < most && same(span, spans[b][r + count])) ++count;
        if (span.first < span.end) count = add(r, count, span);
      }
  }

  static bool same(Span a, Span b) { return a.first == b.first && a.end == b.end; }

  void softmax_row(SoftmaxState& state, int r) {
    bool seen = false;
    for (int b = 0; b < call.num_bands; ++b) {
      const Span span = spans[b][r];
      seen |= span.first < span.end;
    }
    if (!seen) return;
    Vec block_max = load(scores[r]);
    for (int t = LANES; t < BLOCK; t += LANES) {
      const Vec x = load(scores[r] + t);
      block_max = x > block_max ? x : block_max;
    }
    const float old_max = state.row_max[r], high = maximum(block_max), row_max = high > old_max ? high : old_max;
    const float decay = row_max == old_max ? 1 : exp(old_max - row_max);
    Vec total{};
    for (int t = 0; t < BLOCK; t += LANES) {
      const Vec weights = exp(load(scores[r] + t) - row_max);
      store(scores[r] + t, IS_CODE<T> ? weights * load(v_scale + t) : weights);
      total += weights;
    }
    state.row_max[r] = row_max;
    state.row_sum[r] = state.row_sum[r] * decay + sum(total);
    if (decay != 1)
      for (float *x = acc(state, r), *end = acc(state, r + 1); x < end; x += LANES) store(x, load(x) * decay);
  }

  float* acc(SoftmaxState& state, int r) const { return state.acc + r * padded_dim_v(); }

  // Adds the values, a few columns of all rows at a time.
  template <typename V>
  void add_columns(SoftmaxState& state, const V* const* values) {
    if (rows >= MOST_ROWS) return add_columns<MOST_ROWS>(state, values, 0);
    if (rows >= 4) return add_columns<4>(state, values, 0);
    rows >= 2 ? add_columns<2>(state, values, 0) : add_columns<1>(state, values, 0);
  }

  // ROWS: the largest number of accumulator rows that one pass updates.
  template <int ROWS, int COLUMNS = ACCUMULATORS / ROWS, typename V>
  void add_columns(SoftmaxState& state, const V* const* values, int c) {
    for (; c + COLUMNS * LANES <= padded_dim_v(); c += COLUMNS * LANES) add_pass<ROWS, COLUMNS>(state, values, c);
    if constexpr (COLUMNS > 1) add_columns<ROWS, COLUMNS / 2>(state, values, c);
  }

  template <int ROWS, int COLUMNS, typename V>
  void add_pass(SoftmaxState& state, const V* const* values, int c) {
    for_rows_of_a_span(ROWS, [&](int r, int count, Span span) {
      const Ahead<T> next_values = ahead_of_value(r);
      auto add = [&](auto taken) {
        float* to = acc(state, r);
        add_weighted<taken, COLUMNS>(scores[r], values, span.first, span.end, c, to, padded_dim_v(), next_values);
        return int(taken);
      };
      if (ROWS >= MOST_ROWS && count >= MOST_ROWS) return add(std::integral_constant<int, MOST_ROWS>{});
      if (ROWS >= 4 && count >= 4) return add(std::integral_constant<int, std::min(ROWS, 4)>{});
      if (ROWS >= 2 && count >= 2) return add(std::integral_constant<int, std::min(ROWS, 2)>{});
      return add(std::integral_constant<int, 1>{});
    });
  }
};

}  // namespace flashrope
