// Defines the operators of namespace flashrope_cuda. Each operator checks its arguments, fills a plain struct and calls
// one launcher. flashrope/backends/cuda.py allocates the outputs and calls the operators.
//
// The operators are registered through torch's stable ABI, so one library works with TORCH_TARGET_VERSION and later
// versions.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <limits>
#include <optional>

#include "decode.h"

namespace flashrope {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t MAX_COUNT = std::numeric_limits<int>::max() / 2;  // the sum of two counts fits into 32 bits

void* current_stream(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return stream;
}

// Checks x (batch or pages, tokens or slots, heads, head_dim) and returns its view. Also checks that rows of x can be
// copied 16 bytes at a time.
TensorView check_rows(const Tensor& x, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(x.dim() == 4, name, ": expected 4 dimensions, got ", x.dim());
  STD_TORCH_CHECK(x.scalar_type() == like.scalar_type(), name, ": expected one type for all of q, k and v");
  STD_TORCH_CHECK(x.device() == like.device(), name, ": expected one device for all tensors");
  STD_TORCH_CHECK(x.size(3) == like.size(3), name, ": expected head_dim ", like.size(3), ", got ", x.size(3));
  STD_TORCH_CHECK(x.stride(3) == 1, name, ": expected a contiguous head_dim");
  bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int i = 0; i < 3; ++i) aligned &= x.stride(i) % 8 == 0 || x.size(i) == 1;
  STD_TORCH_CHECK(aligned, name, ": expected the address and the strides to be multiples of 16 bytes");
  return {const_cast<void*>(x.const_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

const int* check_int32(const Tensor& x, const char* name, int64_t dim, const Tensor& like) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Int && x.dim() == dim && x.is_contiguous(), name,
                  ": expected a contiguous int32 tensor of ", dim, " dimensions");
  STD_TORCH_CHECK(x.device() == like.device(), name, ": expected one device for all tensors");
  return static_cast<const int*>(x.const_data_ptr());
}

float* check_float32(const Tensor& x, const char* name, int64_t min_numel, const Tensor& like) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.is_contiguous() && x.numel() >= min_numel, name,
                  ": expected a contiguous float32 tensor of at least ", min_numel, " elements, got ", x.numel());
  STD_TORCH_CHECK(x.device() == like.device(), name, ": expected one device for all tensors");
  return static_cast<float*>(x.mutable_data_ptr());
}

// Checks the caches and the tables of the sequences. like: q or the new k.
CacheLayout check_cache(const Tensor& k_cache, const Tensor& v_cache, const Tensor& cache_seqlens,
                        const MaybeTensor& block_table, const Tensor& like) {
  CacheLayout layout = {};
  const int64_t batch = like.size(0), slots = k_cache.size(1);
  STD_TORCH_CHECK(like.scalar_type() == ScalarType::Half || like.scalar_type() == ScalarType::BFloat16,
                  "q or k: expected float16 or bfloat16");
  for (int i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(k_cache.size(i) == v_cache.size(i), "v_cache: expected k_cache's shape");
    STD_TORCH_CHECK(k_cache.size(i) > 0 && k_cache.size(i) < MAX_COUNT, "k_cache: expected size 1 to ", MAX_COUNT - 1,
                    " in dimension ", i, ", got ", k_cache.size(i));
    STD_TORCH_CHECK(like.size(i) > 0, "q or k: expected at least one element, got size 0 in dimension ", i);
  }
  layout.seqlens = check_int32(cache_seqlens, "cache_seqlens", 1, like);
  STD_TORCH_CHECK(cache_seqlens.size(0) == batch, "cache_seqlens: expected ", batch, " lengths");
  layout.batch = batch, layout.pages = k_cache.size(0);
  if (block_table) {
    layout.block_table = check_int32(*block_table, "block_table", 2, like);
    STD_TORCH_CHECK(block_table->size(0) == batch && block_table->size(1) > 0,
                    "block_table: expected (batch, max_pages)");
    STD_TORCH_CHECK(slots >= SLICE && (slots & (slots - 1)) == 0,
                    "page_size: expected a power of two of at least ", SLICE);
    while (int64_t(1) << layout.page_bits < slots) ++layout.page_bits;
    layout.max_pages = block_table->size(1);
    STD_TORCH_CHECK(slots * layout.max_pages < MAX_COUNT, "block_table: too many slots");
    layout.capacity = slots * layout.max_pages;
  } else {
    STD_TORCH_CHECK(k_cache.size(0) == batch, "k_cache: expected batch ", batch, ", got ", k_cache.size(0));
    layout.capacity = slots;
  }
  return layout;
}

void decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& cache_seqlens,
            const MaybeTensor& block_table, const MaybeTensor& cache_leftpad, const Tensor& bands, const Tensor& table,
            int64_t seqlen_new, int64_t rotary_dim, int64_t rotated_pairs, bool interleaved, double score_scale,
            double log_n_factor, double log_n_floor, double length_scale, int64_t num_splits, Tensor out, Tensor lse,
            Tensor partial_out, Tensor partial_lse) {
  DecodeParams p = {};
  p.q = check_rows(q, "q", q);
  p.k_cache = check_rows(k_cache, "k_cache", q);
  p.v_cache = check_rows(v_cache, "v_cache", q);
  p.layout = check_cache(k_cache, v_cache, cache_seqlens, block_table, q);
  p.seqlen_q = q.size(1), p.heads_q = q.size(2), p.head_dim = q.size(3);
  p.heads_kv = k_cache.size(2);
  STD_TORCH_CHECK(p.head_dim == 64 || p.head_dim == 96 || p.head_dim == 128 || p.head_dim == 256,
                  "head_dim: expected 64, 96, 128 or 256, got ", p.head_dim);
  STD_TORCH_CHECK(q.size(1) <= MAX_SEQLEN_Q, "q: expected at most ", MAX_SEQLEN_Q, " tokens, got ", q.size(1));
  STD_TORCH_CHECK(p.heads_q % p.heads_kv == 0,
                  "q: expected heads_q to be a multiple of ", p.heads_kv, ", got ", p.heads_q);
  STD_TORCH_CHECK(seqlen_new >= 0 && seqlen_new < MAX_COUNT,
                  "seqlen_new: expected 0 to ", MAX_COUNT - 1, ", got ", seqlen_new);
  STD_TORCH_CHECK(num_splits >= 1 && num_splits <= MAX_SPLITS,
                  "num_splits: expected 1 to ", MAX_SPLITS, ", got ", num_splits);
  STD_TORCH_CHECK(q.size(0) * k_cache.size(2) < MAX_COUNT, "q: too many sequences");
  p.layout.seqlen_new = seqlen_new, p.num_splits = num_splits;
  if (cache_leftpad) {
    p.layout.leftpad = check_int32(*cache_leftpad, "cache_leftpad", 1, q);
    STD_TORCH_CHECK(cache_leftpad->size(0) == q.size(0), "cache_leftpad: expected ", q.size(0), " numbers");
  }

  p.bands = check_int32(bands, "bands", 2, q);
  STD_TORCH_CHECK(bands.size(0) >= 1 && bands.size(0) <= 8 && bands.size(1) == 4, "bands: expected (1 to 8, 4)");
  STD_TORCH_CHECK(table.dim() == 4 && table.size(2) == 2, "table: expected (rotations, rows, 2, pairs)");
  p.table = check_float32(table, "table", 1, q);
  p.table_rows = table.size(1), p.table_pairs = table.size(3), p.num_bands = bands.size(0);
  STD_TORCH_CHECK(p.table_pairs * 2 >= p.head_dim && p.table_pairs % 2 == 0,
                  "table: expected at least head_dim / 2 pairs");
  const int64_t positions = p.layout.capacity > p.seqlen_q ? p.layout.capacity : p.seqlen_q;
  STD_TORCH_CHECK((table.size(1) - FINE_ROWS) * FINE_ROWS >= positions,
                  "table: expected rows for ", positions, " positions");
  STD_TORCH_CHECK(rotary_dim >= 0 && rotary_dim <= p.head_dim && rotary_dim % 2 == 0,
                  "rotary_dim: expected an even number from 0 to ", p.head_dim, ", got ", rotary_dim);
  STD_TORCH_CHECK(rotated_pairs >= 0 && rotated_pairs <= rotary_dim / 2,
                  "rotated_pairs: expected 0 to ", rotary_dim / 2, ", got ", rotated_pairs);
  p.rotary_dim = rotary_dim, p.rotated_pairs = rotated_pairs, p.interleaved = interleaved;
  p.score_scale = score_scale, p.log_n_factor = log_n_factor, p.log_n_floor = log_n_floor;
  p.length_scale = length_scale;

  const int64_t rows = q.size(0) * q.size(1) * q.size(2);
  STD_TORCH_CHECK(out.numel() == q.numel() && out.is_contiguous() && out.scalar_type() == q.scalar_type() &&
                      out.device() == q.device(),
                  "out: expected a contiguous tensor like q");
  p.out = out.mutable_data_ptr(), p.bfloat16 = q.scalar_type() == ScalarType::BFloat16;
  p.lse = check_float32(lse, "lse", rows, q);
  p.partial_out = check_float32(partial_out, "partial_out", num_splits * rows * p.head_dim, q);
  p.partial_lse = check_float32(partial_lse, "partial_lse", num_splits * rows, q);

  DeviceGuard guard(q.get_device_index());
  const char* error = launch_decode(p, current_stream(q));
  STD_TORCH_CHECK(!error, "flashrope: the decode kernels did not start: ", error);
}

void append(Tensor k_cache, Tensor v_cache, const Tensor& k, const Tensor& v, const Tensor& cache_seqlens,
            const MaybeTensor& block_table) {
  AppendParams p = {};
  p.k = check_rows(k, "k", k);
  p.v = check_rows(v, "v", k);
  p.k_cache = check_rows(k_cache, "k_cache", k);
  p.v_cache = check_rows(v_cache, "v_cache", k);
  p.k_cache.data = k_cache.mutable_data_ptr(), p.v_cache.data = v_cache.mutable_data_ptr();
  p.layout = check_cache(k_cache, v_cache, cache_seqlens, block_table, k);
  p.heads_kv = k_cache.size(2), p.head_dim = k.size(3);
  STD_TORCH_CHECK(p.head_dim % 8 == 0, "head_dim: expected a multiple of 8, got ", p.head_dim);
  for (int i = 0; i < 3; ++i) STD_TORCH_CHECK(k.size(i) == v.size(i), "v: expected k's shape");
  STD_TORCH_CHECK(k.size(2) == p.heads_kv, "k: expected ", p.heads_kv, " heads, got ", k.size(2));
  STD_TORCH_CHECK(k.numel() / 8 / 128 < MAX_COUNT && k.size(1) < MAX_COUNT, "k: too many elements");
  p.layout.seqlen_new = k.size(1);

  DeviceGuard guard(k.get_device_index());
  const char* error = launch_append(p, current_stream(k));
  STD_TORCH_CHECK(!error, "flashrope: the append kernel did not start: ", error);
}

}  // namespace
}  // namespace flashrope

STABLE_TORCH_LIBRARY(flashrope_cuda, m) {
  m.def(
      "decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? block_table, "
      "Tensor? cache_leftpad, Tensor bands, Tensor table, int seqlen_new, int rotary_dim, int rotated_pairs, "
      "bool interleaved, float score_scale, float log_n_factor, float log_n_floor, float length_scale, "
      "int num_splits, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) partial_out, Tensor(d!) partial_lse) -> ()");
  m.def(
      "append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
      "Tensor? block_table) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashrope_cuda, CUDA, m) {
  m.impl("decode", TORCH_BOX(&flashrope::decode));
  m.impl("append", TORCH_BOX(&flashrope::append));
}
