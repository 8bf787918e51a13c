// Instructions by which lanes and warps meet (shuffles, barriers, branches), and the table of all opcodes.
#include <algorithm>
#include <unordered_map>

#include "opcodes.h"

namespace executor {
namespace {

// Returns the lane that a shuffle reads, and whether this lane lies in its segment (PTX ISA, "shfl.sync").
struct Source {
  int lane;
  bool inside;
};
using Rule = Source (*)(int lane, int b, int last, int segment);

template <Rule F>
void shuffle(Warp& w, const Instruction& i, Lanes) {
  const bool pair = i.operands.size() == 6;
  const Operand *to = &i.operands[0], *from = &i.operands[pair ? 2 : 1];  // from, b, c, members
  w.meetings++;
  uint32_t values[LANES], b[LANES], c[LANES];
  memcpy(values, w.at<uint32_t>(from[0]), sizeof values);
  memcpy(b, w.at<uint32_t>(from[1]), sizeof b), memcpy(c, w.at<uint32_t>(from[2]), sizeof c);
  const Lanes before = w.defined[from[0].slot];
  Lanes defined = 0;
  for (int l = 0; l < LANES; l++) {
    if (w.at<uint32_t>(from[3])[l] != ALL_LANES)
      w.block->report("lanes apart", w, i, l, "a shuffle of " + hex(w.at<uint32_t>(from[3])[l]));
    const int segment = c[l] >> 8 & 31;
    Source s = F(l, b[l] & 31, (l & segment) | (c[l] & 31 & ~segment), segment);
    if (!s.inside) s.lane = l;
    w.at<uint32_t>(to[0])[l] = values[s.lane], defined |= (before >> s.lane & 1) << l;
    if (pair) w.at<uint32_t>(to[1])[l] = s.inside ? ALL_LANES : 0;
  }
  w.defined[to[0].slot] = defined;
  std::fill_n(w.unknown + LANES * to[0].slot, LANES, ~0u);
  if (pair) w.defined[to[1].slot] = ALL_LANES;
}

Source butterfly(int lane, int b, int last, int) { return {lane ^ b, (lane ^ b) <= last}; }
Source indexed(int lane, int b, int last, int segment) {
  const int from = (lane & segment) | (b & ~segment);
  return {from, from <= last};
}
Source above(int lane, int b, int last, int) { return {lane - b, lane - b >= last}; }
Source below(int lane, int b, int last, int) { return {lane + b, lane + b <= last}; }

template <Rule F>
void define_shuffle(const std::string& opcode) {
  define(opcode, {shuffle<F>, "44444", 1, Control::next, true});
  define(opcode + " pair", {shuffle<F>, "4p4444", 2, Control::next, true});
}

// PTX ISA, "redux.sync". Every lane gets the result over all lanes.
template <class T, class F>
void reduce(Warp& w, const Instruction& i, Lanes) {
  const Operand &to = i.operands[0], &from = i.operands[1], &members = i.operands[2];
  w.meetings++;
  const T* values = w.at<T>(from);
  T result = values[0];
  for (int l = 1; l < LANES; l++) result = F{}(result, values[l]);
  for (int l = 0; l < LANES; l++) {
    if (w.at<uint32_t>(members)[l] != ALL_LANES)
      w.block->report("lanes apart", w, i, l, "a reduction of " + hex(w.at<uint32_t>(members)[l]));
  }
  w.defined[to.slot] = from.slot < 0 || w.defined[from.slot] == ALL_LANES ? ALL_LANES : 0;
  std::fill_n(w.unknown + LANES * to.slot, LANES, ~0u);
  std::fill_n(w.at<T>(to), LANES, result);
}

template <class T, class F>
void define_reduction(const std::string& name, F) {
  define("redux.sync." + name, {reduce<T, F>, "444", 1, Control::next, true});
}

void synchronise_lanes(Warp& w, const Instruction&, Lanes) { w.syncs++, w.meetings++; }

std::unordered_map<std::string, Definition>& table() {
  static std::unordered_map<std::string, Definition> all;
  return all;
}

}  // namespace

void define(const std::string& opcode, const Definition& definition) { table()[opcode] = definition; }

const Definition* find_definition(const std::string& opcode) {
  static const bool ready = [] {
    define_integers(), define_floats(), define_conversions(), define_memory(), define_atomics(), define_matrices(),
        define_wgmma(), define_warp();
    return true;
  }();
  auto it = table().find(opcode);
  return ready && it != table().end() ? &it->second : nullptr;
}

void define_warp() {
  define_shuffle<butterfly>("shfl.sync.bfly.b32"), define_shuffle<indexed>("shfl.sync.idx.b32");
  define_shuffle<above>("shfl.sync.up.b32"), define_shuffle<below>("shfl.sync.down.b32");
  define_reduction<uint32_t>("add.s32", [](uint32_t a, uint32_t b) { return a + b; });  // sums wrap
  define_reduction<uint32_t>("add.u32", [](uint32_t a, uint32_t b) { return a + b; });
  define_reduction<int32_t>("min.s32", [](int32_t a, int32_t b) { return std::min(a, b); });
  define_reduction<int32_t>("max.s32", [](int32_t a, int32_t b) { return std::max(a, b); });
  define_reduction<uint32_t>("min.u32", [](uint32_t a, uint32_t b) { return std::min(a, b); });
  define_reduction<uint32_t>("max.u32", [](uint32_t a, uint32_t b) { return std::max(a, b); });
  define("bar.warp.sync", {synchronise_lanes, "i", 0, Control::next, true});
  for (const char* opcode : {"bar.sync", "barrier.sync"}) define(opcode, {nullptr, "i", 0, Control::barrier, true});
  for (const char* opcode : {"bra", "bra.uni"}) define(opcode, {nullptr, "L", 0, Control::branch});
  for (const char* opcode : {"ret", "exit"}) define(opcode, {nullptr, "", 0, Control::end});
}

}  // namespace executor
