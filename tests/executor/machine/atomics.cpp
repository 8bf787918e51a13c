// Atomic additions to global memory.
#include "opcodes.h"

namespace executor {
namespace {

// Adds to a float that other threads of this process also add to. Returns its bits from before the addition.
uint32_t add_float(unsigned char* p, float value) {
  uint32_t* word = reinterpret_cast<uint32_t*>(p);
  uint32_t before = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &before, as_bits(as_float(before) + value), true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return before;
}

// Makes N additions to consecutive addresses. Each addition is atomic, but not all of them together.
template <int N, bool RETURNS>
void add_global(Warp& w, const Instruction& i, Lanes m) {
  const Operand& to = i.operands[RETURNS ? N : 0];
  uint64_t base[LANES];
  memcpy(base, w.at<uint64_t>(to), sizeof base);  // a result may overwrite its own address
  w.block->count_sectors(base, to.offset, 4 * N, m, true);
  for (int l = 0; l < LANES; l++) {
    if (!(m >> l & 1)) continue;
    unsigned char* p = w.block->global_add(base[l] + to.offset, 4 * N, w, i, l);
    for (int n = 0; n < N; n++) {
      const float value = as_float(w.at<uint32_t>(i.operands[(RETURNS ? N : 0) + 1 + n])[l]);
      const uint32_t before = p ? add_float(p + 4 * n, value) : POISON;
      if (RETURNS) w.at<uint32_t>(i.operands[n])[l] = before;
    }
  }
}

template <int N>
void define_additions(const std::string& vector) {
  const std::string values(N, '4');
  define("atom.global.add" + vector + ".f32", {add_global<N, true>, values + "g" + values, N});
  define("red.global.add" + vector + ".f32", {add_global<N, false>, "g" + values});
}

}  // namespace

void define_atomics() { define_additions<1>(""), define_additions<2>(".v2"), define_additions<4>(".v4"); }

}  // namespace executor
