// mbarriers, barriers of some warps, and setmaxnreg.
#include "asynchronous.h"

#include <algorithm>

#include "opcodes.h"

namespace executor {

void Clock::join(const Clock& other) {
  for (size_t n = 0; n < warps.size(); n++) warps[n] = std::max(warps[n], other.warps[n]);
  for (size_t n = 0; n < phases.size(); n++) phases[n] = std::max(phases[n], other.phases[n]);
}

void Asynchronous::start(uint64_t seed) {
  mbarriers_.clear(), barriers_.clear(), copies_.clear();
  random_.seed(seed);
  // Copies land at once, after a while, or only when every warp waits.
  const uint32_t chances[] = {100, 20, 3, 0};
  eagerness_ = seed ? chances[random_() % 4] : 0;
  free_registers_ = 0;
  const int registers = block_.launch.program.registers;
  for (Warp& w : block_.warps) w.held_registers = registers, w.clock.warps[w.index] = 1;
}

void Asynchronous::wake(Wait kind, uint32_t what) {
  for (Warp& w : block_.warps)
    if (w.waits_for == kind && (kind != Wait::phase || w.waits_at == what))
      w.waits_for = Wait::none, w.at_barrier = false;
}

// ---- barriers of a block or of some of its warps

static uint32_t uniform(Warp& w, const Operand& o) {
  return o.slot < 0 ? static_cast<uint32_t>(o.offset) : w.at<uint32_t>(o)[0];
}

void Asynchronous::barrier(Warp& w, const Instruction& i) {
  const uint32_t all = static_cast<uint32_t>(LANES * block_.warps.size()), id = uniform(w, i.operands[0]);
  const uint32_t threads = i.operands.size() > 1 ? uniform(w, i.operands[1]) : all;
  if (id >= 16 || !threads || threads % LANES || threads > all)
    block_.report("impossible barrier", w, i, -1, std::to_string(id) + " for " + std::to_string(threads) + " threads");
  NamedBarrier& b = barriers_[id];
  if (!b.warps.empty() && b.threads != threads)
    block_.report("divergent barrier", w, i, -1,
                  std::to_string(threads) + " threads, other warps wait for " + std::to_string(b.threads));
  b.threads = threads, b.warps.push_back(&w);
  if (b.warps.size() * LANES < threads) {
    w.at_barrier = true, w.waits_for = Wait::barrier, w.waits_at = id, w.barrier_line = i.line;
    return;
  }
  Clock joined;
  for (Warp* other : b.warps) joined.join(other->clock);
  for (Warp* other : b.warps) {
    other->clock = joined, other->clock.warps[other->index]++, other->syncs++, other->meetings++;
    other->at_barrier = false, other->waits_for = Wait::none;
  }
  b.warps.clear();
}

bool Asynchronous::try_wait(Warp& w, const Instruction& i) {
  return i.opcode.rfind("setmaxnreg", 0) == 0 ? set_registers(w, i) : wait(w, i);
}

// ---- mbarriers

MBarrier* Asynchronous::find(Warp& w, const Instruction& i, uint32_t address, int64_t& offset) {
  offset = block_.shared.locate(address, 8, w, i, -1);
  if (offset < 0) return nullptr;
  auto it = mbarriers_.find(static_cast<uint32_t>(offset));
  if (it == mbarriers_.end()) {
    block_.report("no mbarrier", w, i, -1, "shared offset " + std::to_string(offset) + " holds none");
    return nullptr;
  }
  const MBarrier& b = it->second;
  if (b.initialiser != w.index && b.initialised_at > w.clock.warps[b.initialiser])
    block_.report("race: mbarrier used before its init was seen", w, i, -1, "shared offset " + std::to_string(offset));
  return &it->second;
}

void Asynchronous::init(Warp& w, const Instruction& i, uint32_t address, uint32_t count) {
  const int64_t offset = block_.shared.locate(address, 8, w, i, -1);
  if (offset < 0) return;
  if (mbarriers_.count(offset))
    block_.report("mbarrier initialised twice", w, i, -1, "shared offset " + std::to_string(offset));
  if (!count || count >= 1 << 20) block_.report("impossible mbarrier", w, i, -1, std::to_string(count) + " arrivals");
  if (mbarriers_.size() == MAX_MBARRIERS) throw Error("more mbarriers than the executor knows");
  MBarrier b;
  b.index = static_cast<int>(mbarriers_.size()), b.count = b.pending = count;
  b.initialiser = w.index, b.initialised_at = w.clock.warps[w.index];
  mbarriers_[offset] = b;
}

void Asynchronous::invalidate(Warp& w, const Instruction& i, uint32_t address) {
  int64_t offset;
  if (find(w, i, address, offset)) mbarriers_.erase(offset);
}

void Asynchronous::fence(const Warp& w) {
  for (auto& [offset, b] : mbarriers_)
    if (b.initialiser == w.index) b.fenced = true;
}

void Asynchronous::arrive(Warp& w, const Instruction& i, uint32_t address, uint32_t count, uint32_t bytes) {
  int64_t offset;
  MBarrier* b = find(w, i, address, offset);
  if (!b) return;
  if (count > b->pending) {
    block_.report("mbarrier: too many arrivals", w, i, -1,
                  std::to_string(count) + ", its phase needs " + std::to_string(b->pending) + " of " +
                      std::to_string(b->count));
    count = b->pending;
  }
  b->bytes += bytes, b->pending -= count;
  b->arrived.join(w.clock), w.clock.warps[w.index]++;
  complete(offset, *b);
}

void Asynchronous::complete(uint32_t offset, MBarrier& b) {
  if (b.pending || b.bytes) return;
  b.phases++, b.pending = b.count;
  b.completed.join(b.arrived);
  b.completed.phases[b.index] = b.phases;
  wake(Wait::phase, offset);
}

// try_wait with a parity: whether the phase of that parity, the current one or the one before, is complete.
bool Asynchronous::wait(Warp& w, const Instruction& i) {
  const uint32_t address = w.at<uint32_t>(i.operands[1])[0] + static_cast<uint32_t>(i.operands[1].offset);
  const uint32_t parity = uniform(w, i.operands[2]);
  int64_t offset;
  MBarrier* b = find(w, i, address, offset);
  if (b && (b->phases & 1) == (parity & 1)) {
    w.at_barrier = true, w.waits_for = Wait::phase, w.waits_at = static_cast<uint32_t>(offset), w.barrier_line = i.line;
    return false;
  }
  if (b) w.clock.join(b->completed);
  w.syncs++, w.meetings++;
  for (int l = 0; l < LANES; l++) w.at<uint32_t>(i.operands[0])[l] = ALL_LANES;
  return true;
}

// ---- registers

bool Asynchronous::set_registers(Warp& w, const Instruction& i) {
  const int wanted = static_cast<int>(i.operands[0].offset);
  const bool more = i.opcode.find(".inc") != std::string::npos;
  if (!w.held_registers || wanted % 8 || wanted < 24 || wanted > 256 ||
      (more ? wanted < w.held_registers : wanted > w.held_registers)) {
    block_.report("impossible setmaxnreg", w, i, -1,
                  std::to_string(wanted) + " registers, the warp has " + std::to_string(w.held_registers));
    return true;
  }
  if (wanted - w.held_registers > free_registers_) {
    w.at_barrier = true, w.waits_for = Wait::registers, w.waits_at = wanted, w.barrier_line = i.line;
    return false;
  }
  free_registers_ -= wanted - w.held_registers, w.held_registers = wanted;
  if (!more) wake(Wait::registers, 0);
  return true;
}

// ---- when nothing goes on

bool Asynchronous::ended() {
  if (std::any_of(block_.warps.begin(), block_.warps.end(), [](const Warp& w) { return w.alive; })) return false;
  for (const BulkCopy& c : copies_)
    block_.report("bulk copy not waited for at the end", *c.warp, *c.instruction, -1, "data still on its way");
  for (const auto& [offset, b] : mbarriers_) {
    auto seen = [&](const Warp& w) { return w.clock.phases[b.index] >= b.copied; };
    if (b.copied && std::none_of(block_.warps.begin(), block_.warps.end(), seen))
      block_.report("bulk copy not waited for at the end", *last_copy_.warp, *last_copy_.instruction, -1,
                    "no warp waited for the mbarrier at shared offset " + std::to_string(offset));
  }
  return true;
}

void Asynchronous::report_deadlock() {
  const auto& code = block_.launch.program.code;
  for (const Warp& w : block_.warps) {
    if (!w.alive) continue;
    std::string why;
    if (w.waits_for == Wait::barrier) {
      const NamedBarrier& b = barriers_[w.waits_at];
      why = "barrier " + std::to_string(w.waits_at) + " has " + std::to_string(LANES * b.warps.size()) + " of " +
            std::to_string(b.threads) + " threads";
    } else if (w.waits_for == Wait::phase) {
      const MBarrier& b = mbarriers_[w.waits_at];
      why = "the mbarrier at shared offset " + std::to_string(w.waits_at) + " completed " + std::to_string(b.phases) +
            " phases and lacks " + std::to_string(b.pending) + " arrivals and " + std::to_string(b.bytes) + " bytes";
    } else {
      why = std::to_string(w.waits_at) + " registers asked for, the warp has " + std::to_string(w.held_registers) +
            ", " + std::to_string(free_registers_) + " are free";
    }
    auto at = std::find_if(code.begin(), code.end(), [&](const Instruction& i) { return i.line == w.barrier_line; });
    block_.report("deadlock", w, *at, -1, why);
  }
}

// ---- opcodes

namespace {

int first_lane(Lanes m) { return __builtin_ctz(m); }

uint32_t shared_address(Warp& w, const Operand& o, int lane) {
  return w.at<uint32_t>(o)[lane] + static_cast<uint32_t>(o.offset);
}

void init(Warp& w, const Instruction& i, Lanes m) {
  const int l = first_lane(m);
  w.block->asynchronous->init(w, i, shared_address(w, i.operands[0], l), w.at<uint32_t>(i.operands[1])[l]);
}

void invalidate(Warp& w, const Instruction& i, Lanes m) {
  w.block->asynchronous->invalidate(w, i, shared_address(w, i.operands[0], first_lane(m)));
}

void arrive(Warp& w, const Instruction& i, Lanes m) {
  for (int l = 0; l < LANES; l++)
    if (m >> l & 1) {
      const uint32_t count = i.operands.size() > 2 ? w.at<uint32_t>(i.operands[2])[l] : 1;
      w.block->asynchronous->arrive(w, i, shared_address(w, i.operands[1], l), count, 0);
    }
}

void arrive_expecting(Warp& w, const Instruction& i, Lanes m) {
  for (int l = 0; l < LANES; l++)
    if (m >> l & 1)
      w.block->asynchronous->arrive(w, i, shared_address(w, i.operands[1], l), 1, w.at<uint32_t>(i.operands[2])[l]);
}

void fence_init(Warp& w, const Instruction&, Lanes) { w.block->asynchronous->fence(w); }

void elect(Warp& w, const Instruction& i, Lanes m) {
  for (int l = 0; l < LANES; l++) {
    w.at<uint32_t>(i.operands[0])[l] = first_lane(m);
    w.at<uint32_t>(i.operands[1])[l] = l == first_lane(m) ? ALL_LANES : 0;
  }
}

}  // namespace

void define_asynchronous() {
  for (const char* space : {".shared", ".shared::cta"}) {
    const std::string b64 = std::string(space) + ".b64";
    define("mbarrier.init" + b64, {init, "s4"});
    define("mbarrier.inval" + b64, {invalidate, "s"});
    define("mbarrier.arrive" + b64, {arrive, "8s4", 1, Control::next, false, 2});
    define("mbarrier.arrive.expect_tx" + b64, {arrive_expecting, "8s4", 1});
    define("mbarrier.try_wait.parity" + b64, {nullptr, "ps4", 1, Control::wait, true});
  }
  define("fence.mbarrier_init.release.cluster", {fence_init, ""});
  for (const char* change : {"inc", "dec"})
    define(std::string("setmaxnreg.") + change + ".sync.aligned.u32", {nullptr, "i", 0, Control::wait, true});
  define("elect.sync pair", {elect, "4p4", 2, Control::next, true});
  define("brx.idx", {nullptr, "4T", 0, Control::jump, true});
}

}  // namespace executor
