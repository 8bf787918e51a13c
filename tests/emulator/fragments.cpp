// The emulated collectives on their own. The tests compare them with the layouts that the PTX ISA documents.

#include <ptx.h>

namespace {

struct Fragments {
  const uint32_t *a, *b;    // mma: (32, 4) and (32, 2) registers
  const uint16_t* numbers;  // ldmatrix: (4, 8, 8)
  float* c;                 // (32, 4), added to
  uint32_t* x;              // (32, 4)
  bool flag;                // mma: bfloat16; ldmatrix: transposed
};

void mma(Fragments p) {
  const unsigned lane = threadIdx.x;
  uint32_t a[4];
  float c[4];
  std::copy(p.a + 4 * lane, p.a + 4 * lane + 4, a);
  std::copy(p.c + 4 * lane, p.c + 4 * lane + 4, c);
  const uint32_t *b = p.b + 2 * lane;
  if (p.flag) {
    flashrope::multiply<flashrope::BFloat16>(c, a, b[0], b[1]);
  } else {
    flashrope::multiply<flashrope::Float16>(c, a, b[0], b[1]);
  }
  std::copy(c, c + 4, p.c + 4 * lane);
}

void ldmatrix(Fragments p) {
  const unsigned lane = threadIdx.x;
  unsigned char* row = flashrope::shared_memory() + 16 * lane;
  std::memcpy(row, p.numbers + 8 * lane, 16);
  __syncwarp();
  uint32_t x[4];
  p.flag ? flashrope::load_matrices_transposed(x, row) : flashrope::load_matrices(x, row);
  std::copy(x, x + 4, p.x + 4 * lane);
}

}  // namespace

extern "C" {

const char* emulated_mma(const uint32_t* a, const uint32_t* b, float* c, int bfloat16) {
  return flashrope::launch(mma, dim3(), 32, 0, nullptr, Fragments{a, b, nullptr, c, nullptr, bfloat16 != 0});
}

const char* emulated_ldmatrix(const uint16_t* numbers, uint32_t* x, int transposed) {
  const Fragments fragments{nullptr, nullptr, numbers, nullptr, x, transposed != 0};
  return flashrope::launch(ldmatrix, dim3(), 32, 512, nullptr, fragments);
}

void emulated_narrow(const float* from, uint16_t* to, int count, int bfloat16) {
  for (int i = 0; i < count; ++i) {
    to[i] = bfloat16 ? flashrope::BFloat16::narrow(from[i]) : flashrope::Float16::narrow(from[i]);
  }
}

void emulated_wide(const uint16_t* from, float* to, int count, int bfloat16) {
  for (int i = 0; i < count; ++i) {
    to[i] = bfloat16 ? flashrope::BFloat16::wide(from[i]) : flashrope::Float16::wide(from[i]);
  }
}
}
