// What a call for gradients is.

#pragma once

#include "tiles.h"

namespace flashrope {

struct BackwardCall {  // cpu/library.py has the same
  ForwardCall forward;  // with the out and lse that it computed
  TensorView grad_out, grad_q, grad_k, grad_v;
  const float* grad_lse;  // (batch, heads_q, seqlen_q), or nullptr
};

}  // namespace flashrope
