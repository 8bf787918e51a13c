// The shared memory of a block, and the rules by which warps and lanes may access it.
//
// Between two barriers (an epoch) a warp may not read bytes that another warp wrote, nor write bytes that another warp
// read or wrote. Writing the value that is already there is no race: Triton's replicated layouts store equal values
// from several warps. Within a warp, bar.warp.sync orders the lanes. A shuffle passes on loaded values, so after a
// shuffle the warp's earlier loads count as complete, too.
#include "machine.h"

namespace executor {
namespace {

constexpr uint64_t EACH_BYTE = 0x0001000100010001;

uint64_t warp_bit(const Warp& w) { return EACH_BYTE << w.index; }

// Returns 16 set bits for every byte of the word that lies inside the access.
uint64_t bytes_touched(uint32_t word, uint32_t offset, uint32_t bytes) {
  if (offset % 4 == 0 && bytes >= 4) return ~0ull;
  uint64_t mask = 0;
  for (uint32_t k = 0; k < 4; k++)
    if (4 * word + k >= offset && 4 * word + k < offset + bytes) mask |= 0xFFFFull << 16 * k;
  return mask;
}

uint8_t byte_bits(uint64_t touched) {
  return (touched & 1) | (touched >> 15 & 2) | (touched >> 30 & 4) | (touched >> 45 & 8);
}

}  // namespace

SharedMemory::SharedMemory(uint32_t bytes) : size_(bytes), bytes_(bytes + 64), words_(bytes / 4 + 16) {}

void SharedMemory::clear() {
  epoch_ = 1;
  for (size_t at = 0; at + 4 <= bytes_.size(); at += 4) memcpy(&bytes_[at], &POISON, 4);
  std::fill(words_.begin(), words_.end(), Word());
  unfenced_.clear();
}

int64_t SharedMemory::locate(uint32_t address, uint32_t bytes, const Warp& w, const Instruction& i, int lane) {
  int64_t offset = static_cast<int64_t>(address) - SHARED_BASE;
  if (address % bytes) {
    w.block->report("misaligned shared access", w, i, lane,
                    "offset " + std::to_string(offset) + " for " + std::to_string(bytes) + " bytes");
    return -1;
  }
  if (offset < 0 || offset + bytes > size_) {
    w.block->report("outside shared memory", w, i, lane,
                    "offset " + std::to_string(offset) + " of " + std::to_string(size_));
    return -1;
  }
  return offset;
}

void SharedMemory::race(const char* kind, uint32_t word, const Warp& w, const Instruction& i, int lane) {
  const Word& x = words_[word];
  w.block->report(kind, w, i, lane,
                  "shared offset " + std::to_string(4 * word) + ", written by warps " + hex(x.writers & 0xFFFF) +
                      " in epoch " + std::to_string(x.write_epoch) + ", read by warps " + hex(x.readers & 0xFFFF) +
                      " in epoch " + std::to_string(x.read_epoch) + ", now epoch " + std::to_string(epoch_));
}

void SharedMemory::note_read(uint32_t offset, uint32_t bytes, const Warp& w, const Instruction& i, int lane) {
  const uint64_t self = warp_bit(w);
  for (uint32_t n = offset / 4; n < (offset + bytes + 3) / 4; n++) {
    Word& x = words_[n];
    const uint64_t touched = bytes_touched(n, offset, bytes);
    if (x.copying >= 0) race("shared memory read before cp.async was waited for", n, w, i, lane);
    else if (byte_bits(touched) & ~x.initialised) race("shared memory read before it was written", n, w, i, lane);
    if (x.write_epoch == epoch_) {
      // If this warp wrote a byte too, every other writer wrote the same value.
      uint64_t own = (x.writers >> w.index & EACH_BYTE) * 0xFFFF;
      if (x.writers & touched & ~own) race("race: read of another warp's write", n, w, i, lane);
      else if ((x.writers & touched & self) && lane >= 0 && x.write_lane >= 0 && x.write_lane != lane &&
               x.write_sync == w.syncs)
        race("race in a warp: read of another lane's write", n, w, i, lane);
    }
    if (x.read_epoch != epoch_) x.readers = 0, x.read_epoch = epoch_;
    x.readers |= self & touched;
    if (x.read_warp != w.index || x.read_meeting != w.meetings)
      x.read_lanes = 0, x.read_warp = w.index, x.read_meeting = w.meetings;
    if (lane >= 0) x.read_lanes |= 1u << lane;
  }
}

void SharedMemory::note_write(uint32_t offset, uint32_t bytes, const Warp& w, const Instruction& i, int lane,
                              const void* data) {
  const bool same = data && !memcmp(&bytes_[offset], data, bytes);
  const uint64_t self = warp_bit(w);
  for (uint32_t n = offset / 4; n < (offset + bytes + 3) / 4; n++) {
    Word& x = words_[n];
    const uint64_t touched = bytes_touched(n, offset, bytes);
    if (x.copying >= 0) race("shared memory written before cp.async was waited for", n, w, i, lane);
    if (x.products) race("shared memory written under an unfinished wgmma", n, w, i, lane);
    if (x.write_epoch != epoch_) x.writers = 0;
    if (!same && (x.writers & touched & ~self)) race("race: two warps write", n, w, i, lane);
    else if (!same && (x.writers & touched & self) && x.write_lane != lane && x.write_sync == w.syncs)
      race("race in a warp: two lanes write", n, w, i, lane);
    if (x.read_epoch == epoch_) {
      if ((x.readers & touched & ~self) && !(same && (x.writers & touched)))
        race("race: write of what another warp reads", n, w, i, lane);
      if (!same && (x.readers & touched & self) && x.read_warp == w.index && x.read_meeting == w.meetings &&
          (x.read_lanes & ~(1u << lane)))
        race("race in a warp: write of what another lane reads", n, w, i, lane);
    }
    x.write_epoch = epoch_, x.writers |= self & touched, x.write_lane = lane, x.write_sync = w.syncs;
    x.initialised |= byte_bits(touched);
  }
}

void SharedMemory::read(uint32_t offset, uint32_t bytes, const Warp& w, const Instruction& i, int lane) {
  note_read(offset, bytes, w, i, lane);
}

void SharedMemory::write(uint32_t offset, const void* data, uint32_t bytes, const Warp& w, const Instruction& i,
                         int lane) {
  note_write(offset, bytes, w, i, lane, data);
  for (uint32_t n = offset / 4; n < (offset + bytes + 3) / 4; n++) {
    Word& x = words_[n];
    if (!x.unfenced) unfenced_.push_back(n);
    const uint16_t writers = x.writers | x.writers >> 16 | x.writers >> 32 | x.writers >> 48;
    x.unfenced_writers = (x.unfenced_writers & writers) | 1u << w.index;
    x.unfenced = 0xFFFF;
  }
  memcpy(&bytes_[offset], data, bytes);
}

void SharedMemory::begin_copy(uint32_t offset, uint32_t bytes, const Warp& w, const Instruction& i, int lane) {
  note_write(offset, bytes, w, i, lane, nullptr);
  for (uint32_t n = offset / 4; n < (offset + bytes) / 4; n++) {
    words_[n].copying = static_cast<int8_t>(w.index);
    words_[n].unfenced = words_[n].unfenced_writers = 0;  // Triton's own code fences no cp.async before wgmma
    memcpy(&bytes_[4 * n], &POISON, 4);
  }
}

void SharedMemory::end_copy(uint32_t offset, const void* data, uint32_t bytes, const Warp& w, int lane) {
  memcpy(&bytes_[offset], data, bytes);
  for (uint32_t n = offset / 4; n < (offset + bytes) / 4; n++) {
    Word& x = words_[n];
    x.copying = -1, x.write_epoch = epoch_, x.writers = warp_bit(w), x.write_lane = static_cast<int8_t>(lane),
    x.write_sync = w.syncs;
  }
}

void SharedMemory::begin_product_read(uint32_t offset, const Warp& w, const Instruction& i) {
  note_read(offset, 4, w, i, -1);
  Word& x = words_[offset / 4];
  if (x.unfenced >> w.index & 1) race("no fence.proxy.async between the write and wgmma", offset / 4, w, i, -1);
  x.products++;
}

void SharedMemory::end_product_read(uint32_t offset, const Warp& w) {
  Word& x = words_[offset / 4];
  x.products--;
  if (x.read_epoch != epoch_) x.readers = 0, x.read_epoch = epoch_;
  x.readers |= warp_bit(w);
}

// wgmma sees a write after a fence of the writing warp before the barrier, or a fence of the reading warp after it.
void SharedMemory::fence(const Warp& w) {
  size_t kept = 0;
  for (uint32_t n : unfenced_) {
    Word& x = words_[n];
    x.unfenced_writers &= ~(1u << w.index);
    if (!x.unfenced_writers) x.unfenced = 0;
    else if (x.write_epoch < epoch_) x.unfenced &= ~(1u << w.index);
    if (x.unfenced) unfenced_[kept++] = n;
  }
  unfenced_.resize(kept);
}

}  // namespace executor
