// Wraps what decode.cu uses beyond plain CUDA C++: tensor-core and copy instructions, the two-byte types, dynamic
// shared memory, and the launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace flashrope {

struct Float16 {
  static __device__ uint32_t pack(float low, float high) {
    __half2 x = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t&>(x);
  }
  static __device__ float2 unpack(uint32_t x) { return __half22float2(reinterpret_cast<__half2&>(x)); }
};

struct BFloat16 {
  static __device__ uint32_t pack(float low, float high) {
    __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t&>(x);
  }
  static __device__ float2 unpack(uint32_t x) { return __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(x)); }
};

__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char bytes[];
  return bytes;
}

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, bypassing L1, because a cache row is read once.
__device__ inline void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's groups are in flight.
template <int PENDING>
__device__ inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads four 8x8 matrices of two-byte elements. Lane l passes the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}

// Computes c (16x8, float32) += a (16x16) b (16x8).
template <typename T>
__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void multiply<Float16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply<BFloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Launches a kernel. Returns null, or CUDA's error message.
template <typename Params>
const char* launch(void (*kernel)(Params), dim3 grid, int threads, size_t shared, void* stream, const Params& params) {
  const bool ready = shared <= 48 * 1024 ||
                     cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(shared)) == cudaSuccess;
  void* arguments[] = {const_cast<Params*>(&params)};
  if (ready && cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(threads), arguments, shared,
                                static_cast<cudaStream_t>(stream)) == cudaSuccess) {
    return nullptr;  // leaves an earlier error of other code for that code to read
  }
  return cudaGetErrorString(cudaGetLastError());  // clears the error, so that other code does not find it
}

}  // namespace flashrope
