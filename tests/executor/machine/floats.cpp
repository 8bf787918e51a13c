// Floating point instructions and conversions.
//
// The .approx instructions are computed exactly: their errors are not modelled.
#include <cmath>
#include <tuple>

#include "opcodes.h"

namespace executor {

uint16_t to_bf16(float x) {
  uint32_t b = as_bits(x);
  if ((b & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}

static float decode_f16(uint16_t x) {
  int exponent = x >> 10 & 31;
  float mantissa = x & 1023;
  float size = exponent == 31 ? (x & 1023 ? NAN : INFINITY)
               : exponent     ? std::ldexp(mantissa + 1024, exponent - 25)
                              : std::ldexp(mantissa, -24);
  return x & 0x8000 ? -size : size;
}

float from_f16(uint16_t x) {
  static const std::vector<float> table = [] {
    std::vector<float> all(65536);
    for (int n = 0; n < 65536; n++) all[n] = decode_f16(static_cast<uint16_t>(n));
    return all;
  }();
  return table[x];
}

uint16_t to_f16(float x) {  // round to nearest even
  uint32_t b = as_bits(x), sign = b >> 16 & 0x8000, size = b & 0x7FFFFFFF;
  if (size > 0x7F800000) return 0x7FFF;
  if (size >= 0x477FF000) return sign | 0x7C00;  // 65520 and more
  if (size < 0x38800000)
    return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(as_float(size), 24)));  // subnormal
  return sign | ((size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13);
}

namespace {

float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
float larger(float a, float b) { return a != a ? b : b != b ? a : a > b ? a : b; }
float smaller(float a, float b) { return a != a ? b : b != b ? a : a < b ? a : b; }

template <class F>
void unary(const std::string& opcode, F) {
  define_lanes<float, float>(opcode, F{});
}
template <class F>
void binary(const std::string& opcode, F) {
  define_lanes<float, float, float>(opcode, F{});
}

// An operation on pairs of numbers of 16 bits.
template <class Operation>
uint32_t of_halves(uint32_t a, uint32_t b, uint32_t c, Operation operation) {
  return uint32_t(operation(a >> 16, b >> 16, c >> 16)) << 16 | uint16_t(operation(a, b, c));
}

// An operation on pairs of float32 numbers, as sm_100 and newer have them.
template <class Operation>
uint64_t of_pairs(uint64_t a, uint64_t b, uint64_t c, Operation operation) {
  auto bits = [&](int shift) {
    return uint64_t(as_bits(operation(as_float(a >> shift), as_float(b >> shift), as_float(c >> shift)))) << shift;
  };
  return bits(32) | bits(0);
}

void define_pairs() {
  for (const char* rounding : {".f32x2", ".rn.f32x2"}) {
    define_lanes<uint64_t, uint64_t, uint64_t>("add" + std::string(rounding), [](uint64_t a, uint64_t b) {
      return of_pairs(a, b, 0, [](float a, float b, float) { return a + b; });
    });
    define_lanes<uint64_t, uint64_t, uint64_t>("sub" + std::string(rounding), [](uint64_t a, uint64_t b) {
      return of_pairs(a, b, 0, [](float a, float b, float) { return a - b; });
    });
    define_lanes<uint64_t, uint64_t, uint64_t>("mul" + std::string(rounding), [](uint64_t a, uint64_t b) {
      return of_pairs(a, b, 0, [](float a, float b, float) { return a * b; });
    });
  }
  define_lanes<uint64_t, uint64_t, uint64_t, uint64_t>("fma.rn.f32x2", [](uint64_t a, uint64_t b, uint64_t c) {
    return of_pairs(a, b, c, [](float a, float b, float c) { return __builtin_fmaf(a, b, c); });
  });
}

void define_arithmetic() {
  for (const char* rounding : {".f32", ".rn.f32"}) {
    binary("add" + std::string(rounding), [](float a, float b) { return a + b; });
    binary("sub" + std::string(rounding), [](float a, float b) { return a - b; });
    binary("mul" + std::string(rounding), [](float a, float b) { return a * b; });
  }
  binary("add.ftz.f32", [](float a, float b) { return flush(flush(a) + flush(b)); });
  binary("sub.ftz.f32", [](float a, float b) { return flush(flush(a) - flush(b)); });
  binary("mul.ftz.f32", [](float a, float b) { return flush(flush(a) * flush(b)); });
  define_lanes<float, float, float, float>("fma.rn.f32",
                                           [](float a, float b, float c) { return __builtin_fmaf(a, b, c); });
  define_lanes<float, float, float, float>(
      "fma.rn.ftz.f32", [](float a, float b, float c) { return flush(__builtin_fmaf(flush(a), flush(b), flush(c))); });
  define_lanes<uint32_t, uint32_t, uint32_t>("add.s16x2", [](uint32_t a, uint32_t b) {
    return of_halves(a, b, 0, [](uint16_t a, uint16_t b, uint16_t) { return uint16_t(a + b); });
  });
  define_lanes<uint32_t, uint32_t, uint32_t>("sub.rn.f16x2", [](uint32_t a, uint32_t b) {
    return of_halves(a, b, 0, [](uint16_t a, uint16_t b, uint16_t) { return to_f16(from_f16(a) - from_f16(b)); });
  });
  define_lanes<uint32_t, uint32_t, uint32_t, uint32_t>("fma.rn.f16x2", [](uint32_t a, uint32_t b, uint32_t c) {
    return of_halves(a, b, c, [](uint16_t a, uint16_t b, uint16_t c) {  // the sum is exact in float32
      return to_f16(__builtin_fmaf(from_f16(a), from_f16(b), from_f16(c)));
    });
  });
  define_lanes<uint32_t, uint32_t, uint32_t, uint32_t>("fma.rn.bf16x2", [](uint32_t a, uint32_t b, uint32_t c) {
    return of_halves(a, b, c, [](uint16_t a, uint16_t b, uint16_t c) {  // the sum is exact in float32
      return to_bf16(__builtin_fmaf(from_bf16(a), from_bf16(b), from_bf16(c)));
    });
  });
  unary("neg.f32", [](float a) { return as_float(as_bits(a) ^ 0x80000000); });
  unary("abs.f32", [](float a) { return std::fabs(a); });
  unary("neg.ftz.f32", [](float a) { return -flush(a); });
  unary("abs.ftz.f32", [](float a) { return std::fabs(flush(a)); });
  binary("max.f32", [](float a, float b) { return larger(a, b); });
  define_lanes<uint16_t, uint16_t, uint16_t>(
      "max.f16", [](uint16_t a, uint16_t b) { return to_f16(larger(from_f16(a), from_f16(b))); });
  define_lanes<uint16_t, uint16_t, uint16_t>(
      "max.bf16", [](uint16_t a, uint16_t b) { return to_bf16(larger(from_bf16(a), from_bf16(b))); });
  define_lanes<uint16_t, uint16_t, uint16_t>(
      "min.f16", [](uint16_t a, uint16_t b) { return to_f16(smaller(from_f16(a), from_f16(b))); });
  define_lanes<uint16_t, uint16_t, uint16_t>(
      "min.bf16", [](uint16_t a, uint16_t b) { return to_bf16(smaller(from_bf16(a), from_bf16(b))); });
  define_lanes<uint32_t, uint32_t, uint32_t>("max.f16x2", [](uint32_t a, uint32_t b) {
    return of_halves(a, b, 0, [](uint16_t a, uint16_t b, uint16_t) { return to_f16(larger(from_f16(a), from_f16(b))); });
  });
  define_lanes<uint32_t, uint32_t, uint32_t>("min.f16x2", [](uint32_t a, uint32_t b) {
    return of_halves(a, b, 0, [](uint16_t a, uint16_t b, uint16_t) { return to_f16(smaller(from_f16(a), from_f16(b))); });
  });
  define_lanes<uint32_t, uint32_t, uint32_t>("max.bf16x2", [](uint32_t a, uint32_t b) {
    return of_halves(a, b, 0,
                     [](uint16_t a, uint16_t b, uint16_t) { return to_bf16(larger(from_bf16(a), from_bf16(b))); });
  });
  define_lanes<uint32_t, uint32_t, uint32_t>("min.bf16x2", [](uint32_t a, uint32_t b) {
    return of_halves(a, b, 0,
                     [](uint16_t a, uint16_t b, uint16_t) { return to_bf16(smaller(from_bf16(a), from_bf16(b))); });
  });
  binary("min.f32", [](float a, float b) { return smaller(a, b); });
  binary("max.NaN.f32", [](float a, float b) { return a != a || b != b ? NAN : larger(a, b); });
  binary("min.NaN.f32", [](float a, float b) { return a != a || b != b ? NAN : smaller(a, b); });
  define_lanes<float, float, float, Predicate>("selp.f32", [](float a, float b, uint32_t p) { return p ? a : b; });
  unary("mov.f32", [](float a) { return a; });
}

void define_functions() {
  for (const char* opcode : {"div.full.f32", "div.rn.f32"}) binary(opcode, [](float a, float b) { return a / b; });
  binary("div.full.ftz.f32", [](float a, float b) { return flush(flush(a) / flush(b)); });
  unary("ex2.approx.f32", [](float a) { return std::exp2(a); });
  unary("ex2.approx.ftz.f32", [](float a) { return flush(std::exp2(flush(a))); });
  unary("lg2.approx.f32", [](float a) { return std::log2(a); });
  unary("lg2.approx.ftz.f32", [](float a) { return std::log2(flush(a)); });
  unary("rcp.rn.f32", [](float a) { return 1 / a; });
  unary("rcp.approx.ftz.f32", [](float a) { return flush(1 / flush(a)); });
  unary("sqrt.rn.f32", [](float a) { return std::sqrt(a); });
  unary("sqrt.approx.ftz.f32", [](float a) { return std::sqrt(flush(a)); });
}

void define_comparisons() {
  define_comparison<float>("setp.eq.f32", [](float a, float b) { return a == b; });
  define_comparison<float>("setp.ne.f32", [](float a, float b) { return a < b || a > b; });
  define_comparison<float>("setp.lt.f32", [](float a, float b) { return a < b; });
  define_comparison<float>("setp.le.f32", [](float a, float b) { return a <= b; });
  define_comparison<float>("setp.gt.f32", [](float a, float b) { return a > b; });
  define_comparison<float>("setp.ge.f32", [](float a, float b) { return a >= b; });
  define_comparison<float>("setp.equ.f32", [](float a, float b) { return !(a < b || a > b); });
  define_comparison<float>("setp.neu.f32", [](float a, float b) { return a != b; });
  define_comparison<float>("setp.ltu.f32", [](float a, float b) { return !(a >= b); });
  define_comparison<float>("setp.leu.f32", [](float a, float b) { return !(a > b); });
  define_comparison<float>("setp.gtu.f32", [](float a, float b) { return !(a <= b); });
  define_comparison<float>("setp.geu.f32", [](float a, float b) { return !(a < b); });
  define_comparison<uint16_t>("setp.nan.f16", [](uint16_t a, uint16_t b) {
    const float x = from_f16(a), y = from_f16(b);
    return x != x || y != y;
  });
  define_comparison<uint16_t>("setp.nan.bf16", [](uint16_t a, uint16_t b) {
    const float x = from_bf16(a), y = from_bf16(b);
    return x != x || y != y;
  });
  define_comparison<float>("setp.nan.f32", [](float a, float b) { return a != a || b != b; });
  define_comparison<float>("setp.num.f32", [](float a, float b) { return a == a && b == b; });
}

// The opcode with " of 8" converts the low part of a register of 8 bytes.
template <class D, class A>
void define_integer_conversion(const std::string& types) {
  define_lanes<D, A>("cvt." + types, [](A a) { return a; });
  define_lanes<D, uint64_t>("cvt." + types + " of 8", [](uint64_t a) { return static_cast<A>(a); });
}

int32_t to_s32(float a) {
  return a != a ? 0 : a >= 2147483648.0f ? INT32_MAX : a <= -2147483648.0f ? INT32_MIN : static_cast<int32_t>(a);
}

}  // namespace

void define_floats() { define_arithmetic(), define_pairs(), define_functions(), define_comparisons(); }

void define_conversions() {
  define_integer_conversion<int64_t, int32_t>("s64.s32"), define_integer_conversion<uint64_t, uint32_t>("u64.u32");
  define_integer_conversion<int32_t, int16_t>("s32.s16"), define_integer_conversion<uint32_t, uint16_t>("u32.u16");
  define_integer_conversion<int64_t, int16_t>("s64.s16"), define_integer_conversion<uint64_t, uint16_t>("u64.u16");
  define_lanes<uint32_t, uint64_t>("cvt.u32.u64", [](uint64_t a) { return a; });
  define_lanes<int32_t, int64_t>("cvt.s32.s64", [](int64_t a) { return a; });
  define_lanes<uint16_t, uint32_t>("cvt.u16.u32", [](uint32_t a) { return a; });
  define_lanes<int16_t, int32_t>("cvt.s16.s32", [](int32_t a) { return a; });
  define_lanes<uint16_t, uint64_t>("cvt.u16.u64", [](uint64_t a) { return a; });
  define_lanes<int32_t, uint16_t>("cvt.s32.s8", [](uint16_t a) { return static_cast<int8_t>(a); });
  define_lanes<int16_t, uint16_t>("cvt.s16.s8", [](uint16_t a) { return static_cast<int8_t>(a); });
  define_lanes<int16_t, int32_t>("cvt.s8.s32", [](int32_t a) { return static_cast<int8_t>(a); });
  define_lanes<uint16_t, uint16_t>("cvt.u16.u8", [](uint16_t a) { return a & 255; });
  define_lanes<float, int16_t>("cvt.rn.f32.s16", [](int16_t a) { return static_cast<float>(a); });
  define_lanes<float, int32_t>("cvt.rn.f32.s32", [](int32_t a) { return static_cast<float>(a); });
  define_lanes<float, uint32_t>("cvt.rn.f32.u32", [](uint32_t a) { return static_cast<float>(a); });
  define_lanes<float, int64_t>("cvt.rn.f32.s64", [](int64_t a) { return static_cast<float>(a); });
  define_lanes<float, uint64_t>("cvt.rn.f32.u64", [](uint64_t a) { return static_cast<float>(a); });
  define_lanes<int32_t, float>("cvt.rzi.s32.f32", [](float a) { return to_s32(a); });
  define_lanes<float, float>("cvt.rmi.f32.f32", [](float a) { return std::floor(a); });
  define_lanes<float, float>("cvt.rmi.ftz.f32.f32", [](float a) { return std::floor(flush(a)); });
  define_lanes<float, float>("cvt.rni.f32.f32", [](float a) { return std::nearbyint(a); });
  define_lanes<float, uint16_t>("cvt.f32.bf16", [](uint16_t a) { return from_bf16(a); });
  define_lanes<float, uint16_t>("cvt.f32.f16", [](uint16_t a) { return from_f16(a); });
  define_lanes<uint16_t, float>("cvt.rn.bf16.f32", [](float a) { return to_bf16(a); });
  define_lanes<uint16_t, float>("cvt.rn.f16.f32", [](float a) { return to_f16(a); });
  define_lanes<uint32_t, float, float>(
      "cvt.rn.bf16x2.f32", [](float high, float low) { return uint32_t(to_bf16(high)) << 16 | to_bf16(low); });
  define_lanes<uint32_t, float, float>(
      "cvt.rn.f16x2.f32", [](float high, float low) { return uint32_t(to_f16(high)) << 16 | to_f16(low); });
}

}  // namespace executor
