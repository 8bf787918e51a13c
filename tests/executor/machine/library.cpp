// Replaces libcuda for Triton's launcher. It has the few driver functions that the launcher calls, and the functions by
// which Python says which tensors exist and asks what was seen.
//
// A module's image is PTX text, which a real driver accepts too. The state is global, as in a driver. Only one thread
// at a time may call.
#include <chrono>
#include <cstdint>
#include <map>
#include <sstream>

#include "machine.h"

namespace executor {
namespace {

struct Pending {
  std::string name;
  uint64_t base, bytes;
};

struct State {
  int arch = 80;
  Options options;
  std::vector<Pending> buffers;
  std::string error, results;
  std::vector<std::string> launches;
};

State& state() {
  static State s;
  return s;
}

struct Module {
  std::string text, first;  // first: the name of its first kernel
  std::map<std::string, std::unique_ptr<Program>> kernels;

  explicit Module(const char* image) : text(image) {
    auto program = std::make_unique<Program>(parse(text, state().arch));
    first = program->name, kernels[first] = std::move(program);
  }
  Program* kernel(const std::string& name) {  // "": the first
    auto& found = kernels[name.empty() ? first : name];
    if (!found) found = std::make_unique<Program>(parse(text, state().arch, name));
    return found.get();
  }
};

uint32_t shared_limit() {
  const int arch = state().arch;
  return (arch >= 90 && arch < 120 ? 227 : arch == 80 ? 163 : 99) << 10;
}

std::string quoted(const std::string& s) {
  std::string text = "\"";
  for (char c : s) {
    if (c == '"' || c == '\\') text += '\\';
    if (static_cast<unsigned char>(c) < 32) c = ' ';
    text += c;
  }
  return text + "\"";
}

std::string describe(const Launch& launch, double seconds) {
  std::ostringstream s;
  const Program& p = launch.program;
  s << "{\"function\": " << reinterpret_cast<uint64_t>(&p) << ", \"kernel\": " << quoted(p.name) << ", \"grid\": ["
    << launch.grid[0] << ", " << launch.grid[1] << ", " << launch.grid[2] << "], \"threads\": " << launch.threads
    << ", \"shared_bytes\": " << launch.shared_bytes << ", \"seconds\": " << seconds << ", \"findings\": [";
  for (size_t n = 0; n < launch.findings.size(); n++) s << (n ? ", " : "") << quoted(launch.findings[n]);
  std::map<std::string, std::pair<uint64_t, uint64_t>> opcodes;
  for (size_t n = 0; n < p.code.size(); n++)
    opcodes[p.code[n].opcode].first += launch.executed[n], opcodes[p.code[n].opcode].second += launch.lanes[n];
  s << "], \"opcodes\": {";
  const char* comma = "";
  for (auto& [name, counts] : opcodes)
    s << comma << quoted(name) << ": [" << counts.first << ", " << counts.second << "]", comma = ", ";
  s << "}, \"executed_lines\": [";
  comma = "";
  for (size_t n = 0; n < p.code.size(); n++)
    if (launch.lanes[n] || (launch.executed[n] && p.code[n].guard < 0)) s << comma << p.code[n].line, comma = ", ";
  s << "], \"tensors\": {";
  comma = "";
  for (auto& b : launch.buffers) {
    s << comma << quoted(b->name) << ": [" << b->bytes << ", " << b->read << ", " << b->written << ", "
      << 32 * b->sectors_read << ", " << 32 * b->sectors_written << ", " << b->distinct_read << "]";
    comma = ", ";
  }
  s << "}}";
  return s.str();
}

// Checks a launch as the driver would.
void check(const Program& program, const uint32_t* grid, const uint32_t* block, uint32_t shared) {
  const uint32_t threads = block[0];
  const std::string launched = "launched with " + std::to_string(threads) + " threads, ";
  if (program.threads && threads != static_cast<uint32_t>(program.threads))
    throw Error(launched + "compiled for " + std::to_string(program.threads));
  if (program.max_threads && threads > static_cast<uint32_t>(program.max_threads))
    throw Error(launched + "compiled for at most " + std::to_string(program.max_threads));
  if (!threads || threads % LANES || threads > 512 || block[1] != 1 || block[2] != 1)
    throw Error(launched + "expected a multiple of 32 up to 512, in one dimension");
  if (!grid[0] || !grid[1] || !grid[2] || grid[0] > INT32_MAX || grid[1] > UINT16_MAX || grid[2] > UINT16_MAX)
    throw Error("launched with a grid of (" + std::to_string(grid[0]) + ", " + std::to_string(grid[1]) + ", " +
                std::to_string(grid[2]) + ")");
  if (shared > shared_limit())
    throw Error("launched with " + std::to_string(shared) + " bytes of shared memory, the device has " +
                std::to_string(shared_limit()));
}

void execute(const Program& program, const uint32_t* grid, const uint32_t* block, uint32_t dynamic, void** parameters) {
  const uint32_t shared = program.static_shared_bytes + dynamic;
  check(program, grid, block, shared);
  Launch launch(program);
  launch.options = state().options, launch.threads = block[0], launch.shared_bytes = shared;
  for (int n = 0; n < 3; n++) launch.grid[n] = grid[n];
  for (size_t n = 0; n < program.parameters.size(); n++) {
    const Parameter& p = program.parameters[n];
    launch.parameters.resize(p.offset + p.bytes);
    memcpy(&launch.parameters[p.offset], parameters[n], p.bytes);
  }
  for (const Pending& b : state().buffers) launch.buffers.push_back(std::make_unique<Buffer>(b.name, b.base, b.bytes));
  auto began = std::chrono::steady_clock::now();
  launch.run();
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  state().launches.push_back(describe(launch, seconds));
}

// Returns the CUresult of a body. If the body throws, cuGetErrorString returns the exception's message.
template <class F>
int guarded(int failure, F body) {
  try {
    body();
    return 0;
  } catch (const std::exception& e) {
    state().error = std::string(e.what()).substr(0, 900);  // Triton's buffer has 1024 bytes
    return failure;
  }
}

}  // namespace
}  // namespace executor

using namespace executor;

extern "C" {

// ---- for Python

void executor_configure(int arch, int threads, uint64_t seed, uint64_t step_limit, uint32_t last_blocks) {
  state().arch = arch, state().options = {threads, seed, step_limit, last_blocks};
}
void executor_clear_tensors() { state().buffers.clear(); }
void executor_add_tensor(const char* name, uint64_t base, uint64_t bytes) {
  state().buffers.push_back({name, base, bytes});
}

// Returns the launches since the last call as a JSON list.
const char* executor_take_launches() {
  std::string text = "[";
  for (const std::string& launch : state().launches) text += (text.size() > 1 ? ", " : "") + launch;
  state().launches.clear();
  state().results = text + "]";
  return state().results.c_str();
}

// ---- the CUDA driver's interface

struct LaunchConfig {  // CUlaunchConfig
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
  void* attributes;
  uint32_t attribute_count;
};

constexpr int CUDA_ERROR_INVALID_PTX = 218, CUDA_ERROR_LAUNCH_FAILED = 719;
constexpr int DEVICE_SHARED_PER_BLOCK = 97, FUNCTION_MAX_THREADS = 0;

int cuGetErrorString(int, const char** text) {
  *text = state().error.c_str();
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == DEVICE_SHARED_PER_BLOCK ? shared_limit() : 0;
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = &state();
  return 0;
}
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxGetDevice(int* device) { return cuDeviceGet(device, state().arch); }
int cuStreamIsCapturing(void*, int* capturing) {
  *capturing = 0;
  return 0;
}
int cuCtxGetLimit(size_t* value, int) {
  *value = 0;
  return 0;
}
int cuCtxSetLimit(int, size_t) { return 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return cuCtxGetCurrent(context); }
int cuModuleLoadData(void** module, const void* image) {
  return guarded(CUDA_ERROR_INVALID_PTX, [&] { *module = new Module(static_cast<const char*>(image)); });
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  return guarded(CUDA_ERROR_INVALID_PTX, [&] { *function = static_cast<Module*>(module)->kernel(name); });
}
int cuModuleUnload(void* module) {
  delete static_cast<Module*>(module);
  return 0;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  const Program& p = *static_cast<Program*>(function);
  *value = attribute != FUNCTION_MAX_THREADS ? 0 : p.threads ? p.threads : p.max_threads ? p.max_threads : 512;
  return 0;
}
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuFuncSetCacheConfig(void*, int) { return 0; }
int cuPointerGetAttribute(void* value, int, uint64_t pointer) {
  memcpy(value, &pointer, sizeof pointer);
  return 0;
}
int cuLaunchKernelEx(const LaunchConfig* c, void* function, void** parameters, void**) {
  return guarded(CUDA_ERROR_LAUNCH_FAILED,
                 [&] { execute(*static_cast<Program*>(function), c->grid, c->block, c->shared_bytes, parameters); });
}

}  // extern "C"
