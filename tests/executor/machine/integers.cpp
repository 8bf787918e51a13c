// Integer, bit and predicate instructions, and moves.
#include <tuple>
#include <type_traits>

#include "opcodes.h"

namespace executor {
namespace {

template <class T>
void define_arithmetic(const std::string& t) {
  using U = std::make_unsigned_t<T>;  // sums and products wrap
  define_lanes<T, T, T>("add." + t, [](T a, T b) { return U(a) + U(b); });
  define_lanes<T, T, T>("sub." + t, [](T a, T b) { return U(a) - U(b); });
  define_lanes<T, T, T>("mul.lo." + t, [](T a, T b) { return uint64_t(a) * uint64_t(b); });
  define_lanes<T, T, T, T>("mad.lo." + t, [](T a, T b, T c) { return uint64_t(a) * uint64_t(b) + uint64_t(c); });
  define_lanes<T, T, T>("min." + t, [](T a, T b) { return a < b ? a : b; });
  define_lanes<T, T, T>("max." + t, [](T a, T b) { return a > b ? a : b; });
  define_lanes<T, T, T>("div." + t, [](T a, T b) {
    return !b ? T(-1) : std::is_signed_v<T> && b == T(-1) ? T(U(0) - U(a)) : T(a / b);
  });
  define_lanes<T, T, T>("rem." + t, [](T a, T b) {
    return !b ? a : std::is_signed_v<T> && b == T(-1) ? T(0) : T(a % b);
  });
  define_lanes<T, T>("neg." + t, [](T a) { return U(0) - U(a); });
  define_lanes<T, T>("abs." + t, [](T a) { return a < 0 ? U(0) - U(a) : U(a); });
  define_lanes<T, T, uint32_t>("shr." + t, [](T a, uint32_t n) {
    return n < 8 * sizeof(T) ? T(a >> n) : T(std::is_signed_v<T> && a < 0 ? -1 : 0);
  });
  define_lanes<T, T, T, Predicate>("selp." + t, [](T a, T b, uint32_t p) { return p ? a : b; });
  define_lanes<T, T>("mov." + t, [](T a) { return a; });
  define_comparison<T>("setp.eq." + t, [](T a, T b) { return a == b; });
  define_comparison<T>("setp.ne." + t, [](T a, T b) { return a != b; });
  define_comparison<T>("setp.lt." + t, [](T a, T b) { return a < b; });
  define_comparison<T>("setp.le." + t, [](T a, T b) { return a <= b; });
  define_comparison<T>("setp.gt." + t, [](T a, T b) { return a > b; });
  define_comparison<T>("setp.ge." + t, [](T a, T b) { return a >= b; });
}

template <class T>
void define_bits(const std::string& t) {
  constexpr uint32_t width = 8 * sizeof(T);
  define_lanes<T, T, T>("and." + t, [](T a, T b) { return a & b; });
  define_lanes<T, T, T>("or." + t, [](T a, T b) { return a | b; });
  define_lanes<T, T, T>("xor." + t, [](T a, T b) { return a ^ b; });
  define_lanes<T, T>("not." + t, [](T a) { return ~a; });
  define_lanes<T, T, uint32_t>("shl." + t, [](T a, uint32_t n) { return n < width ? T(a << n) : T(0); });
  define_lanes<T, T, uint32_t>("shr." + t, [](T a, uint32_t n) { return n < width ? T(a >> n) : T(0); });
  define_comparison<T>("setp.eq." + t, [](T a, T b) { return a == b; });
  define_comparison<T>("setp.ne." + t, [](T a, T b) { return a != b; });
  define_lanes<T, T, T, Predicate>("selp." + t, [](T a, T b, uint32_t p) { return p ? a : b; });
  define_lanes<T, T>("mov." + t, [](T a) { return a; });
}

template <class Wide, class T>
void define_wide(const std::string& t) {
  define_lanes<Wide, T, T>("mul.wide." + t, [](T a, T b) { return Wide(a) * Wide(b); });
  define_lanes<Wide, T, T, Wide>("mad.wide." + t, [](T a, T b, Wide c) {
    return std::make_unsigned_t<Wide>(Wide(a) * Wide(b)) + std::make_unsigned_t<Wide>(c);
  });
}

template <class T> T bit_field(T a, uint32_t at, uint32_t length) {
  at &= 255, length &= 255;
  const uint32_t last = 8 * sizeof(T) - 1;
  return at > last || !length ? 0 : length > last ? a >> at : (a >> at) & ((T(1) << length) - 1);
}
int32_t signed_bit_field(int32_t a, uint32_t at, uint32_t length) {
  at &= 255, length &= 255;
  if (!length) return 0;
  int32_t x = a >> (at > 31 ? 31 : at);
  return length > 31 || at + length >= 32 ? x : int32_t(uint32_t(x) << (32 - length)) >> (32 - length);
}
uint32_t insert_bits(uint32_t a, uint32_t into, uint32_t at, uint32_t length) {
  at &= 255, length &= 255;
  const uint32_t mask = at > 31 ? 0 : (length > 31 ? ~0u : (1u << length) - 1) << at;
  return (into & ~mask) | ((at > 31 ? 0 : a << at) & mask);
}
// Bit n of the result is bit 4 a_n + 2 b_n + c_n of the table.
uint32_t look_up_bits(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (uint32_t n = 0; n < 8; n++)
    if (table >> n & 1) result |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
  return result;
}

uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t both = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int n = 0; n < 4; n++) {
    uint32_t choice = selector >> 4 * n & 15, byte = both >> 8 * (choice & 7) & 255;
    result |= (choice & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * n;
  }
  return result;
}

void define_predicates() {
  define_lanes<Predicate, Predicate, Predicate>("and.pred", [](uint32_t a, uint32_t b) { return a & b; });
  define_lanes<Predicate, Predicate, Predicate>("or.pred", [](uint32_t a, uint32_t b) { return a | b; });
  define_lanes<Predicate, Predicate, Predicate>("xor.pred", [](uint32_t a, uint32_t b) { return a ^ b; });
  define_lanes<Predicate, Predicate>("not.pred", [](uint32_t a) { return ~a; });
  define_lanes<Predicate, Predicate>("mov.pred", [](uint32_t a) { return a; });
}

// mov.b32 %r, {%rs, %rs} and mov.b32 {%rs, %rs}, %r
template <class Wide, class Half>
void define_pairs(const std::string& opcode) {
  constexpr int shift = 8 * sizeof(Half);
  define_lanes<Wide, Half, Half>(opcode + " pack", [](Half low, Half high) { return Wide(low) | Wide(high) << shift; });
  define(opcode + " unpack", {[](Warp& w, const Instruction& i, Lanes m) {
                                Half *low = w.at<Half>(i.operands[0]), *high = w.at<Half>(i.operands[1]);
                                const Wide* from = w.at<Wide>(i.operands[2]);
                                for_lanes(m, [&](int l) { low[l] = Half(from[l]), high[l] = Half(from[l] >> shift); });
                              },
                              {kind<Half>(), kind<Half>(), kind<Wide>()},
                              2});
}

}  // namespace

void define_integers() {
  define_arithmetic<int16_t>("s16"), define_arithmetic<uint16_t>("u16");
  define_arithmetic<int32_t>("s32"), define_arithmetic<uint32_t>("u32");
  define_arithmetic<int64_t>("s64"), define_arithmetic<uint64_t>("u64");
  define_bits<uint16_t>("b16"), define_bits<uint32_t>("b32"), define_bits<uint64_t>("b64");
  define_wide<int32_t, int16_t>("s16"), define_wide<uint32_t, uint16_t>("u16");
  define_wide<int64_t, int32_t>("s32"), define_wide<uint64_t, uint32_t>("u32");
  define_predicates();
  define_pairs<uint32_t, uint16_t>("mov.b32"), define_pairs<uint64_t, uint32_t>("mov.b64");
  define_lanes<uint16_t, uint16_t, uint16_t>("mul.hi.u16",
                                             [](uint16_t a, uint16_t b) { return uint32_t(a) * b >> 16; });
  define_lanes<int32_t, int32_t, int32_t>("mul.hi.s32", [](int32_t a, int32_t b) { return int64_t(a) * b >> 32; });
  define_lanes<uint32_t, uint32_t, uint32_t>("mul.hi.u32",
                                             [](uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; });
  define_lanes<int32_t, int32_t, int32_t>("min.relu.s32",
                                          [](int32_t a, int32_t b) { return std::max(std::min(a, b), 0); });
  define_lanes<int32_t, int32_t, int32_t>("max.relu.s32",
                                          [](int32_t a, int32_t b) { return std::max(std::max(a, b), 0); });
  define_lanes<uint32_t, uint32_t, uint32_t, uint32_t>(
      "bfe.u32", [](uint32_t a, uint32_t b, uint32_t c) { return bit_field(a, b, c); });
  define_lanes<uint64_t, uint64_t, uint32_t, uint32_t>(
      "bfe.u64", [](uint64_t a, uint32_t b, uint32_t c) { return bit_field(a, b, c); });
  define_lanes<int32_t, int32_t, uint32_t, uint32_t>(
      "bfe.s32", [](int32_t a, uint32_t b, uint32_t c) { return signed_bit_field(a, b, c); });
  define_lanes<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>(
      "bfi.b32", [](uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return insert_bits(a, b, c, d); });
  // one address space, except for shared memory
  for (const char* opcode : {"cvta.to.global.u64", "cvta.global.u64"})
    define_lanes<uint64_t, uint64_t>(opcode, [](uint64_t a) { return a; });
  define_lanes<uint32_t, uint32_t, uint32_t, uint32_t>(
      "prmt.b32", [](uint32_t a, uint32_t b, uint32_t c) { return permute_bytes(a, b, c); });
  define_lanes<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>(
      "lop3.b32",
      [](uint32_t a, uint32_t b, uint32_t c, uint32_t table) { return look_up_bits(a, b, c, table); });
  define_lanes<uint32_t, uint32_t, uint32_t, uint32_t>(
      "shf.l.wrap.b32", [](uint32_t a, uint32_t b, uint32_t c) { return ((uint64_t(b) << 32 | a) << (c & 31)) >> 32; });
  define_lanes<uint32_t, uint32_t, uint32_t, uint32_t>(
      "shf.r.wrap.b32", [](uint32_t a, uint32_t b, uint32_t c) { return (uint64_t(b) << 32 | a) >> (c & 31); });
}

}  // namespace executor
