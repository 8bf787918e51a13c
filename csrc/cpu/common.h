// Code that the CPU kernels share: vectors, types, tensors, the rotation of a row, exp, and a parallel loop.
//
// Everything is computed in float32. A vector is as wide as the processor's registers. Plain loops over head_dim are
// vectorised by the compiler. The library depends only on libc. Python passes torch's parallel_for to it, so the
// kernels run on torch's own threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef __x86_64__
#include <immintrin.h>
#endif

// glibc 2.29 added a second version of log, which handles errno differently. Linking the first version keeps the wheel
// compatible with manylinux_2_28.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver log, log@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver log, log@GLIBC_2.17");
#endif

namespace flashrope {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#else  // NEON
constexpr int LANES = 4, REGISTERS = 32;
#endif
constexpr int MAX_HEAD_DIM = 576, MAX_BANDS = 4;
constexpr float INF = std::numeric_limits<float>::infinity();

using Vec = float __attribute__((vector_size(4 * LANES)));
using IntVec = int32_t __attribute__((vector_size(4 * LANES)));

inline Vec load(const float* x) {
  Vec v;
  std::memcpy(&v, x, sizeof v);
  return v;
}
inline void store(float* x, Vec v) { std::memcpy(x, &v, sizeof v); }
inline IntVec lane_numbers() {
  IntVec v;
  for (int i = 0; i < LANES; ++i) v[i] = i;
  return v;
}
inline Vec broadcast(float x) { return x - Vec{}; }  // the compiler drops - 0, but not + 0, which turns -0 into 0

// Divides a and b into blocks of 2 HALF lanes and adds the two halves of every block. In each block of the result, the
// first HALF lanes hold the sums of a, and the other HALF lanes hold the sums of b.
template <int HALF, int... LANE>
inline Vec add_halves(Vec a, Vec b, std::integer_sequence<int, LANE...>) {
  return __builtin_shufflevector(a, b, (LANE % (2 * HALF) < HALF ? LANE : LANE - HALF + LANES)...) +
         __builtin_shufflevector(a, b, (LANE % (2 * HALF) < HALF ? LANE + HALF : LANE + LANES)...);
}

// Adds up the lanes of LANES vectors. Lane i of the result is the sum of v[i]. Overwrites the vectors. HALF: leave the
// default; the function calls itself with HALF / 2 down to 1.
template <int HALF = LANES / 2>
inline Vec sums(Vec* v) {
  for (int i = 0; i < HALF; ++i) v[i] = add_halves<HALF>(v[i], v[i + HALF], std::make_integer_sequence<int, LANES>());
  if constexpr (HALF > 1)
    return sums<HALF / 2>(v);
  else
    return v[0];
}

// Returns v with the two halves of every block of 2 HALF lanes swapped.
template <int HALF, int... LANE>
inline Vec swap_halves(Vec v, std::integer_sequence<int, LANE...>) {
  return __builtin_shufflevector(v, v, (LANE ^ HALF)...);
}

template <int HALF = LANES / 2>
inline float sum(Vec v) {
  v += swap_halves<HALF>(v, std::make_integer_sequence<int, LANES>());
  if constexpr (HALF > 1) return sum<HALF / 2>(v);
  return v[0];
}

template <int HALF = LANES / 2>
inline float maximum(Vec v) {
  const Vec swapped = swap_halves<HALF>(v, std::make_integer_sequence<int, LANES>());
  v = v > swapped ? v : swapped;
  if constexpr (HALF > 1) return maximum<HALF / 2>(v);
  return v[0];
}

// Returns exp(x) for x <= 0, within 2 units in the last place. Results below the smallest normal number are 0. NaN
// stays NaN.
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
using Float16 = __fp16;  // GCC 12 has _Float16 only on x86-64
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

// For half precision GCC 12 compiles __builtin_convertvector to scalar code, and for uint16_t to twice the
// instructions.
inline Vec load(const BFloat16* x) {
#if defined(__AVX512F__)
  return (Vec)((IntVec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)) << 16);
#elif defined(__AVX2__)
  return (Vec)((IntVec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x)) << 16);
#else
  uint16_t __attribute__((vector_size(2 * LANES))) bits;
  std::memcpy(&bits, x, sizeof bits);
  return (Vec)(__builtin_convertvector(bits, IntVec) << 16);
#endif
}

inline Vec load(const Float16* x) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x));
#else
  Vec v;
  for (int i = 0; i < LANES; ++i) v[i] = to_float(x[i]);
  return v;
#endif
}

// An element of a quantized cache, defined in python/flashrope/calls/int8.py.
struct Int8 {
  int8_t code;
};
template <typename T>
constexpr bool IS_CODE = std::is_same_v<T, Int8>;

inline float to_float(Int8 x) { return x.code; }

inline Vec load(const Int8* x) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x)));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x)));
#else
  int8_t __attribute__((vector_size(LANES))) codes;
  std::memcpy(&codes, x, sizeof codes);
  return __builtin_convertvector(codes, Vec);
#endif
}

// Reads the first `count` channels of a row and converts them to float32.
template <typename T>
inline void convert(const T* x, float* y, int count) {
  int c = 0;
  for (; c + LANES <= count; c += LANES) store(y + c, load(x + c));
  for (; c < count; ++c) y[c] = to_float(x[c]);
}

// The same, with zeros up to a whole number of vectors.
template <typename T>
inline void convert_padded(const T* x, float* y, int count) {
  convert(x, y, count);
  std::fill(y + count, y + (count + LANES - 1) / LANES * LANES, 0.0f);
}

template <typename T>
constexpr float LARGEST = std::numeric_limits<float>::max();  // the largest finite number
template <>
inline constexpr float LARGEST<Float16> = 65504.0f;
template <>
inline constexpr float LARGEST<BFloat16> = 0x1.fep127f;

// Quantizes a row. Returns its scale.
template <typename T>
float quantize(const T* x, int head_dim, Int8* out) {
  constexpr float largest_code = 127, magic = 12582912;  // see exp
  alignas(64) float numbers[MAX_HEAD_DIM];
  alignas(64) int32_t codes[MAX_HEAD_DIM];
  const int padded_dim = (head_dim + LANES - 1) / LANES * LANES;
  convert_padded(x, numbers, head_dim);
  const Vec limit = broadcast(LARGEST<T>);
  Vec highest{}, nan{};
  for (int c = 0; c < padded_dim; c += LANES) {
    Vec v = load(numbers + c);
    nan = v != v ? broadcast(1) : nan;
    v = v > limit ? limit : v < -limit ? -limit : v;
    store(numbers + c, v);
    const Vec size = v < Vec{} ? -v : v;
    highest = size > highest ? size : highest;
  }
  const float scale = sum(nan) != 0 ? std::numeric_limits<float>::quiet_NaN() : maximum(highest) / largest_code;
  for (int c = 0; c < padded_dim; c += LANES) {
    const Vec v = load(numbers + c) / scale;
    const IntVec code = (IntVec)(v + magic) - (IntVec)broadcast(magic);
    const IntVec low = IntVec{} - int32_t(largest_code), high = -low;
    const IntVec clamped = code > high ? high : code < low ? low : code;
    const IntVec written = scale > 0 ? clamped : IntVec{};
    std::memcpy(codes + c, &written, sizeof written);
  }
  for (int c = 0; c < head_dim; ++c) out[c].code = int8_t(codes[c]);
  return scale;
}

inline void from_float(float x, float* y) { *y = x; }
inline void from_float(float x, Float16* y) { *y = Float16(x); }
inline void from_float(float x, BFloat16* y) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  y->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// ---- tensors

struct TensorView {  // strides are in elements; channels are contiguous
  void* data;
  int64_t stride_batch, stride_row, stride_head;

  template <typename T>
  T* row(int64_t b, int64_t row, int64_t head) const {
    return static_cast<T*>(data) + b * stride_batch + row * stride_row + head * stride_head;
  }
};

// Query row r is at position shift + r and sees, in this band, the keys [first_key, end_key).
struct Band {
  int64_t start, stop;  // distances, or differences of chunks if chunk is set; +-2^40 stands for infinity
  int64_t chunk;        // chunk length; 0: start and stop are distances

  int64_t first_key(int64_t position) const {
    const int64_t first = chunk ? (position / chunk - stop + 1) * chunk : position - stop + 1;
    return first > 0 ? first : 0;
  }
  int64_t end_key(int64_t position, int64_t keys) const {
    int64_t end = position - start + 1;
    if (chunk && position >= 0) end = std::min((position / chunk - start + 1) * chunk, position + 1);
    return std::clamp<int64_t>(end, 0, keys);
  }
  // Rows at the positions [first_position, end_position) see the key.
  int64_t first_position(int64_t key) const {
    return chunk ? std::max((key / chunk + start) * chunk, key) : key + start;
  }
  int64_t end_position(int64_t key) const { return chunk ? (key / chunk + stop) * chunk : key + stop; }
};

struct Pairs {
  int count;
  bool interleaved;  // true: pair m is channels first + 2 m and first + 2 m + 1; false: first + m and first + m + count
  int first = 0;
};

// Rotates x by one angle per pair. cos, sin: one number per pair.
template <typename T>
inline void rotate(const T* x, float* y, const float* cos, const float* sin, Pairs pairs, int head_dim) {
  for (int c = 0; c < pairs.first; ++c) y[c] = to_float(x[c]);
  x += pairs.first, y += pairs.first, head_dim -= pairs.first;
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

// ---- memory

struct Free {
  void operator()(void* x) const { std::free(x); }
};

// Returns memory for `count` numbers of 4 bytes, or nullptr if memory runs out. Large arrays get huge pages if the system
// has them: the first write to each page is a page fault, and a page of 4 KB holds few numbers.
template <typename T>
std::unique_ptr<T[], Free> allocate(int64_t count) {
  constexpr int64_t LINE = 64, HUGE_PAGE = 2 << 20;
  const int64_t bytes = count * 4, alignment = bytes < HUGE_PAGE ? LINE : HUGE_PAGE;
  void* memory;
  if (posix_memalign(&memory, alignment, bytes + LINE)) return nullptr;
#ifdef MADV_HUGEPAGE
  if (alignment == HUGE_PAGE) madvise(memory, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
#endif
  return std::unique_ptr<T[], Free>(static_cast<T*>(memory));
}

using Floats = std::unique_ptr<float[], Free>;

inline Floats floats(int64_t count) { return allocate<float>(count); }

// ---- threads

using ParallelFor = int32_t (*)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);

// Calls work(n) once for every n < count. A thread takes the next n when it is free, so a slow thread does not hold up
// the others.
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

}  // namespace flashrope
