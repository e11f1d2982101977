// The forward op for a caller that has tensors by their memory: what kittens_torch._direct finds in the op library.
#pragma once
#include <cstdint>

#define KITTENS_DIRECT_FORWARD "kittens_torch_direct_forward"
#define KITTENS_DIRECT_LAYOUT "kittens_torch_direct_layout"

// (batch, head, row, column)
struct direct_tensor {
  enum { bfloat16, float16, float32, float64 } type;
  int cuda_device;  // -1 for the CPU
  void* data;
  const int64_t *sizes, *strides;
};

// Whether an output in the layout of `query` has the strides that the op would give it. Into `strides` go those that the op would give.
using direct_layout = bool (*)(const direct_tensor& query, const direct_tensor& value, int64_t (&strides)[4]);

// Launches the kernels that fill `output`. A scale of 0 stands for 1 / sqrt(head_dim); corner: 0 (none) or 1 (upper left). False: nothing was
// launched, and the op either does what this cannot (copies, empty tensors) or says what is wrong.
using direct_forward = bool (*)(const direct_tensor& query, const direct_tensor& key, const direct_tensor& value, const direct_tensor& output,
                                double scale, int64_t corner);
