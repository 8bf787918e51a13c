// ldmatrix, stmatrix and mma.sync.
#include "matrices.h"

namespace executor {
namespace {

// Lane 8 n + r passes the address of row r of matrix n. Lane l holds two adjacent elements of row l / 4, or of a
// column.
template <int N, bool TRANSPOSED>
void load_matrices(Warp& w, const Instruction& i, Lanes) {
  SharedMemory& shared = w.block->shared;
  uint32_t address[LANES];
  memcpy(address, w.at<uint32_t>(i.operands[N]), sizeof address);
  for (int n = 0; n < N; n++) {
    uint16_t rows[8][8];
    memset(rows, 0x7F, sizeof rows);
    for (int r = 0; r < 8; r++) {
      int lane = 8 * n + r;
      int64_t at = shared.locate(address[lane] + static_cast<uint32_t>(i.operands[N].offset), 16, w, i, lane);
      if (at >= 0) shared.read(at, 16, w, i, lane), memcpy(rows[r], shared.data(at), 16);
    }
    uint32_t* to = w.at<uint32_t>(i.operands[n]);
    for (int l = 0; l < LANES; l++) {
      int r = l / 4, c = 2 * (l % 4);
      to[l] = TRANSPOSED ? rows[c][r] | uint32_t(rows[c + 1][r]) << 16 : rows[r][c] | uint32_t(rows[r][c + 1]) << 16;
    }
  }
}

template <int N, bool TRANSPOSED>
void store_matrices(Warp& w, const Instruction& i, Lanes) {
  SharedMemory& shared = w.block->shared;
  const uint32_t* address = w.at<uint32_t>(i.operands[0]);
  for (int n = 0; n < N; n++) {
    uint16_t rows[8][8];
    const uint32_t* from = w.at<uint32_t>(i.operands[1 + n]);
    for (int l = 0; l < LANES; l++) {
      int r = l / 4, c = 2 * (l % 4);
      (TRANSPOSED ? rows[c][r] : rows[r][c]) = static_cast<uint16_t>(from[l]);
      (TRANSPOSED ? rows[c + 1][r] : rows[r][c + 1]) = static_cast<uint16_t>(from[l] >> 16);
    }
    for (int r = 0; r < 8; r++) {
      int lane = 8 * n + r;
      int64_t at = shared.locate(address[lane] + static_cast<uint32_t>(i.operands[0].offset), 16, w, i, lane);
      if (at >= 0) shared.write(at, rows[r], 16, w, i, lane);
    }
  }
}

template <Decode F>
void multiply(Warp& w, const Instruction& i, Lanes) {
  float a[16][16], b[16][8], d[16][8];
  load_a<F>(w, &i.operands[4], a);
  for (int n = 0; n < 2; n++) {
    const uint32_t* p = w.at<uint32_t>(i.operands[8 + n]);
    for (int l = 0; l < LANES; l++) {
      int k = 2 * (l % 4) + 8 * n;
      b[k][l / 4] = F(static_cast<uint16_t>(p[l])), b[k + 1][l / 4] = F(static_cast<uint16_t>(p[l] >> 16));
    }
  }
  load_d(w, &i.operands[10], d);
  multiply_add(a, b, d);
  store_d(w, &i.operands[0], d);
}

template <int N>
void define_moves() {
  const std::string shape = ".sync.aligned.m8n8.x" + std::to_string(N), values(N, '4');
  define("ldmatrix" + shape + ".shared.b16", {load_matrices<N, false>, values + "s", N, Control::next, true});
  define("ldmatrix" + shape + ".trans.shared.b16", {load_matrices<N, true>, values + "s", N, Control::next, true});
  define("stmatrix" + shape + ".shared.b16", {store_matrices<N, false>, "s" + values, 0, Control::next, true});
  define("stmatrix" + shape + ".trans.shared.b16", {store_matrices<N, true>, "s" + values, 0, Control::next, true});
}

}  // namespace

void define_matrices() {
  define_moves<1>(), define_moves<2>(), define_moves<4>();
  const std::string operands(14, '4'), mma = "mma.sync.aligned.m16n8k16.row.col.f32.";
  define(mma + "bf16.bf16.f32", {multiply<from_bf16>, operands, 4, Control::next, true});
  define(mma + "f16.f16.f32", {multiply<from_f16>, operands, 4, Control::next, true});
}

}  // namespace executor
