// The executor's representation of a PTX kernel.
//
// A register is a slot of the register file: 32 lanes of 4 bytes. 64-bit registers take two slots. Literals, special
// registers and the address of the shared memory are slots that are filled before the kernel starts, so that every
// operand of an instruction is a slot.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace executor {

using Lanes = uint32_t;  // a set of lanes, bit l for lane l
constexpr int LANES = 32;
constexpr Lanes ALL_LANES = ~0u;
constexpr uint32_t SHARED_BASE = 1024;  // address of the shared memory; 0 is never a valid address
constexpr uint64_t PARAMETER_BASE = 1ull << 20;  // address of the parameters

struct Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&, Lanes);

struct Operand {
  int slot = -1;       // -1: the operand is not a register but the integer in `offset`
  int bytes = 0;       // width of the register: 1 (predicate), 2, 4 or 8
  int64_t offset = 0;  // the offset of an address, or an integer
};

enum class Control { next, branch, end, barrier };

// What an undefined input makes undefined. lane: the result of its lane. select: the result of its lane, if this input
// is selected. shuffle: the result in the lanes that receive it. halves: the corresponding half of the result.
enum class Spread { lane, select, shuffle, halves };

// How undefined bits of the inputs reach the result (undefined.cpp). all: any undefined bit makes every bit undefined.
enum class Bits { all, both, either, copy, left, right, permute, insert, pack, unpack, halves };
Bits bits_of(const std::string& opcode);

struct Instruction {
  Handler run = nullptr;
  Control control = Control::next;
  bool collective = false;  // all lanes of a warp must run it together
  int guard = -1;           // slot of the guard predicate, -1 if there is none
  bool negated = false;
  int target = -1;  // target of a branch
  int line = 0;     // line in the PTX
  std::string opcode, text, source;
  std::vector<Operand> operands;
  Spread spread = Spread::lane;
  Bits bits = Bits::all;
  // checked: slots that must be defined. reads: if one of these slots is undefined, the result may be undefined. writes:
  // results. A 64-bit register is listed with both slots.
  std::vector<int> checked, reads, writes;
};

struct Parameter {
  int offset, bytes;  // within the parameters
};

struct Constant {
  int slot, bytes;
  uint64_t value;
};

struct Program {
  std::string name;
  int threads = 0, max_threads = 0;  // per block, as the kernel requires or limits them; 0: it does not
  uint32_t static_shared_bytes = 0;  // in front of the dynamic shared memory
  int slots = 0;
  bool uses_wgmma = false;
  std::vector<Instruction> code;
  std::vector<Parameter> parameters;
  std::vector<Constant> constants;
  std::map<std::string, int> special;  // slots of special registers such as %tid.x
};

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Returns the kernel of this name in a PTX module; "" is the first kernel. Throws Error with the line number if it does
// not know a statement.
Program parse(const std::string& text, int arch, const std::string& kernel = "");

// The definition of an opcode. operands has one letter for each:
//   p 2 4 8  a predicate, a register of 2, 4 or 8 bytes, or a literal
//   h f      a register of at least 2, at least 4 bytes
//   w        a register of 4 bytes that the instruction itself checks
//   s g P    an address in brackets, in shared memory, in global memory or in the parameters
//   i        an integer;  L a label
// The first `outputs` operands are written. Operands after the first `required` ones are optional.
struct Definition {
  Handler run;
  std::string operands;
  int outputs = 0;
  Control control = Control::next;
  bool collective = false;
  size_t required = ~size_t{0};
};

void define(const std::string& opcode, const Definition& definition);
const Definition* find_definition(const std::string& opcode);

}  // namespace executor
