// The tensor memory accelerator: tensor maps, and copies of boxes from global to shared memory.
#include <algorithm>

#include "asynchronous.h"
#include "opcodes.h"
#include "tensor_map.h"

namespace executor {

static uint32_t box_bytes(const TensorMap& map) {
  uint32_t bytes = map.element_bytes;
  for (int n = 0; n < map.rank; n++) bytes *= map.box[n];
  return bytes;
}

void Asynchronous::copy(Warp& w, const Instruction& i, int lane, TensorMap* map, std::array<int32_t, 5> at, uint32_t to,
                        uint32_t mbarrier) {
  int64_t barrier_offset;
  MBarrier* b = find(w, i, mbarrier, barrier_offset);
  const int64_t offset = block_.shared.locate(to, 128, w, i, lane);
  const uint32_t bytes = box_bytes(*map);
  if (!b || offset < 0) return;
  if (offset + bytes > block_.shared.size()) {
    block_.report("outside shared memory", w, i, lane,
                  "offset " + std::to_string(offset) + ", " + std::to_string(bytes) + " bytes");
    return;
  }
  if (!b->fenced) block_.report("no fence between mbarrier.init and its use by TMA", w, i, lane, "");
  block_.shared.begin_bulk(static_cast<uint32_t>(offset), bytes, w, i, lane);
  const uint32_t from = static_cast<uint32_t>(offset), counter = static_cast<uint32_t>(barrier_offset);
  copies_.push_back({&i, &w, map, at, from, bytes, counter, b->phases});
}

void Asynchronous::land(size_t index) {
  const BulkCopy c = copies_[index];
  copies_.erase(copies_.begin() + index);
  const TensorMap& map = *c.map;
  const uint32_t row_bytes = map.box[0] * map.element_bytes;
  const uint32_t swizzle = map.swizzle_bytes ? map.swizzle_bytes / 16 - 1 : 0;
  auto found = mbarriers_.find(c.mbarrier);
  if (found == mbarriers_.end() || found->second.phases != c.phase) {
    block_.report("mbarrier: bytes that its phase did not expect", *c.warp, *c.instruction, -1,
                  std::to_string(c.bytes) + " bytes land in a later phase of the mbarrier at shared offset " +
                      std::to_string(c.mbarrier));
    if (found == mbarriers_.end()) return;
  }
  MBarrier& b = found->second;
  std::vector<unsigned char> data(c.bytes);
  for (uint32_t row = 0, rows = c.bytes / row_bytes; row < rows; row++) {
    uint64_t address = map.base + static_cast<int64_t>(c.at[0]) * map.element_bytes;
    bool inside = true;
    for (uint32_t n = 1, rest = row; n < map.rank; rest /= map.box[n], n++) {
      const int64_t at = c.at[n] + static_cast<int64_t>(rest % map.box[n]);
      inside &= at >= 0 && at < map.dimensions[n];
      address += at * map.strides[n - 1];
    }
    uint64_t pieces[LANES];
    Lanes read = 0;
    for (uint32_t at = 0; at < row_bytes; at += 16) {  // a row has at most 256 bytes
      const int64_t element = c.at[0] + static_cast<int64_t>(at / map.element_bytes);
      const uint32_t to = row * row_bytes + at;
      const uint32_t place = (SHARED_BASE + c.to + to) ^ ((SHARED_BASE + c.to + to) >> 7 & swizzle) << 4;
      unsigned char* into = &data[place - SHARED_BASE - c.to];
      memset(into, 0, 16);
      if (!inside || element < 0 || element >= map.dimensions[0]) continue;
      pieces[at / 16] = address + at, read |= 1u << at / 16;
      if (unsigned char* p = block_.global(address + at, 16, *c.warp, *c.instruction, -1, false)) memcpy(into, p, 16);
    }
    block_.count_sectors(pieces, 0, 16, read, false);
  }
  block_.shared.end_bulk(c.to, data.data(), c.bytes, b.index, c.phase + 1);
  b.bytes -= c.bytes, b.copied = std::max(b.copied, c.phase + 1), last_copy_ = c;
  complete(c.mbarrier, b);
}

void Asynchronous::land_some() {
  while (!copies_.empty() && random_() % 100 < eagerness_) land(random_() % copies_.size());
}

bool Asynchronous::land_one() {
  if (copies_.empty()) return false;
  land(random_() % copies_.size());
  return true;
}

namespace {

template <int RANK>
void copy_box(Warp& w, const Instruction& i, Lanes m) {
  for (int l = 0; l < LANES; l++) {
    if (!(m >> l & 1)) continue;
    const auto& o = i.operands;
    const uint64_t map_at = w.at<uint64_t>(o[1])[l] + o[1].offset - PARAMETER_BASE;
    auto& parameters = w.block->launch.parameters;
    auto* map = reinterpret_cast<TensorMap*>(&parameters[0] + map_at);
    if (map_at + 128 > parameters.size() || map_at % 64 || map->magic != TensorMap::MAGIC || map->rank != RANK) {
      w.block->report("no tensor map", w, i, l,
                      "of rank " + std::to_string(RANK) + " at parameter offset " + std::to_string(map_at));
      continue;
    }
    std::array<int32_t, 5> at{};
    for (int n = 0; n < RANK; n++) at[n] = w.at<int32_t>(o[2 + n])[l];
    auto address = [&](const Operand& x) { return w.at<uint32_t>(x)[l] + static_cast<uint32_t>(x.offset); };
    w.block->asynchronous->copy(w, i, l, map, at, address(o[0]), address(o[2 + RANK]));
  }
}

template <int RANK>
void define_copy() {
  define("cp.async.bulk.tensor." + std::to_string(RANK) + "d.shared::cluster.global.mbarrier::complete_tx::bytes",
         {copy_box<RANK>, "sg" + std::string(RANK, '4') + "s"});
}

}  // namespace

void define_tma() { define_copy<2>(), define_copy<3>(), define_copy<4>(), define_copy<5>(); }

}  // namespace executor

using executor::TensorMap;

extern "C" int cuTensorMapEncodeTiled(void* to, int type, uint32_t rank, void* base, const uint64_t* dimensions,
                                      const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                      int interleave, int swizzle, int, int fill) {
  constexpr int INVALID_VALUE = 1, NOT_SUPPORTED = 801;
  constexpr int FLOAT16 = 6, BFLOAT16 = 9;
  if (interleave || fill || (type != FLOAT16 && type != BFLOAT16) || rank < 2 || rank > 5) return NOT_SUPPORTED;
  TensorMap map{};
  map.magic = TensorMap::MAGIC, map.base = reinterpret_cast<uint64_t>(base);
  map.rank = static_cast<uint8_t>(rank), map.element_bytes = 2;
  map.swizzle_bytes = static_cast<uint8_t>(swizzle ? 16 << swizzle : 0);
  bool valid = reinterpret_cast<uint64_t>(to) % 64 == 0 && map.base % 16 == 0 && swizzle >= 0 && swizzle <= 3;
  for (uint32_t n = 0; n < rank; n++) {
    valid &= dimensions[n] > 0 && dimensions[n] <= 1ull << 32 && box[n] > 0 && box[n] <= 256 && element_strides[n] == 1;
    map.dimensions[n] = static_cast<uint32_t>(dimensions[n]), map.box[n] = static_cast<uint16_t>(box[n]);
    if (n + 1 < rank) valid &= strides[n] % 16 == 0 && strides[n] < 1ull << 40, map.strides[n] = strides[n];
  }
  const uint32_t row_bytes = box[0] * map.element_bytes;
  valid &= row_bytes % 16 == 0 && (!map.swizzle_bytes || row_bytes <= map.swizzle_bytes);
  if (!valid) return INVALID_VALUE;
  memset(to, 0, 128);
  memcpy(to, &map, sizeof map);
  return 0;
}
