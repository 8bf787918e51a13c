// The parts that run a Program: the launch, its blocks (one at a time per thread), their warps, and the memory with the
// records of its accesses.
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "ptx.h"

namespace executor {

constexpr uint32_t ADDED = 1u << 31;
constexpr uint32_t POISON = 0x7FFFDEAD;  // a NaN, and not a plausible address or length

// A record for every two bytes of a tensor, initially 0. Tensors may be sparse: untouched pages take no memory.
template <class T>
class Notes {
 public:
  explicit Notes(uint64_t count);
  ~Notes();
  Notes(const Notes&) = delete;
  Notes& operator=(const Notes&) = delete;
  std::atomic<T>& operator[](uint64_t n) { return first_[n]; }

 private:
  std::atomic<T>* first_;
  uint64_t bytes_;
};

// A tensor that a kernel may access.
struct Buffer {
  std::string name;
  uint64_t base, bytes;
  // Both have an entry for every two bytes. writer: 1 + the index of the block that wrote them, plus the bit ADDED if
  // that block added atomically; only ADDED if several blocks added. was_read: whether the bytes were read.
  Notes<uint32_t> writer;
  Notes<bool> was_read;
  std::atomic<uint64_t> read{0}, written{0};                  // bytes that lanes requested
  std::atomic<uint64_t> sectors_read{0}, sectors_written{0};  // of 32-byte sectors, each once per warp instruction
  std::atomic<uint64_t> distinct_read{0};                     // bytes read at least once

  Buffer(std::string name, uint64_t base, uint64_t bytes);
};

struct Options {
  int threads = 1;
  uint64_t seed = 0;                 // 0: blocks and warps in order, each warp up to its next barrier
  uint64_t step_limit = 50'000'000;  // the most instructions that a block may run
  uint32_t last_blocks = 0;          // run only this many blocks at the end of the grid; 0: all
};

struct Launch {
  const Program& program;
  uint32_t grid[3];
  uint32_t threads;       // per block
  uint32_t shared_bytes;  // static and dynamic
  std::vector<unsigned char> parameters;
  std::vector<std::unique_ptr<Buffer>> buffers;
  Options options;

  std::mutex mutex;
  std::set<std::pair<int, std::string>> reported;
  std::vector<std::string> findings;
  std::atomic<bool> stopped{false};
  std::atomic<uint32_t> next_block{0};
  std::vector<std::atomic<uint64_t>> executed, lanes;  // per instruction: how often warps and lanes ran it

  explicit Launch(const Program& p) : program(p), executed(p.code.size()), lanes(p.code.size()) {}
  void run();
};

// The state of four bytes of shared memory. A barrier ends an epoch.
struct Word {
  uint64_t writers = 0, readers = 0;  // 16 bits per byte: the warps that wrote or read it in the epochs below
  uint32_t write_epoch = 0, read_epoch = 0;
  uint32_t write_sync = 0, read_meeting = 0;  // the warp's syncs at its last write, its meetings at its last read
  Lanes read_lanes = 0;                       // the lanes of read_warp that have read since that meeting
  int8_t write_lane = -1, read_warp = -1;
  int8_t copying = -1;            // warp whose cp.async has not arrived
  uint8_t initialised = 0;        // one bit per byte
  uint16_t products = 0;          // unfinished wgmma that read it
  uint16_t unfenced_writers = 0;  // warps that wrote it and have not fenced since
  uint16_t unfenced = 0;          // warps whose wgmma may not see the last write yet
};

class SharedMemory {
 public:
  explicit SharedMemory(uint32_t bytes);
  void clear();
  void next_epoch() { epoch_++; }
  uint32_t epoch() const { return epoch_; }
  uint32_t size() const { return size_; }
  unsigned char* data(uint32_t offset) { return &bytes_[offset]; }

  // Returns the offset of an access. If it is out of bounds or not sufficiently aligned, reports a
  // finding and returns -1.
  int64_t locate(uint32_t address, uint32_t bytes, const Warp& w, const Instruction& i, int lane);
  void read(uint32_t offset, uint32_t bytes, const Warp& w, const Instruction& i, int lane);
  void write(uint32_t offset, const void* data, uint32_t bytes, const Warp& w, const Instruction& i, int lane);
  void begin_copy(uint32_t offset, uint32_t bytes, const Warp& w, const Instruction& i, int lane);
  void end_copy(uint32_t offset, const void* data, uint32_t bytes, const Warp& w, int lane);
  void begin_product_read(uint32_t offset, const Warp& w, const Instruction& i);
  void end_product_read(uint32_t offset, const Warp& w);
  void fence(const Warp& w);

 private:
  void note_read(uint32_t offset, uint32_t bytes, const Warp& w, const Instruction& i, int lane);
  void note_write(uint32_t offset, uint32_t bytes, const Warp& w, const Instruction& i, int lane, const void* data);
  void race(const char* kind, uint32_t word, const Warp& w, const Instruction& i, int lane);

  uint32_t size_, epoch_ = 1;
  std::vector<unsigned char> bytes_;
  std::vector<Word> words_;
  std::vector<uint32_t> unfenced_;  // words with a write that no fence followed
};

struct Copy {
  uint32_t to, bytes;
  int lane;
  unsigned char data[16];
};

// A running wgmma. Its descriptors are read when it starts. The matrices that they point to are read when the warp
// waits for it.
struct Product {
  const Instruction* instruction;
  uint64_t a, b;
  bool accumulate;
};

enum Busy : uint8_t { FREE = 0, ACCUMULATOR = 1, A_OPERAND = 2 };

struct Block;
struct Warp {
  Block* block = nullptr;
  int index = 0;
  uint32_t* registers = nullptr;
  Lanes* defined = nullptr;             // per slot: the lanes that were written; a 64-bit register has two slots
  uint32_t* unknown = nullptr;          // per slot and lane: the bits that were not written
  std::vector<uint8_t> busy, unfenced;  // per slot, in kernels that use wgmma
  int pc = 0;
  int lane_pc[LANES] = {};
  bool diverged = false, at_barrier = false;
  int barrier_line = 0;
  Lanes alive = ALL_LANES;
  // syncs counts bar.warp.sync instructions, which order memory. meetings also counts shuffles: after a shuffle, earlier
  // loads have ended.
  uint32_t syncs = 0, meetings = 0;
  std::vector<Copy> open_copies;
  std::deque<std::vector<Copy>> copies;
  std::vector<Product> open_products;
  std::deque<std::vector<Product>> products;

  template <class T>
  T* at(const Operand& o) {
    return reinterpret_cast<T*>(registers + LANES * o.slot);
  }
  Lanes predicate(int slot) const {
    const uint32_t* p = registers + LANES * slot;
    Lanes lanes = 0;
    for (int l = 0; l < LANES; l++) lanes |= (p[l] & 1) << l;
    return lanes;
  }
};

struct Block {
  Launch& launch;
  uint32_t index[3] = {}, linear = 0;
  SharedMemory shared;
  std::vector<Warp> warps;
  std::vector<uint32_t> register_file, unknown;
  std::vector<Lanes> defined;
  std::vector<uint64_t> executed, lanes;
  uint64_t steps = 0;
  size_t last_buffer = 0;

  explicit Block(Launch& launch);
  void run(uint32_t linear);

  // The next three return the tensor of a global access, or its bytes, and count the access. Outside all tensors, they
  // report a finding and return null.
  Buffer* place(uint64_t address, uint32_t bytes, const Warp& w, const Instruction& i, int lane, bool write);
  unsigned char* global(uint64_t address, uint32_t bytes, const Warp& w, const Instruction& i, int lane, bool write);
  unsigned char* global_add(uint64_t address, uint32_t bytes, const Warp& w, const Instruction& i, int lane);
  void count_sectors(const uint64_t* addresses, int64_t offset, uint32_t bytes, Lanes lanes, bool write);
  void report(const std::string& kind, const Warp& w, const Instruction& i, int lane, const std::string& detail);

 private:
  void start_warps();
  void advance(Warp& w, uint64_t quantum);
  void check_registers(Warp& w, const Instruction& i, Lanes lanes);
  void end_lanes(Warp& w, const Instruction& i, Lanes lanes);
  bool release_barrier();
  Buffer* find_buffer(uint64_t address, uint32_t bytes);
  std::string nearest_buffer(uint64_t address) const;
};

std::string hex(uint64_t value);

// Records which bits of result number n are unknown in these lanes. Returns the lanes in which no bit is unknown.
Lanes note_unknown(Warp& w, const Instruction& i, size_t n, Lanes lanes);

template <class F>
inline void for_lanes(Lanes lanes, F f) {
  if (lanes == ALL_LANES) {
#pragma GCC ivdep
    for (int l = 0; l < LANES; l++) f(l);
  } else {
    for (int l = 0; l < LANES; l++)
      if (lanes >> l & 1) f(l);
  }
}

}  // namespace executor
