// Computes which bits of a result are undefined. If a lane has fewer than four bytes, Triton fills a four-byte register
// with undefined bytes, computes on all four and drops the results of the undefined ones.
#include "machine.h"

namespace executor {
namespace {

uint32_t unknown_bits(Warp& w, const Operand& from, int lane) {
  return w.defined[from.slot] >> lane & 1 ? 0 : w.unknown[LANES * from.slot + lane];
}

uint32_t value(Warp& w, const Operand& from, int lane) {
  return from.bytes == 2 ? w.at<uint16_t>(from)[lane] : w.at<uint32_t>(from)[lane];
}

// If a bit of one input is known to be 0, the result of "and" is known.
uint32_t known_zero(Warp& w, const Operand& from, int lane) {
  return ~value(w, from, lane) & ~unknown_bits(w, from, lane);
}

uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result = 0;
  for (int n = 0; n < 4; n++) {
    const uint32_t choice = selector >> 4 * n & 15, byte = (choice & 4 ? b : a) >> 8 * (choice & 3) & 255;
    result |= (choice & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * n;
  }
  return result;
}

uint32_t whole_halves(uint32_t bits) { return (bits & 0xFFFF ? 0xFFFFu : 0u) | (bits >> 16 ? 0xFFFF0000u : 0u); }

uint32_t shifted(uint32_t bits, uint32_t by, bool left) {
  if (by > 31) return 0;
  return left ? bits << by : bits >> by;
}

// Returns the unknown bits of result number n.
uint32_t result_bits(Warp& w, const Instruction& i, size_t n, int lane) {
  const std::vector<Operand>& x = i.operands;
  auto of = [&](size_t input) { return unknown_bits(w, x[input], lane); };
  switch (i.bits) {
    case Bits::both: return (of(1) & ~known_zero(w, x[2], lane)) | (of(2) & ~known_zero(w, x[1], lane));
    case Bits::either: return of(1) | of(2);
    case Bits::copy: return of(1);
    case Bits::left:
    case Bits::right: return of(2) ? ~0u : shifted(of(1), value(w, x[2], lane), i.bits == Bits::left);
    case Bits::permute: return of(3) ? ~0u : permuted(of(1), of(2), value(w, x[3], lane));
    case Bits::insert: {
      if (of(3) || of(4)) return ~0u;
      const uint32_t at = value(w, x[3], lane) & 255, length = value(w, x[4], lane) & 255;
      const uint32_t field = shifted(length > 31 ? ~0u : (1u << length) - 1, at, true);
      return (shifted(of(1), at, true) & field) | (of(2) & ~field);
    }
    case Bits::pack: return (of(1) & 0xFFFF) | of(2) << 16;
    case Bits::unpack: return n ? of(2) >> 16 : of(2) & 0xFFFF;
    case Bits::halves: {
      uint32_t any = 0;
      for (size_t input = 1; input < x.size(); input++) any |= of(input);
      return whole_halves(any);
    }
    case Bits::all: break;
  }
  return ~0u;
}

}  // namespace

Bits bits_of(const std::string& opcode) {
  auto starts = [&](const char* text) { return opcode.rfind(text, 0) == 0; };
  if (opcode == "and.b32" || opcode == "and.b16") return Bits::both;
  if (opcode == "or.b32" || opcode == "or.b16" || opcode == "xor.b32" || opcode == "xor.b16") return Bits::either;
  if (opcode == "mov.b32" || opcode == "mov.u32" || opcode == "mov.b16" || opcode == "mov.u16") return Bits::copy;
  if (opcode == "shl.b32") return Bits::left;
  if (opcode == "shr.u32" || opcode == "shr.b32") return Bits::right;
  if (opcode == "prmt.b32") return Bits::permute;
  if (opcode == "bfi.b32") return Bits::insert;
  if (opcode == "mov.b32 pack") return Bits::pack;
  if (opcode == "mov.b32 unpack") return Bits::unpack;
  if (!starts("cvt") && opcode.ends_with("f16x2")) return Bits::halves;
  return Bits::all;
}

Lanes note_unknown(Warp& w, const Instruction& i, size_t n, Lanes lanes) {
  Lanes known = 0;
  const uint32_t width = i.writes.size() > 1 || i.operands[0].bytes == 2 ? 0xFFFF : ~0u;
  for_lanes(lanes, [&](int l) {
    const uint32_t bits = i.bits == Bits::all ? ~0u : result_bits(w, i, n, l) & width;
    w.unknown[LANES * i.writes[n] + l] = bits;
    if (!bits) known |= 1u << l;
  });
  return known;
}

}  // namespace executor
