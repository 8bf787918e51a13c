// Instructions by which lanes and warps meet: shuffles, barriers, branches. And the table of all opcodes.
#include <unordered_map>

#include "opcodes.h"

namespace executor {
namespace {

using Source = int (*)(int lane, uint32_t operand);

template <Source F>
void shuffle(Warp& w, const Instruction& i, Lanes) {
  w.meetings++;
  uint32_t from[LANES], operand[LANES];
  memcpy(from, w.at<uint32_t>(i.operands[1]), sizeof from);
  memcpy(operand, w.at<uint32_t>(i.operands[2]), sizeof operand);
  uint32_t* to = w.at<uint32_t>(i.operands[0]);
  const Lanes before = w.defined[i.operands[1].slot];
  Lanes defined = 0;
  for (int l = 0; l < LANES; l++) to[l] = from[F(l, operand[l])], defined |= (before >> F(l, operand[l]) & 1) << l;
  w.defined[i.operands[0].slot] = defined;
}

int butterfly(int lane, uint32_t operand) { return (lane ^ operand) & 31; }
int indexed(int, uint32_t operand) { return operand & 31; }
int above(int lane, uint32_t operand) { return lane >= int(operand) ? lane - operand : lane; }
int below(int lane, uint32_t operand) { return lane + operand < 32 ? lane + operand : lane; }

void synchronise_lanes(Warp& w, const Instruction&, Lanes) { w.syncs++, w.meetings++; }

std::unordered_map<std::string, Definition>& table() {
  static std::unordered_map<std::string, Definition> all;
  return all;
}

}  // namespace

void define(const std::string& opcode, const Definition& definition) { table()[opcode] = definition; }

const Definition* find_definition(const std::string& opcode) {
  static const bool ready = [] {
    define_integers(), define_floats(), define_conversions(), define_memory(), define_matrices(), define_wgmma(),
        define_warp();
    return true;
  }();
  auto it = table().find(opcode);
  return ready && it != table().end() ? &it->second : nullptr;
}

void define_warp() {
  define("shfl.sync.bfly.b32", {shuffle<butterfly>, "444ii", 1, Control::next, true});
  define("shfl.sync.idx.b32", {shuffle<indexed>, "444ii", 1, Control::next, true});
  define("shfl.sync.up.b32", {shuffle<above>, "444ii", 1, Control::next, true});
  define("shfl.sync.down.b32", {shuffle<below>, "444ii", 1, Control::next, true});
  define("bar.warp.sync", {synchronise_lanes, "i", 0, Control::next, true});
  for (const char* opcode : {"bar.sync", "barrier.sync"}) define(opcode, {nullptr, "i", 0, Control::barrier, true});
  for (const char* opcode : {"bra", "bra.uni"}) define(opcode, {nullptr, "L", 0, Control::branch});
  for (const char* opcode : {"ret", "exit"}) define(opcode, {nullptr, "", 0, Control::end});
}

}  // namespace executor
