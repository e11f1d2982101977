// The operators' schemas. Trailing defaults are those of the usual call: an argument that is not given takes no conversion from Python.
// Python wraps them (autograd, fallback); shapes and meanings are in kittens_torch/ops.py.
#include "backward.h"
#include "boxing.h"
#include "forward.h"

using kittens_torch::boxed;

STABLE_TORCH_LIBRARY(kittens_torch, m) {
  m.def(
      "forward(Tensor query, Tensor key, Tensor value, float? scale=None, int corner=0, int window_left=-1, int window_right=-1,"
      " int configuration=-1, int splits=-1) -> (Tensor, Tensor)");
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
      " float scale, int corner=0, int window_left=-1, int window_right=-1, bool need_query=True, bool need_key=True,"
      " bool need_value=True, bool deterministic=False, int configuration=-1) -> (Tensor, Tensor, Tensor)");
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
  m.impl("forward", boxed<&kittens_torch::forward_cpu>::call);
  m.impl("checked_forward", boxed<&kittens_torch::checked_forward>::call);
  m.impl("forward_modified", boxed<&kittens_torch::modified_forward<false>>::call);
  m.impl("classify_mask", boxed<&kittens_torch::classify_mask_cpu>::call);
  m.impl("checked_forward_modified", boxed<&kittens_torch::checked_modified_forward>::call);
  m.impl("backward", boxed<&kittens_torch::backward_cpu>::call);
  m.impl("checked_backward", boxed<&kittens_torch::checked_backward>::call);
  m.impl("backward_modified", boxed<&kittens_torch::modified_backward<false>>::call);
  m.impl("checked_backward_modified", boxed<&kittens_torch::checked_modified_backward>::call);
}

// A CPU-only build has no CUDA kernel to register: Python asks the dispatcher, and sends GPU calls to torch.
#ifdef KITTENS_CUDA
STABLE_TORCH_LIBRARY_IMPL(kittens_torch, CUDA, m) {
  m.impl("forward", boxed<&kittens_torch::forward_cuda>::call);
  m.impl("forward_modified", boxed<&kittens_torch::modified_forward<true>>::call);
  m.impl("classify_mask", boxed<&kittens_torch::classify_mask_cuda>::call);
  m.impl("backward", boxed<&kittens_torch::backward_cuda>::call);
  m.impl("backward_modified", boxed<&kittens_torch::modified_backward<true>>::call);
}
#endif
