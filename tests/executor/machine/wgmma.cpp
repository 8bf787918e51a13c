// wgmma: the asynchronous products of sm_90. A warp computes its 16 rows of the 64 that four warps share.
//
// A product reads its descriptors when it starts, and is computed at the wait_group that waits for it. An access to its
// registers, or a write to its shared memory, before that wait is a finding.
#include "matrices.h"

namespace executor {
namespace {

struct Shape {
  int n;           // columns
  bool registers;  // A in four registers, else in shared memory
  bool transpose_a = false, transpose_b = false;
  int a() const { return n / 2; }
  int b() const { return n / 2 + (registers ? 4 : 1); }
  int scale_d() const { return b() + 1; }
};

Shape shape_of(const Instruction& i) {
  Shape s{atoi(i.opcode.c_str() + i.opcode.find(".m64n") + 5), i.opcode.find("registers") != std::string::npos};
  const int at = s.scale_d() + 3;
  if (s.registers) s.transpose_b = i.operands[at].offset;
  else s.transpose_a = i.operands[at].offset, s.transpose_b = i.operands[at + 1].offset;
  return s;
}

// A 16-bit matrix in shared memory (PTX ISA, "Shared Memory Matrix Layout"): element (row along M or N, k).
class Tile {
 public:
  Tile(uint64_t descriptor, bool transposed)
      : start_(field(descriptor)),
        leading_(field(descriptor >> 16)),
        stride_(field(descriptor >> 32)),
        transposed_(transposed) {
    const uint32_t mode = descriptor >> 62;
    bytes_ = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 0;
  }

  uint32_t address(uint32_t row, uint32_t k) const {
    uint32_t at = start_;
    if (!bytes_)
      at += row / 8 * stride_ + k / 8 * leading_ + (transposed_ ? k % 8 * 16 + row % 8 * 2 : row % 8 * 16 + k % 8 * 2);
    else if (!transposed_) at += row / 8 * stride_ + row % 8 * bytes_ + k * 2;
    else at += row / (bytes_ / 2) * leading_ + k / 8 * stride_ + k % 8 * bytes_ + row % (bytes_ / 2) * 2;
    const uint32_t swizzled = bytes_ ? bytes_ / 16 - 1 : 0;
    return at ^ (at >> 7 & swizzled) << 4;
  }

  // Calls f with the address of every four bytes of `rows` rows from `first` on.
  template <class F>
  void for_words(int first, int rows, F f) const {
    for (int r = first; r < first + rows; r += transposed_ ? 2 : 1)
      for (int k = 0; k < 16; k += transposed_ ? 1 : 2) f(address(r, k));
  }

 private:
  static uint32_t field(uint64_t x) { return (x & 0x3FFF) << 4; }
  uint32_t start_, leading_, stride_, bytes_;
  bool transposed_;
};

template <class F>
void for_words(const Warp& w, const Product& p, const Shape& s, F f) {
  Tile(p.b, s.transpose_b).for_words(0, s.n, f);
  if (!s.registers) Tile(p.a, s.transpose_a).for_words(16 * (w.index % 4), 16, f);
}

void mark_registers(Warp& w, const Instruction& i, const Shape& s, bool accumulate) {
  const auto& o = i.operands;
  for (int n = 0; n < s.b(); n++) {
    if (!s.registers && n == s.a()) break;
    const int slot = o[n].slot;
    const bool accumulator = n < s.a();
    if (w.unfenced[slot] && (!accumulator || accumulate)) {
      w.block->report("no wgmma.fence after a register was written", w, i, -1, "operand " + std::to_string(n));
      w.unfenced[slot] = 0;
    }
    if ((w.busy[slot] & (accumulator ? A_OPERAND : ACCUMULATOR)))
      w.block->report("register of an unfinished wgmma used by another", w, i, -1, "operand " + std::to_string(n));
    w.busy[slot] |= accumulator ? ACCUMULATOR : A_OPERAND;
    if ((!accumulator || accumulate) && w.defined[slot] != ALL_LANES)
      w.block->report("register used before it was written", w, i, -1, "operand " + std::to_string(n));
    w.defined[slot] = ALL_LANES;
  }
}

void start(Warp& w, const Instruction& i, Lanes) {
  const Shape s = shape_of(i);
  const auto& o = i.operands;
  SharedMemory& shared = w.block->shared;
  Product p{&i, s.registers ? 0 : w.at<uint64_t>(o[s.a()])[0], w.at<uint64_t>(o[s.b()])[0],
            w.at<uint32_t>(o[s.scale_d()])[0] != 0};
  mark_registers(w, i, s, p.accumulate);
  for_words(w, p, s, [&](uint32_t address) {
    if (int64_t at = shared.locate(address, 4, w, i, -1); at >= 0) shared.begin_product_read(at, w, i);
  });
  w.open_products.push_back(p);
}

template <Decode F>
void finish(Warp& w, const Product& p) {
  const Instruction& i = *p.instruction;
  const Shape s = shape_of(i);
  SharedMemory& shared = w.block->shared;
  auto element = [&](uint32_t address) {
    uint16_t x = 0x7FFF;
    if (address >= SHARED_BASE && address - SHARED_BASE + 2 <= shared.size())
      memcpy(&x, shared.data(address - SHARED_BASE), 2);
    return F(x);
  };
  float a[16][16], b[16][8], d[16][8];
  if (s.registers) load_a<F>(w, &i.operands[s.a()], a);
  else
    for (int r = 0; r < 16; r++)
      for (int k = 0; k < 16; k++) a[r][k] = element(Tile(p.a, s.transpose_a).address(16 * (w.index % 4) + r, k));
  const Tile tile(p.b, s.transpose_b);
  for (int column = 0; column < s.n; column += 8) {
    for (int k = 0; k < 16; k++)
      for (int c = 0; c < 8; c++) b[k][c] = element(tile.address(column + c, k));
    const Operand* registers = &i.operands[column / 2];
    if (p.accumulate) load_d(w, registers, d);
    else memset(d, 0, sizeof d);
    multiply_add(a, b, d);
    store_d(w, registers, d);
  }
  for_words(w, p, s, [&](uint32_t address) {
    if (address >= SHARED_BASE && address - SHARED_BASE + 4 <= shared.size())
      shared.end_product_read(address - SHARED_BASE, w);
  });
}

void fence(Warp& w, const Instruction&, Lanes) { std::fill(w.unfenced.begin(), w.unfenced.end(), 0); }

void commit(Warp& w, const Instruction&, Lanes) {
  w.products.push_back(std::move(w.open_products));
  w.open_products.clear();
}

void wait(Warp& w, const Instruction& i, Lanes) {
  for (; static_cast<int64_t>(w.products.size()) > i.operands[0].offset; w.products.pop_front())
    for (const Product& p : w.products.front())
      p.instruction->opcode.find(".bf16") != std::string::npos ? finish<from_bf16>(w, p) : finish<from_f16>(w, p);
  std::fill(w.busy.begin(), w.busy.end(), FREE);
  auto mark = [&](const Product& p) {
    const Shape s = shape_of(*p.instruction);
    for (int n = 0; n < (s.registers ? s.b() : s.a()); n++)
      w.busy[p.instruction->operands[n].slot] |= n < s.a() ? ACCUMULATOR : A_OPERAND;
  };
  for (auto& group : w.products)
    for (const Product& p : group) mark(p);
  for (const Product& p : w.open_products) mark(p);
}

void fence_proxy(Warp& w, const Instruction&, Lanes) { w.block->shared.fence(w); }

void define_product(int n, const std::string& type) {
  const std::string opcode = "wgmma.mma_async.sync.aligned.m64n" + std::to_string(n) + "k16.f32." + type, d(n / 2, 'w');
  define(opcode + " registers", {start, d + "wwww8piii", 0, Control::next, true});
  define(opcode + " shared", {start, d + "88piiii", 0, Control::next, true});
}

}  // namespace

void define_wgmma() {
  for (int n = 8; n <= 256; n += 8)
    for (const char* type : {"bf16.bf16", "f16.f16"}) define_product(n, type);
  define("wgmma.fence.sync.aligned", {fence, "", 0, Control::next, true});
  define("wgmma.commit_group.sync.aligned", {commit, "", 0, Control::next, true});
  define("wgmma.wait_group.sync.aligned", {wait, "i", 0, Control::next, true});
  define("fence.proxy.async.shared::cta", {fence_proxy, ""});
  define("fence.proxy.async", {fence_proxy, ""});
}

}  // namespace executor
