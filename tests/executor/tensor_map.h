// A tensor map as the executor keeps it in the 128 bytes of a CUtensorMap, whose own form is not documented.
#pragma once

#include <cstdint>

namespace executor {

struct TensorMap {
  uint64_t magic, base;
  uint64_t strides[4];   // bytes, from the second dimension on
  uint32_t dimensions[5];  // elements; the first is the innermost
  uint16_t box[5];
  uint8_t rank, element_bytes, swizzle_bytes;

  static constexpr uint64_t MAGIC = 0x6D61705F72736E74;
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace executor
