// The host twin of csrc/ptx.h. Compiled with this header, decode.cu runs on the CPU, so its device code is tested
// without a GPU.
//
// The threads of a block are fibers that switch at barriers and warp collectives. ldmatrix and mma.m16n8k16 follow the
// fragment layouts of the PTX ISA ("Warp-level matrix instructions"). Shared memory starts as NaN. An asynchronous copy
// lands at once or, with FLASHROPE_EMULATED_COPIES=late, only at the wait for it; correct code gives the same results.
// The launch fails where an address is outside shared memory or not a multiple of 16 bytes, and where lanes of a warp
// call different collectives at the same time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct float2 {
  float x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
using std::max;
using std::min;

inline dim3 threadIdx, blockIdx, blockDim;

namespace flashrope::emulator {

struct Copy {
  void* to;
  const void* from;
};

struct Fiber {
  ucontext_t context;
  jmp_buf at;
  std::vector<char> stack = std::vector<char>(64 << 10);
  bool started, done;
  std::vector<std::vector<Copy>> groups;  // committed copies in flight
  std::vector<Copy> open;                 // not committed yet
};

// The inputs and outputs of one collective of a warp. A warp has two, because a lane may reach the next collective
// before the others have read the results of this one.
struct Collective {
  const char* what = "";
  uint32_t in[32][8], out[32][4];
};

struct Warp {
  Collective collectives[2];
  unsigned generation = 0, arrived = 0;
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline std::vector<unsigned char> shared_buffer;
inline unsigned char* shared_base;
inline size_t shared_size;
inline unsigned current, running, barrier_generation, barrier_arrived, idle;
inline jmp_buf main_at;
inline std::function<void()> body;
inline std::string error;
inline bool late;

inline void fail(const std::string& what) {
  if (error.empty()) error = what + " (block " + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
                             std::to_string(blockIdx.z) + ", thread " + std::to_string(threadIdx.x) + ")";
}

[[noreturn]] inline void resume(unsigned thread) {
  current = thread;
  threadIdx.x = thread;
  Fiber& fiber = fibers[thread];
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  setcontext(&fiber.context);
  std::abort();
}

[[noreturn]] inline void resume_next() {
  for (unsigned i = 1; i <= blockDim.x; ++i) {
    const unsigned thread = (current + i) % blockDim.x;
    if (!fibers[thread].done) resume(thread);
  }
  _longjmp(main_at, 1);
}

inline void yield() {
  if (++idle > 1000 * blockDim.x) {
    std::fprintf(stderr, "emulator: every thread waits\n");
    std::abort();
  }
  if (!_setjmp(fibers[current].at)) resume_next();
}

inline void entry() {
  body();
  Fiber& fiber = fibers[current];
  fiber.done = true;
  for (const auto& group : fiber.groups) if (!group.empty()) fail("a copy in flight at the end");
  if (!fiber.open.empty()) fail("a copy not committed at the end");
  --running;
  idle = 0;
  if (running && barrier_arrived == running) ++barrier_generation, barrier_arrived = 0;
  resume_next();
}

// Hands in `in`, waits until all 32 lanes have called this with the same name, and returns this lane's results. act
// runs once, on the inputs of all lanes.
template <typename Act>
uint32_t* run_collective(const char* what, const uint32_t* in, int count, Act act) {
  Warp& warp = warps[threadIdx.x / 32];
  const unsigned lane = threadIdx.x % 32, generation = warp.generation;
  Collective& collective = warp.collectives[generation % 2];
  if (warp.arrived == 0) collective.what = what;
  if (std::strcmp(collective.what, what)) fail(std::string("lanes call ") + collective.what + " and " + what);
  std::copy(in, in + count, collective.in[lane]);
  if (++warp.arrived == 32) {
    act(collective);
    warp.arrived = 0;
    ++warp.generation;
    idle = 0;
  }
  while (warp.generation == generation) yield();
  return collective.out[lane];
}

inline const uint16_t* checked_shared(const void* pointer, const char* what) {
  const auto* address = static_cast<const unsigned char*>(pointer);
  if (address < shared_base || address + 16 > shared_base + shared_size)
    return fail(std::string(what) + " outside shared memory"), nullptr;
  if (reinterpret_cast<uintptr_t>(address) % 16) return fail(std::string(what) + " at an odd address"), nullptr;
  return static_cast<const uint16_t*>(pointer);
}

inline void run_block(unsigned threads, size_t shared) {
  blockDim = dim3(threads);
  shared_buffer.assign(shared + 16, 0xff);
  const auto begin = reinterpret_cast<uintptr_t>(shared_buffer.data());
  shared_base = shared_buffer.data() + (16 - begin % 16) % 16, shared_size = shared;
  if (fibers.size() < threads) fibers.resize(threads);
  warps.assign(threads / 32, Warp());
  barrier_generation = barrier_arrived = idle = 0, running = threads;
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.started = fiber.done = false;
    fiber.groups.clear(), fiber.open.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
  }
  if (!_setjmp(main_at)) resume(0);
}

inline float bits_to_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline uint32_t float_to_bits(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}

}  // namespace flashrope::emulator

inline void __syncthreads() {
  using namespace flashrope::emulator;
  const unsigned generation = barrier_generation;
  if (++barrier_arrived == running) ++barrier_generation, barrier_arrived = 0, idle = 0;
  while (barrier_generation == generation) yield();
}

inline void __syncwarp() {
  flashrope::emulator::run_collective("syncwarp", nullptr, 0, [](auto&) {});
}

template <typename V>
V __shfl_sync(unsigned, V value, int lane) {
  uint32_t in[2];
  std::memcpy(in, &value, 4), in[1] = lane;
  const uint32_t* out = flashrope::emulator::run_collective("shfl", in, 2, [](auto& m) {
    for (int to = 0; to < 32; ++to) m.out[to][0] = m.in[m.in[to][1] % 32][0];
  });
  std::memcpy(&value, out, 4);
  return value;
}

template <typename V>
V __shfl_xor_sync(unsigned mask, V value, int step) {
  return __shfl_sync(mask, value, threadIdx.x % 32 ^ step);
}

namespace flashrope {

struct Float16 {
  static float wide(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 0x3ff;
    if (exponent == 0) return std::copysign(std::ldexp(float(fraction), -24), sign ? -1.0f : 1.0f);
    return emulator::bits_to_float(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
  }
  static uint16_t narrow(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return 0x7fff;
    x = std::fabs(x);
    if (x >= 65520) return sign | 0x7c00;
    if (x == 0) return sign;
    int exponent;
    std::frexp(x, &exponent);  // x in [2^(exponent - 1), 2^exponent)
    exponent = std::max(exponent - 1, -14);
    const int fraction = int(std::nearbyint(std::ldexp(x, 10 - exponent)));  // to nearest even; 2048 carries over
    return sign | uint16_t(((exponent + 14) << 10) + fraction);
  }
  static uint32_t pack(float low, float high) { return narrow(low) | uint32_t(narrow(high)) << 16; }
  static float2 unpack(uint32_t x) { return {wide(x & 0xffff), wide(x >> 16)}; }
};

struct BFloat16 {
  static float wide(uint16_t x) { return emulator::bits_to_float(uint32_t(x) << 16); }
  static uint16_t narrow(float x) {
    if (std::isnan(x)) return 0x7fff;
    const uint32_t bits = emulator::float_to_bits(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static uint32_t pack(float low, float high) { return narrow(low) | uint32_t(narrow(high)) << 16; }
  static float2 unpack(uint32_t x) { return {wide(x & 0xffff), wide(x >> 16)}; }
};

inline unsigned char* shared_memory() { return emulator::shared_base; }

inline void copy_async(void* shared, const void* global) {
  if (!emulator::checked_shared(shared, "copy")) return;
  if (reinterpret_cast<uintptr_t>(global) % 16) return emulator::fail("copy from an odd address");
  std::memset(shared, 0xff, 16);
  emulator::fibers[emulator::current].open.push_back({shared, global});
  if (!emulator::late) std::memcpy(shared, global, 16);
}

inline void copy_commit() {
  auto& fiber = emulator::fibers[emulator::current];
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}

template <int PENDING>
void copy_wait() {
  auto& groups = emulator::fibers[emulator::current].groups;
  while (groups.size() > PENDING) {
    if (emulator::late) for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
    groups.erase(groups.begin());
  }
}

namespace emulator {

template <bool TRANSPOSED>
void load_matrices(uint32_t (&x)[4], const void* row) {
  uint32_t in[2];
  std::memcpy(in, &row, 8);
  const uint32_t* out = run_collective(TRANSPOSED ? "ldmatrix.trans" : "ldmatrix", in, 2, [](Collective& m) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t numbers[8][8] = {};
      for (int r = 0; r < 8; ++r) {
        const void* address;
        std::memcpy(&address, m.in[matrix * 8 + r], 8);
        if (const uint16_t* from = checked_shared(address, "ldmatrix")) std::memcpy(numbers[r], from, 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int r = lane / 4, c = lane % 4 * 2;
        const uint16_t low = TRANSPOSED ? numbers[c][r] : numbers[r][c];
        const uint16_t high = TRANSPOSED ? numbers[c + 1][r] : numbers[r][c + 1];
        m.out[lane][matrix] = low | uint32_t(high) << 16;
      }
    }
  });
  std::copy(out, out + 4, x);
}

// mma.m16n8k16.row.col. A lane holds, with g = lane / 4 and t = lane % 4,
//   of a: columns 2t and 2t + 1 of rows g and g + 8, then columns 2t + 8 and 2t + 9 of the same rows,
//   of b: rows 2t and 2t + 1 of column g, then rows 2t + 8 and 2t + 9,
//   of c: columns 2t and 2t + 1 of row g, then of row g + 8.
template <typename T>
void multiply_warp(Collective& m, float (&c)[16][8]) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const float2 x = T::unpack(m.in[lane][i]);
      a[g + i % 2 * 8][2 * t + i / 2 * 8] = x.x, a[g + i % 2 * 8][2 * t + i / 2 * 8 + 1] = x.y;
    }
    for (int i = 0; i < 2; ++i) {
      const float2 x = T::unpack(m.in[lane][4 + i]);
      b[2 * t + i * 8][g] = x.x, b[2 * t + i * 8 + 1][g] = x.y;
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      c[row][column] = 0;
      for (int k = 0; k < 16; ++k) c[row][column] += a[row][k] * b[k][column];
    }
  }
}

}  // namespace emulator

inline void load_matrices(uint32_t (&x)[4], const void* row) { emulator::load_matrices<false>(x, row); }
inline void load_matrices_transposed(uint32_t (&x)[4], const void* row) { emulator::load_matrices<true>(x, row); }

template <typename T>
void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t in[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const uint32_t* out = emulator::run_collective("mma", in, 6, [](emulator::Collective& m) {
    float product[16][8];
    emulator::multiply_warp<T>(m, product);
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        m.out[lane][i] = emulator::float_to_bits(product[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
      }
    }
  });
  for (int i = 0; i < 4; ++i) c[i] += emulator::bits_to_float(out[i]);
}

inline float exp2_approx(float x) { return std::exp2(x); }

template <typename Params>
const char* launch(void (*kernel)(Params), dim3 grid, int threads, size_t shared, void*, const Params& params) {
  const char* copies = std::getenv("FLASHROPE_EMULATED_COPIES");
  emulator::late = copies && !std::strcmp(copies, "late");
  emulator::error.clear();
  emulator::body = [&] { kernel(params); };
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) emulator::run_block(threads, shared);
    }
  }
  return emulator::error.empty() ? nullptr : emulator::error.c_str();
}

}  // namespace flashrope
