// Runs a launch. Blocks are divided among threads. The seed chooses the order of the blocks and of a block's warps.
//
// All active lanes of a warp run an instruction at once. After a divergent branch, the lanes with the smallest program
// counter run first, until all lanes meet again.
#include "machine.h"

#include <algorithm>
#include <climits>
#include <numeric>
#include <random>
#include <thread>

namespace executor {

Block::Block(Launch& l)
    : launch(l), shared(l.shared_bytes), executed(l.program.code.size()), lanes(l.program.code.size()) {
  const size_t warp_count = l.threads / LANES, slots = l.program.slots;
  register_file.resize(warp_count * slots * LANES);
  defined.resize(warp_count * slots), unknown.resize(warp_count * slots * LANES);
}

void Block::report(const std::string& kind, const Warp& w, const Instruction& i, int lane, const std::string& detail) {
  std::lock_guard<std::mutex> lock(launch.mutex);
  if (launch.findings.size() >= 100 || !launch.reported.insert({i.line, kind}).second) return;
  std::string where = "block (" + std::to_string(index[0]) + ", " + std::to_string(index[1]) + ", " +
                      std::to_string(index[2]) + ") warp " + std::to_string(w.index);
  if (lane >= 0) where += " lane " + std::to_string(lane);
  launch.findings.push_back(kind + ": " + launch.program.name + " line " + std::to_string(i.line) + " (" + i.source +
                            ") '" + i.text.substr(0, 100) + "' " + where + ": " + detail);
}

static uint32_t special_value(const std::string& name, const Block& b, int warp, int lane) {
  const int axis = name.back() - 'x';
  const uint32_t threads = b.launch.threads;
  if (name == "%laneid") return lane;
  if (name.find("%tid") == 0) return axis ? 0 : LANES * warp + lane;
  if (name.find("%ntid") == 0) return axis ? 1 : threads;
  if (name.find("%ctaid") == 0) return b.index[axis];
  if (name.find("%nctaid") == 0) return b.launch.grid[axis];
  throw Error("unknown special register " + name);
}

void Block::start_warps() {
  const Program& p = launch.program;
  std::fill(register_file.begin(), register_file.end(), POISON);
  std::fill(defined.begin(), defined.end(), 0);
  std::fill(unknown.begin(), unknown.end(), ~0u);
  warps.assign(launch.threads / LANES, Warp());
  for (size_t n = 0; n < warps.size(); n++) {
    Warp& w = warps[n];
    w.block = this, w.index = static_cast<int>(n);
    w.registers = &register_file[n * p.slots * LANES], w.defined = &defined[n * p.slots];
    w.unknown = &unknown[n * p.slots * LANES];
    if (p.uses_wgmma) w.busy.assign(p.slots, FREE), w.unfenced.assign(p.slots, 0);
    for (const Constant& c : p.constants) {
      w.defined[c.slot] = ALL_LANES;
      if (c.bytes == 8) w.defined[c.slot + 1] = ALL_LANES;
      for (int l = 0; l < LANES; l++) {
        unsigned char* to =
            reinterpret_cast<unsigned char*>(w.registers + LANES * c.slot) + (c.bytes == 1 ? 4 : c.bytes) * l;
        memcpy(to, &c.value, c.bytes == 1 ? 4 : c.bytes);
      }
    }
    for (auto& [name, slot] : p.special) {
      w.defined[slot] = ALL_LANES;
      for (int l = 0; l < LANES; l++) w.registers[LANES * slot + l] = special_value(name, *this, w.index, l);
    }
  }
}

// Returns which lanes of the result, or of half of it, are defined, given the defined lanes of the inputs.
static Lanes defined_lanes(const Warp& w, const Instruction& i, size_t half) {
  const std::vector<int>& reads = i.reads;
  if (i.spread == Spread::select) {
    const int by = reads.back();
    const Lanes first = w.predicate(by);
    return w.defined[by] & ((first & w.defined[reads[half]]) | (~first & w.defined[reads[half + reads.size() / 2]]));
  }
  const size_t step = i.spread == Spread::halves ? 2 : 1;
  Lanes all = ALL_LANES;
  for (size_t n = half % step; n < reads.size(); n += step) all &= w.defined[reads[n]];
  return all;
}

void Block::check_registers(Warp& w, const Instruction& i, Lanes m) {
  for (int slot : i.checked)
    if (Lanes missing = m & ~w.defined[slot]) {
      report("register used before it was written", w, i, __builtin_ctz(missing), "lanes " + hex(missing));
      w.defined[slot] |= m;
    }
  if (i.spread != Spread::shuffle && !i.writes.empty()) {
    Lanes good[2] = {defined_lanes(w, i, 0), 0};
    const bool apart = i.spread == Spread::halves || (i.spread == Spread::select && i.writes.size() == 2);
    good[1] = apart ? defined_lanes(w, i, 1) : good[0];
    for (size_t n = 0; n < i.writes.size(); n++) {
      Lanes& defined = w.defined[i.writes[n]];
      if (Lanes rest = m & ~good[n % 2]) good[n % 2] |= note_unknown(w, i, n, rest);
      defined = (defined & ~m) | (good[n % 2] & m);
    }
  }
  if (w.busy.empty()) return;
  for (int slot : i.writes) w.unfenced[slot] = 1;
  if (w.products.empty() && w.open_products.empty()) return;
  for (auto* slots : {&i.checked, &i.reads})
    for (int slot : *slots)
      if (w.busy[slot] & ACCUMULATOR)
        report("accumulator of an unfinished wgmma read", w, i, -1, "no wgmma.wait_group in between");
  for (int slot : i.writes)
    if (w.busy[slot]) report("register of an unfinished wgmma written", w, i, -1, "no wgmma.wait_group in between");
}

void Block::end_lanes(Warp& w, const Instruction& i, Lanes m) {
  w.alive &= ~m;
  if (w.alive) return;
  bool copying = !w.open_copies.empty();
  for (auto& group : w.copies) copying |= !group.empty();
  if (copying) report("cp.async not waited for at the end", w, i, -1, "still running");
  if (!w.products.empty() || !w.open_products.empty())
    report("wgmma not waited for at the end", w, i, -1, "still running");
}

// Runs a warp until a barrier, until its end, or for `quantum` instructions.
void Block::advance(Warp& w, uint64_t quantum) {
  const std::vector<Instruction>& code = launch.program.code;
  while (quantum-- && w.alive && !w.at_barrier) {
    Lanes active = w.alive;
    if (w.diverged) {
      int least = INT_MAX;
      for (int l = 0; l < LANES; l++)
        if (w.alive >> l & 1) least = std::min(least, w.lane_pc[l]);
      active = 0;
      for (int l = 0; l < LANES; l++)
        if ((w.alive >> l & 1) && w.lane_pc[l] == least) active |= 1u << l;
      w.pc = least;
      w.diverged = active != w.alive;
    }
    if (static_cast<size_t>(w.pc) >= code.size()) throw Error("the kernel ran past its last instruction");
    const Instruction& i = code[w.pc];
    if (++steps > launch.options.step_limit) {
      report("step limit", w, i, -1,
             "the block ran " + std::to_string(launch.options.step_limit) + " instructions; does the kernel end?");
      launch.stopped = true;
      return;
    }
    Lanes m = active;
    if (i.guard >= 0 && (w.defined[i.guard] & active) != active) {
      report("register used before it was written", w, i, -1, "the guard");
      w.defined[i.guard] |= active;
    }
    if (i.guard >= 0) m &= i.negated ? ~w.predicate(i.guard) : w.predicate(i.guard);
    executed[w.pc]++, lanes[w.pc] += __builtin_popcount(m);
    if (i.collective && m != ALL_LANES)
      report("lanes apart", w, i, -1, "all lanes must run it together, only lanes " + hex(m) + " do");
    if (m) check_registers(w, i, m);
    if (m && i.control == Control::next) i.run(w, i, m);
    int next = w.pc + 1;
    if (i.control == Control::branch && m == active) next = i.target;
    else if (i.control == Control::branch && m) {
      if (!w.diverged) w.diverged = true;
      for (int l = 0; l < LANES; l++)
        if (active >> l & 1) w.lane_pc[l] = m >> l & 1 ? i.target : next;
      continue;
    } else if (i.control == Control::end) end_lanes(w, i, m);
    else if (i.control == Control::barrier && m) w.at_barrier = true, w.barrier_line = i.line;
    w.pc = next;
    if (w.diverged)
      for (int l = 0; l < LANES; l++)
        if (active >> l & 1) w.lane_pc[l] = next;
  }
}

// Called when no warp can continue. Returns false if the block has ended.
bool Block::release_barrier() {
  const Warp* waiting = nullptr;
  const Warp* other = nullptr;
  for (Warp& w : warps) {
    if (!w.alive) other = other ? other : &w;
    else if (waiting && waiting->barrier_line != w.barrier_line) other = &w;
    else waiting = waiting ? waiting : &w;
  }
  if (!waiting) return false;
  if (other) {
    const auto& code = launch.program.code;
    auto at =
        std::find_if(code.begin(), code.end(), [&](const Instruction& i) { return i.line == waiting->barrier_line; });
    report(other->alive ? "divergent barrier" : "deadlock", *waiting, *at, -1,
           "warp " + std::to_string(other->index) +
               (other->alive ? " waits at the barrier of line " + std::to_string(other->barrier_line)
                             : " has ended without reaching it"));
    if (!other->alive) {
      launch.stopped = true;
      return false;
    }
  }
  for (Warp& w : warps) w.at_barrier = false;
  shared.next_epoch();
  return true;
}

void Block::run(uint32_t n) {
  linear = n;
  index[0] = n % launch.grid[0], index[1] = n / launch.grid[0] % launch.grid[1],
  index[2] = n / launch.grid[0] / launch.grid[1];
  steps = 0;
  shared.clear();
  start_warps();
  std::mt19937_64 random(launch.options.seed * 1000003 + n);
  std::vector<Warp*> order;
  for (Warp& w : warps) order.push_back(&w);
  do {
    for (bool any = true; any && !launch.stopped;) {
      any = false;
      if (launch.options.seed) std::shuffle(order.begin(), order.end(), random);
      for (Warp* w : order) {
        if (!w->alive || w->at_barrier || launch.stopped) continue;
        advance(*w, launch.options.seed ? 1 + random() % 300 : UINT64_MAX);
        any = true;
      }
    }
  } while (!launch.stopped && release_barrier());
}

void Launch::run() {
  const uint32_t blocks = grid[0] * grid[1] * grid[2];
  std::vector<uint32_t> order(options.last_blocks ? std::min(options.last_blocks, blocks) : blocks);
  std::iota(order.begin(), order.end(), blocks - static_cast<uint32_t>(order.size()));
  if (options.seed) std::shuffle(order.begin(), order.end(), std::mt19937_64(options.seed));
  auto work = [&](std::string* failure) {
    try {
      Block block(*this);
      for (uint32_t n; !stopped && (n = next_block++) < order.size();) block.run(order[n]);
      for (size_t n = 0; n < executed.size(); n++) executed[n] += block.executed[n], lanes[n] += block.lanes[n];
    } catch (const std::exception& e) {
      *failure = e.what(), stopped = true;
    }
  };
  std::vector<std::string> failures(std::max(1, options.threads));
  std::vector<std::thread> pool;
  for (size_t n = 1; n < failures.size(); n++) pool.emplace_back(work, &failures[n]);
  work(&failures[0]);
  for (std::thread& t : pool) t.join();
  for (const std::string& failure : failures)
    if (!failure.empty()) throw Error(failure);
}

}  // namespace executor
