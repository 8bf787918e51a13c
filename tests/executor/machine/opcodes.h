// Helpers that define opcodes lane by lane from a lambda.
#pragma once

#include "machine.h"

namespace executor {

struct Predicate {};  // stored as a register whose lanes are 0 or all ones

template <class T>
constexpr char kind() {
  return sizeof(T) == 2 ? '2' : sizeof(T) == 8 ? '8' : '4';
}
template <>
constexpr char kind<Predicate>() {
  return 'p';
}

template <class T>
struct Stored {
  using type = T;
};
template <>
struct Stored<Predicate> {
  using type = uint32_t;
};

// define_lanes<Result, Inputs...>("opcode", [](inputs...) { return result; })
template <class D, class... A, class F>
void define_lanes(const std::string& opcode, F) {
  define(opcode, {[](Warp& w, const Instruction& i, Lanes m) {
                    using Result = typename Stored<D>::type;
                    Result* to = w.at<Result>(i.operands[0]);
                    auto run = [&]<size_t... N>(std::index_sequence<N...>) {
                      auto from = std::make_tuple(w.at<typename Stored<A>::type>(i.operands[N + 1])...);
                      for_lanes(m, [&](int l) { to[l] = static_cast<Result>(F{}(std::get<N>(from)[l]...)); });
                    };
                    run(std::index_sequence_for<A...>());
                  },
                  {kind<D>(), kind<A>()...},
                  1});
}

template <class A, class F>
void define_comparison(const std::string& opcode, F) {
  define_lanes<Predicate, A, A>(opcode, [](A a, A b) { return F{}(a, b) ? ALL_LANES : 0u; });
}

inline float as_float(uint32_t x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
inline uint32_t as_bits(float x) {
  uint32_t y;
  memcpy(&y, &x, 4);
  return y;
}
inline float from_bf16(uint16_t x) { return as_float(static_cast<uint32_t>(x) << 16); }
uint16_t to_bf16(float x);
float from_f16(uint16_t x);
uint16_t to_f16(float x);

void define_integers();
void define_floats();
void define_conversions();
void define_memory();
void define_atomics();
void define_matrices();
void define_wgmma();
void define_warp();

}  // namespace executor
