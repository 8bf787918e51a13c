// Accesses to the tensors of a launch.
#include <sys/mman.h>

#include "machine.h"

namespace executor {

template <class T>
Notes<T>::Notes(uint64_t count) : bytes_((count + 1) * sizeof(std::atomic<T>)) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  first_ = static_cast<std::atomic<T>*>(memory);
}

template <class T>
Notes<T>::~Notes() {
  munmap(first_, bytes_);
}

template class Notes<uint32_t>;
template class Notes<bool>;

Buffer::Buffer(std::string n, uint64_t b, uint64_t size)
    : name(std::move(n)),
      base(b),
      bytes(size),
      writer(size / 2),
      was_read(size / 2) {}

std::string hex(uint64_t value) {
  char text[24];
  snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(value));
  return text;
}

Buffer* Block::find_buffer(uint64_t address, uint32_t bytes) {
  auto inside = [&](const Buffer& b) { return address >= b.base && address + bytes <= b.base + b.bytes; };
  auto& buffers = launch.buffers;
  if (last_buffer < buffers.size() && inside(*buffers[last_buffer])) return buffers[last_buffer].get();
  for (last_buffer = 0; last_buffer < buffers.size(); last_buffer++)
    if (inside(*buffers[last_buffer])) return buffers[last_buffer].get();
  return nullptr;
}

std::string Block::nearest_buffer(uint64_t address) const {
  const Buffer* nearest = nullptr;
  uint64_t least = ~0ull;
  for (auto& b : launch.buffers) {
    uint64_t distance = address < b->base              ? b->base - address
                        : address - b->base < b->bytes ? 0
                                                       : address - b->base - b->bytes;
    if (distance < least) least = distance, nearest = b.get();
  }
  if (!nearest) return "";
  return "; the nearest tensor is " + nearest->name + " of " + std::to_string(nearest->bytes) + " bytes, offset " +
         std::to_string(static_cast<int64_t>(address - nearest->base));
}

// Returns the tensor of an access. Outside all tensors, reports a finding and returns null.
Buffer* Block::place(uint64_t address, uint32_t bytes, const Warp& w, const Instruction& i, int lane, bool write) {
  if (address % bytes) {
    report("misaligned global access", w, i, lane,
           "address " + hex(address) + " for " + std::to_string(bytes) + " bytes");
    return nullptr;
  }
  Buffer* b = find_buffer(address, bytes);
  if (!b)
    report(write ? "write outside the tensors" : "read outside the tensors", w, i, lane,
           std::to_string(bytes) + " bytes at " + hex(address) + nearest_buffer(address));
  return b;
}

static std::string written_by(const Buffer& b, uint64_t n, uint32_t writer) {
  const std::string who = writer == ADDED ? "several blocks" : "block " + std::to_string((writer & ~ADDED) - 1);
  return b.name + " byte " + std::to_string(2 * n) + (writer & ADDED ? ", added to by " : ", written by ") + who;
}

unsigned char* Block::global(uint64_t address, uint32_t bytes, const Warp& w, const Instruction& i, int lane,
                             bool write) {
  Buffer* b = place(address, bytes, w, i, lane, write);
  if (!b) return nullptr;
  const uint64_t first = (address - b->base) / 2, end = (address - b->base + bytes + 1) / 2;
  for (uint64_t n = first; n < end; n++) {
    uint32_t writer = b->writer[n].load(std::memory_order_relaxed);
    if (writer && (writer & ~ADDED) != linear + 1)
      report(write ? "race: two blocks write" : "race: read of another block's write", w, i, lane,
             written_by(*b, n, writer));
    if (write) b->writer[n].store(linear + 1, std::memory_order_relaxed);
    else if (!b->was_read[n].load(std::memory_order_relaxed))
      b->was_read[n].store(true, std::memory_order_relaxed), b->distinct_read += 2;
  }
  (write ? b->written : b->read) += bytes;
  return reinterpret_cast<unsigned char*>(address);
}

// Atomic additions do not race with each other. They race with plain accesses of other blocks.
unsigned char* Block::global_add(uint64_t address, uint32_t bytes, const Warp& w, const Instruction& i, int lane) {
  Buffer* b = place(address, bytes, w, i, lane, true);
  if (!b) return nullptr;
  const uint64_t first = (address - b->base) / 2, end = (address - b->base + bytes + 1) / 2;
  for (uint64_t n = first; n < end; n++) {
    uint32_t writer = b->writer[n].load(std::memory_order_relaxed), now;
    do {
      now = !writer || writer == (linear + 1 | ADDED) ? linear + 1 | ADDED : writer & ADDED ? ADDED : writer;
    } while (now != writer && !b->writer[n].compare_exchange_weak(writer, now, std::memory_order_relaxed));
    if (!(now & ADDED) && now != linear + 1)
      report("race: atomic addition to another block's write", w, i, lane, written_by(*b, n, now));
  }
  b->written += bytes;
  return reinterpret_cast<unsigned char*>(address);
}

void Block::count_sectors(const uint64_t* addresses, int64_t offset, uint32_t bytes, Lanes lanes, bool write) {
  uint64_t seen[LANES];
  int count = 0;
  for (int l = 0; l < LANES; l++) {
    if (!(lanes >> l & 1)) continue;
    uint64_t sector = (addresses[l] + offset) / 32;
    bool known = false;
    for (int n = count; n-- > 0 && !known;) known = seen[n] == sector;
    if (known) continue;
    seen[count++] = sector;
    if (Buffer* b = find_buffer(addresses[l] + offset, bytes)) (write ? b->sectors_written : b->sectors_read)++;
  }
}

}  // namespace executor
