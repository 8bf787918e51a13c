// What sm_90 synchronises by besides the barrier of a whole block: mbarriers, barriers of some warps, the tensor memory
// accelerator (TMA), and the registers that warps hand to each other.
//
// With these, memory is ordered by vector clocks: an arrival publishes what a warp has seen, a wait that succeeds takes
// it over. A bulk copy is ordered by the phase of the mbarrier that counts its bytes.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

namespace executor {

struct Warp;
struct Block;
struct Instruction;
struct TensorMap;

constexpr int MAX_WARPS = 15;        // the last of 16 bits stands for bulk copies
constexpr int MAX_MBARRIERS = 48;    // of a block

// What a warp knows to have happened: the time of every warp, and the completed phases of every mbarrier.
struct Clock {
  std::array<uint32_t, MAX_WARPS> warps{};
  std::array<uint32_t, MAX_MBARRIERS> phases{};

  void join(const Clock& other);
};

struct MBarrier {
  int index = 0;            // among the block's
  uint32_t count = 0;       // arrivals that a phase needs
  uint32_t pending = 0;     // still needed
  int64_t bytes = 0;        // expected and not arrived
  uint32_t phases = 0;      // completed
  bool fenced = false;      // by its initialiser, so that TMA may use it
  int initialiser = 0;
  uint32_t initialised_at = 0;
  uint32_t copied = 0;      // the last phase in which a copy landed, plus 1
  Clock arrived, completed;  // of this phase's arrivals; of the phases before
};

struct NamedBarrier {
  uint32_t threads = 0;
  std::vector<Warp*> warps;
};

struct BulkCopy {
  const Instruction* instruction;
  Warp* warp;
  TensorMap* map;
  std::array<int32_t, 5> at;
  uint32_t to, bytes, mbarrier, phase;  // offsets in shared memory; the mbarrier's phase when the copy was issued
};

// What a warp waits for.
enum class Wait : uint8_t { none, barrier, phase, registers };

class Asynchronous {
 public:
  explicit Asynchronous(Block& block) : block_(block) {}
  void start(uint64_t seed);  // of a block

  void barrier(Warp& w, const Instruction& i);
  // Whether the warp may go on; else the instruction has to be run again.
  bool try_wait(Warp& w, const Instruction& i);

  void init(Warp& w, const Instruction& i, uint32_t address, uint32_t count);
  void invalidate(Warp& w, const Instruction& i, uint32_t address);
  void arrive(Warp& w, const Instruction& i, uint32_t address, uint32_t count, uint32_t bytes);
  void fence(const Warp& w);
  void copy(Warp& w, const Instruction& i, int lane, TensorMap* map, std::array<int32_t, 5> at, uint32_t to,
            uint32_t mbarrier);

  void land_some();    // lets copies land that happen to be ready
  bool land_one();     // one, where nothing else can go on
  bool ended();        // reports what is still under way
  void report_deadlock();

 private:
  bool wait(Warp& w, const Instruction& i);
  bool set_registers(Warp& w, const Instruction& i);
  MBarrier* find(Warp& w, const Instruction& i, uint32_t address, int64_t& offset);
  void complete(uint32_t offset, MBarrier& b);
  void land(size_t index);
  void wake(Wait kind, uint32_t what);

  Block& block_;
  std::map<uint32_t, MBarrier> mbarriers_;  // by offset
  std::map<uint32_t, NamedBarrier> barriers_;
  std::vector<BulkCopy> copies_;
  BulkCopy last_copy_{};  // that landed
  int64_t free_registers_ = 0;
  std::mt19937_64 random_;
  uint32_t eagerness_ = 0;
};

}  // namespace executor
