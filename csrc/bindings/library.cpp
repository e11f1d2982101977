// The operators' schemas. Python wraps them (autograd, fallback); shapes and meanings are in kittens_torch/ops.py.
#include <torch/csrc/stable/library.h>

#include "backward.h"
#include "forward.h"

STABLE_TORCH_LIBRARY(kittens_torch, m) {
  m.def(
      "forward(Tensor query, Tensor key, Tensor value, float scale, int corner, int window_left, int window_right, int configuration=-1,"
      " int splits=-1) -> (Tensor, Tensor)");
  m.def(
      "checked_forward(Tensor query, Tensor key, Tensor value, float scale, int corner, int window_left, int window_right,"
      " int configuration, int seed, int splits=-1) -> (Tensor, Tensor)");
  m.def(
      "forward_modified(Tensor query, Tensor key, Tensor value, float scale, int corner, int window_left, int window_right,"
      " Tensor? mask, Tensor? bias, Tensor? key_lengths, Tensor? alibi_slopes, Tensor? sinks, Tensor? dropout_state, float dropout_p,"
      " float softcap, int configuration=-1, Tensor? mask_tiles=None, Tensor? mask_ranges=None, Tensor? mask_seen=None)"
      " -> (Tensor, Tensor)");
  m.def("classify_mask(Tensor mask, Tensor query, Tensor key, int corner, int window_left, int window_right) -> (Tensor, Tensor, Tensor)");
  m.def(
      "checked_forward_modified(Tensor query, Tensor key, Tensor value, float scale, int corner, int window_left, int window_right,"
      " Tensor? mask, Tensor? bias, Tensor? key_lengths, Tensor? alibi_slopes, Tensor? sinks, Tensor? dropout_state, float dropout_p,"
      " float softcap, int configuration, int seed) -> (Tensor, Tensor)");
  m.def(
      "backward(Tensor? grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp,"
      " float scale, int corner, int window_left, int window_right, bool need_query, bool need_key, bool need_value,"
      " bool deterministic=False, int configuration=-1) -> (Tensor, Tensor, Tensor)");
  m.def(
      "checked_backward(Tensor? grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp,"
      " float scale, int corner, int window_left, int window_right, bool need_query, bool need_key, bool need_value,"
      " bool deterministic, int configuration, int seed) -> (Tensor, Tensor, Tensor)");
  m.def(
      "backward_modified(Tensor? grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp,"
      " float scale, int corner, int window_left, int window_right, Tensor? mask, Tensor? bias, Tensor? key_lengths, Tensor? alibi_slopes,"
      " Tensor? dropout_state, float dropout_p, float softcap, bool need_query, bool need_key, bool need_value, bool need_bias,"
      " bool deterministic=False, int configuration=-1, Tensor? mask_tiles=None, Tensor? mask_ranges=None, Tensor? mask_seen=None)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "checked_backward_modified(Tensor? grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, Tensor value, Tensor output,"
      " Tensor logsumexp, float scale, int corner, int window_left, int window_right, Tensor? mask, Tensor? bias, Tensor? key_lengths,"
      " Tensor? alibi_slopes, Tensor? dropout_state, float dropout_p, float softcap, bool need_query, bool need_key, bool need_value,"
      " bool need_bias, bool deterministic, int configuration, int seed) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(kittens_torch, CPU, m) {
  m.impl("forward", TORCH_BOX(&kittens_torch::forward_cpu));
  m.impl("checked_forward", TORCH_BOX(&kittens_torch::checked_forward));
  m.impl("forward_modified", TORCH_BOX(&kittens_torch::modified_forward_cpu));
  m.impl("classify_mask", TORCH_BOX(&kittens_torch::classify_mask_cpu));
  m.impl("checked_forward_modified", TORCH_BOX(&kittens_torch::checked_modified_forward));
  m.impl("backward", TORCH_BOX(&kittens_torch::backward_cpu));
  m.impl("checked_backward", TORCH_BOX(&kittens_torch::checked_backward));
  m.impl("backward_modified", TORCH_BOX(&kittens_torch::modified_backward_cpu));
  m.impl("checked_backward_modified", TORCH_BOX(&kittens_torch::checked_modified_backward));
}

// A CPU-only build has no CUDA kernel to register: Python asks the dispatcher, and sends GPU calls to torch.
#ifdef KITTENS_CUDA
STABLE_TORCH_LIBRARY_IMPL(kittens_torch, CUDA, m) {
  m.impl("forward", TORCH_BOX(&kittens_torch::forward_cuda));
  m.impl("forward_modified", TORCH_BOX(&kittens_torch::modified_forward_cuda));
  m.impl("classify_mask", TORCH_BOX(&kittens_torch::classify_mask_cuda));
  m.impl("backward", TORCH_BOX(&kittens_torch::backward_cuda));
  m.impl("backward_modified", TORCH_BOX(&kittens_torch::modified_backward_cuda));
}
#endif
