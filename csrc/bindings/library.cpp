// The operators' schemas. Python wraps them (autograd, fallback); shapes and meanings are in kittens_torch/ops.py.
#include <torch/csrc/stable/library.h>

#include "forward.h"

STABLE_TORCH_LIBRARY(kittens_torch, m) {
  m.def(
      "forward(Tensor query, Tensor key, Tensor value, float scale, int corner, int window_left, int window_right, int configuration=-1)"
      " -> (Tensor, Tensor)");
  m.def(
      "checked_forward(Tensor query, Tensor key, Tensor value, float scale, int corner, int window_left, int window_right,"
      " int configuration, int seed) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(kittens_torch, CPU, m) {
  m.impl("forward", TORCH_BOX(&kittens_torch::forward_cpu));
  m.impl("checked_forward", TORCH_BOX(&kittens_torch::checked_forward));
}

// A CPU-only build has no CUDA kernel to register: Python asks the dispatcher, and sends GPU calls to torch.
#ifdef KITTENS_CUDA
STABLE_TORCH_LIBRARY_IMPL(kittens_torch, CUDA, m) { m.impl("forward", TORCH_BOX(&kittens_torch::forward_cuda)); }
#endif
