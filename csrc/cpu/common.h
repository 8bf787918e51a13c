// What the CPU kernels share: vectors, types, tensors, the rotation of a row, exp, and a parallel loop.
//
// Everything is computed in float32. A vector is as wide as the processor's; plain loops over head_dim are vectorised by
// the compiler. The library depends on nothing but libc: Python passes torch's parallel_for, so that the threads are
// torch's own.

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

namespace flashrope {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int MAX_HEAD_DIM = 256;
constexpr int MAX_VECTORS = MAX_HEAD_DIM / LANES;
constexpr float INF = std::numeric_limits<float>::infinity();

using Vec = float __attribute__((vector_size(4 * LANES)));
using IntVec = int32_t __attribute__((vector_size(4 * LANES)));

inline Vec load(const float* x) {
  Vec v;
  std::memcpy(&v, x, sizeof v);
  return v;
}
inline void store(float* x, Vec v) { std::memcpy(x, &v, sizeof v); }
inline Vec broadcast(float x) { return x - Vec{}; }  // unlike x + 0, no instruction for it

inline float sum(Vec v) {
  float lanes[LANES];
  store(lanes, v);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

inline float maximum(Vec v) {
  float lanes[LANES];
  store(lanes, v);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

// exp(x) for x <= 0, within 2 units in the last place; 0 below the smallest normal number. NaN stays NaN.
inline Vec exp(Vec x) {
  const Vec lowest = broadcast(-87.3f);
  const Vec clamped = x < lowest ? lowest : x;
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec rounded = clamped * 1.44269504f + magic;
  const Vec n = rounded - magic;
  const Vec r = clamped - n * 0.693359375f - n * -2.12194440e-4f;  // ln 2 in two parts
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntVec power = ((IntVec)rounded - (IntVec)magic + 127) << 23;
  return x < lowest ? Vec{} : p * (Vec)power;
}

inline float exp(float x) { return exp(broadcast(x))[0]; }

// ---- element types

#ifdef __aarch64__
using Float16 = __fp16;  // GCC 12 has _Float16 for x86-64 alone
#else
using Float16 = _Float16;
#endif
struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Float16 x) { return x; }
inline float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline void from_float(float x, float* y) { *y = x; }
inline void from_float(float x, Float16* y) { *y = Float16(x); }
inline void from_float(float x, BFloat16* y) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  y->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// ---- tensors

struct TensorView {  // strides in elements; channels are contiguous
  void* data;
  int64_t stride_batch, stride_row, stride_head;

  template <typename T>
  T* row(int64_t b, int64_t row, int64_t head) const {
    return static_cast<T*>(data) + b * stride_batch + row * stride_row + head * stride_head;
  }
};

// Query row r is at position shift + r and sees, in this band, the keys [first_key, end_key).
struct Band {
  int64_t start, stop;  // distances; infinite ones are +-2^40

  int64_t first_key(int64_t position) const { return position - stop + 1 > 0 ? position - stop + 1 : 0; }
  int64_t end_key(int64_t position, int64_t keys) const {
    const int64_t end = position - start + 1;
    return end < 0 ? 0 : end < keys ? end : keys;
  }
};

struct Pairs {
  int count;
  bool interleaved;  // pair m is channels 2 m and 2 m + 1; otherwise m and m + count
};

// x rotated by angles whose cos and sin are given per pair.
template <typename T>
inline void rotate(const T* x, float* y, const float* cos, const float* sin, Pairs pairs, int head_dim) {
  if (!pairs.interleaved) {
    const T* second = x + pairs.count;
    for (int m = 0; m < pairs.count; ++m) {
      const float a = to_float(x[m]), b = to_float(second[m]);
      y[m] = a * cos[m] - b * sin[m];
      y[m + pairs.count] = b * cos[m] + a * sin[m];
    }
  } else {
    for (int m = 0; m < pairs.count; ++m) {
      const float a = to_float(x[2 * m]), b = to_float(x[2 * m + 1]);
      y[2 * m] = a * cos[m] - b * sin[m];
      y[2 * m + 1] = b * cos[m] + a * sin[m];
    }
  }
  for (int c = 2 * pairs.count; c < head_dim; ++c) y[c] = to_float(x[c]);
}

// ---- threads

using ParallelFor = int32_t (*)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);

// Calls work(n) once for every n < count. A thread takes the next n when it is free, so a delayed thread does less.
template <typename Work>
void parallel(ParallelFor parallel_for, int64_t threads, int64_t count, const Work& work) {
  struct Shared {
    const Work& work;
    int64_t count;
    std::atomic<int64_t> next;
  } shared{work, count, {0}};
  auto take = [](int64_t, int64_t, void* context) {
    auto& shared = *static_cast<Shared*>(context);
    for (int64_t n; (n = shared.next.fetch_add(1)) < shared.count;) shared.work(n);
  };
  threads = threads < count ? threads : count;
  if (threads > 1)
    parallel_for(0, threads, 1, take, &shared);
  else
    take(0, 1, &shared);
}

struct Free {
  void operator()(void* x) const { std::free(x); }
};
using Floats = std::unique_ptr<float[], Free>;

inline Floats floats(int64_t count) {  // nullptr if there is no memory
  return Floats(static_cast<float*>(std::aligned_alloc(64, (count * 4 / 64 + 1) * 64)));
}

}  // namespace flashrope
