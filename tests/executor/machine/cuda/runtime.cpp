// Replaces libcudart and libtorch_cuda for the CUDA extension, so that its own host code launches on the executor. It
// has the few functions that nvcc's host code, csrc/ptx.h and csrc/library.cpp call.
//
// Python passes the PTX. The host code registers kernels under names, by which they are found in the PTX.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <string>

extern "C" {  // the executor, tests/executor/library.cpp
int cuModuleLoadData(void** module, const void* image);
int cuModuleGetFunction(void** function, void* module, const char* name);
int cuModuleUnload(void* module);
int cuDeviceGetAttribute(int* value, int attribute, int device);
int cuGetErrorString(int error, const char** text);
int cuLaunchKernelEx(const void* config, void* function, void** parameters, void** extra);
}

namespace {

constexpr size_t SHARED_WITHOUT_ASKING = 48 << 10;

struct Kernel {
  std::string name;
  size_t dynamic_shared = SHARED_WITHOUT_ASKING;  // upper limit
};

struct Call {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

struct DriverConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  void *stream, *attributes;
  unsigned attribute_count;
};

struct State {
  std::map<const void*, Kernel> kernels;  // {address of the host function: kernel}
  Call call;
  void* module = nullptr;
  cudaError_t error = cudaSuccess;
  std::string message;
};

State& state() {
  static State s;
  return s;
}

cudaError_t fail(cudaError_t error, const std::string& message) {
  state().error = error, state().message = message;
  return error;
}

cudaError_t driver_error(int error) {
  const char* text = "";
  cuGetErrorString(error, &text);
  return fail(static_cast<cudaError_t>(error), text);
}

cudaError_t launch(const void* host, dim3 grid, dim3 block, void** parameters, size_t shared, cudaStream_t stream) {
  const Kernel& kernel = state().kernels.at(host);
  if (!state().module) return fail(cudaErrorNoKernelImageForDevice, "no PTX was handed over");
  if (shared > kernel.dynamic_shared)
    return fail(cudaErrorInvalidValue, "launched with " + std::to_string(shared) +
                                           " bytes of shared memory, allowed are " +
                                           std::to_string(kernel.dynamic_shared));
  void* function;
  if (int error = cuModuleGetFunction(&function, state().module, kernel.name.c_str())) return driver_error(error);
  const DriverConfig config{
      {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, unsigned(shared), stream, nullptr, 0};
  if (int error = cuLaunchKernelEx(&config, function, parameters, nullptr)) return driver_error(error);
  return cudaSuccess;
}

}  // namespace

extern "C" {

// ---- for Python

__attribute__((visibility("default"))) const char* runtime_use_ptx(const char* text) {
  void* module;
  if (int error = cuModuleLoadData(&module, text)) return driver_error(error), state().message.c_str();
  if (state().module) cuModuleUnload(state().module);
  state().module = module;
  return nullptr;
}

// ---- libcudart

void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  state().kernels[host] = {name};
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  state().call = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Call& call = state().call;
  *grid = call.grid, *block = call.block, *shared = call.shared, *static_cast<cudaStream_t*>(stream) = call.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** parameters, size_t shared,
                               cudaStream_t stream) {
  return launch(kernel, grid, block, parameters, shared, stream);
}
cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** parameters, size_t shared,
                             cudaStream_t stream) {  // before CUDA 13
  return launch(host, grid, block, parameters, shared, stream);
}

cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
  int limit = 0;
  cuDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > limit)
    return fail(cudaErrorInvalidValue,
                "a kernel cannot have " + std::to_string(value) + " bytes of shared memory, a block has " +
                    std::to_string(limit));
  state().kernels.at(host).dynamic_shared = value;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = state().error;
  state().error = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t) { return state().message.c_str(); }

// ---- libtorch_cuda

int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
int32_t aoti_torch_create_device_guard(int32_t, void** guard) {
  *guard = nullptr;
  return 0;
}
int32_t aoti_torch_delete_device_guard(void*) { return 0; }

}  // extern "C"
