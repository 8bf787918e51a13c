// Loads, stores and cp.async.
#include "opcodes.h"

namespace executor {
namespace {

// A value may be stored in a wider register.
template <class T>
void set_lane(Warp& w, const Operand& o, int lane, T value) {
  if (o.bytes == 8) w.at<uint64_t>(o)[lane] = value;
  else if (o.bytes == 4) w.at<uint32_t>(o)[lane] = static_cast<uint32_t>(value);
  else w.at<uint16_t>(o)[lane] = static_cast<uint16_t>(value);
}
template <class T>
T get_lane(Warp& w, const Operand& o, int lane) {
  if (o.bytes == 8) return static_cast<T>(w.at<uint64_t>(o)[lane]);
  if (o.bytes == 4) return static_cast<T>(w.at<uint32_t>(o)[lane]);
  return static_cast<T>(w.at<uint16_t>(o)[lane]);
}

template <int N, class T>
void load_global(Warp& w, const Instruction& i, Lanes m) {
  const Operand& from = i.operands[N];
  uint64_t base[LANES];
  memcpy(base, w.at<uint64_t>(from), sizeof base);  // a result may overwrite its own address
  w.block->count_sectors(base, from.offset, N * sizeof(T), m, false);
  for (int l = 0; l < LANES; l++) {
    if (!(m >> l & 1)) continue;
    const unsigned char* p = w.block->global(base[l] + from.offset, N * sizeof(T), w, i, l, false);
    T values[N];
    memset(values, 0x7F, sizeof values);
    if (p) memcpy(values, p, sizeof values);
    for (int n = 0; n < N; n++) set_lane(w, i.operands[n], l, values[n]);
  }
}

template <int N, class T>
void store_global(Warp& w, const Instruction& i, Lanes m) {
  const Operand& to = i.operands[0];
  const uint64_t* base = w.at<uint64_t>(to);
  w.block->count_sectors(base, to.offset, N * sizeof(T), m, true);
  for (int l = 0; l < LANES; l++) {
    if (!(m >> l & 1)) continue;
    T values[N];
    for (int n = 0; n < N; n++) values[n] = get_lane<T>(w, i.operands[1 + n], l);
    if (unsigned char* p = w.block->global(base[l] + to.offset, N * sizeof(T), w, i, l, true))
      memcpy(p, values, sizeof values);
  }
}

template <int N, class T>
void load_shared(Warp& w, const Instruction& i, Lanes m) {
  SharedMemory& shared = w.block->shared;
  const Operand& from = i.operands[N];
  uint32_t base[LANES];
  memcpy(base, w.at<uint32_t>(from), sizeof base);
  for (int l = 0; l < LANES; l++) {
    if (!(m >> l & 1)) continue;
    int64_t at = shared.locate(base[l] + static_cast<uint32_t>(from.offset), N * sizeof(T), w, i, l);
    T values[N];
    memset(values, 0x7F, sizeof values);
    if (at >= 0) shared.read(at, sizeof values, w, i, l), memcpy(values, shared.data(at), sizeof values);
    for (int n = 0; n < N; n++) set_lane(w, i.operands[n], l, values[n]);
  }
}

template <int N, class T>
void store_shared(Warp& w, const Instruction& i, Lanes m) {
  SharedMemory& shared = w.block->shared;
  const Operand& to = i.operands[0];
  const uint32_t* base = w.at<uint32_t>(to);
  for (int l = 0; l < LANES; l++) {
    if (!(m >> l & 1)) continue;
    T values[N];
    for (int n = 0; n < N; n++) values[n] = get_lane<T>(w, i.operands[1 + n], l);
    int64_t at = shared.locate(base[l] + static_cast<uint32_t>(to.offset), N * sizeof(T), w, i, l);
    if (at >= 0) shared.write(at, values, sizeof values, w, i, l);
  }
}

template <int N, class T>
void load_parameter(Warp& w, const Instruction& i, Lanes m) {
  const std::vector<unsigned char>& parameters = w.block->launch.parameters;
  const Operand& from = i.operands[N];
  for (int l = 0; l < LANES; l++) {
    if (!(m >> l & 1)) continue;
    const uint64_t at = w.at<uint64_t>(from)[l] + from.offset - PARAMETER_BASE;
    T values[N];
    memset(values, 0x7F, sizeof values);
    if (at % sizeof values || at + sizeof values > parameters.size())
      w.block->report("read outside the parameters", w, i, l,
                      "offset " + std::to_string(int64_t(at)) + " of " + std::to_string(parameters.size()));
    else memcpy(values, &parameters[at], sizeof values);
    for (int n = 0; n < N; n++) set_lane(w, i.operands[n], l, values[n]);
  }
}

template <int N, class T>
void define_vectors(const std::string& suffix) {
  const std::string values(N, sizeof(T) == 8 ? '8' : sizeof(T) == 4 ? 'f' : 'h');
  define("ld.global" + suffix, {load_global<N, T>, values + "g", N});
  define("st.global" + suffix, {store_global<N, T>, "g" + values});
  define("ld.shared" + suffix, {load_shared<N, T>, values + "s", N});
  define("st.shared" + suffix, {store_shared<N, T>, "s" + values});
  define("ld.param" + suffix, {load_parameter<N, T>, values + "P", N});
}

// A narrow value may be loaded into a wider register. A signed value fills the register with its sign.
template <class T>
void define_accesses(std::initializer_list<const char*> types) {
  for (const std::string type : types) {
    define_vectors<1, T>("." + type), define_vectors<2, T>(".v2." + type);
    if constexpr (sizeof(T) < 8) define_vectors<4, T>(".v4." + type);
  }
}

// cp.async [shared], [global], bytes, bytes to read. Reading only a part is not modelled. If no bytes are read, zeros
// are written.
void copy_async(Warp& w, const Instruction& i, Lanes m) {
  Block& b = *w.block;
  const Operand &to = i.operands[0], &from = i.operands[1];
  const uint32_t bytes = static_cast<uint32_t>(i.operands[2].offset);
  const uint32_t* given = i.operands.size() > 3 ? w.at<uint32_t>(i.operands[3]) : nullptr;
  Lanes reading = m;
  for (int l = 0; l < LANES; l++)
    if (given && !given[l]) reading &= ~(1u << l);
  b.count_sectors(w.at<uint64_t>(from), from.offset, bytes, reading, false);
  for (int l = 0; l < LANES; l++) {
    if (!(m >> l & 1)) continue;
    int64_t at = b.shared.locate(w.at<uint32_t>(to)[l] + static_cast<uint32_t>(to.offset), bytes, w, i, l);
    const uint64_t address = w.at<uint64_t>(from)[l] + from.offset;
    uint32_t read = given ? given[l] : bytes;
    if (read > bytes)
      b.report("cp.async reads more than it copies", w, i, l, std::to_string(read) + " bytes"), read = bytes;
    if (!read && address % bytes)
      b.report("misaligned global access", w, i, l,
               "address " + hex(address) + " of a masked copy of " + std::to_string(bytes) + " bytes");
    Copy copy{static_cast<uint32_t>(at), bytes, l, {}};
    if (read == bytes) {
      if (unsigned char* p = b.global(address, bytes, w, i, l, false)) memcpy(copy.data, p, bytes);
      else memset(copy.data, 0x7F, bytes);
    } else if (read) {
      throw Error("cp.async that reads only a part of its bytes is not modelled, line " + std::to_string(i.line));
    }
    if (at < 0) continue;
    b.shared.begin_copy(copy.to, bytes, w, i, l);
    w.open_copies.push_back(copy);
  }
}

// A prefetch changes nothing that a program can see. Here its addresses must lie in the tensors.
void prefetch(Warp& w, const Instruction& i, Lanes m) {
  for (int l = 0; l < LANES; l++)
    if (m >> l & 1) w.block->place(w.at<uint64_t>(i.operands[0])[l] + i.operands[0].offset, 1, w, i, l, false);
}

void land(Warp& w, const std::vector<Copy>& group) {
  for (const Copy& c : group) w.block->shared.end_copy(c.to, c.data, c.bytes, w, c.lane);
}

void commit_copies(Warp& w, const Instruction&, Lanes) {
  w.copies.push_back(std::move(w.open_copies));
  w.open_copies.clear();
}

void wait_copies(Warp& w, const Instruction& i, Lanes) {
  for (; static_cast<int64_t>(w.copies.size()) > i.operands[0].offset; w.copies.pop_front()) land(w, w.copies.front());
}

void wait_all_copies(Warp& w, const Instruction& i, Lanes m) {
  commit_copies(w, i, m);
  for (; !w.copies.empty(); w.copies.pop_front()) land(w, w.copies.front());
}

}  // namespace

void define_memory() {
  define_accesses<uint8_t>({"b8", "u8"}), define_accesses<int8_t>({"s8"});
  define_accesses<uint16_t>({"b16", "u16"}), define_accesses<int16_t>({"s16"});
  define_accesses<uint32_t>({"b32", "u32", "f32"}), define_accesses<int32_t>({"s32"});
  define_accesses<uint64_t>({"b64", "u64", "s64"});
  define("cp.async.cg.shared.global", {copy_async, "sgi4", 0, Control::next, false, 3});
  define("cp.async.ca.shared.global", {copy_async, "sgi4", 0, Control::next, false, 3});
  define("prefetch.global.L2", {prefetch, "g"});
  define("cp.async.commit_group", {commit_copies, "", 0, Control::next, true});
  define("cp.async.wait_group", {wait_copies, "i", 0, Control::next, true});
  define("cp.async.wait_all", {wait_all_copies, "", 0, Control::next, true});
}

}  // namespace executor
