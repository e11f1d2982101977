// What a launch needs to know of the machine that a tensor lives on.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "../kittens/core/execution.h"
#include "checks.h"

#ifdef KITTENS_CUDA
#include "../kittens/sm90/device.h"
#endif

namespace kittens_torch {

// CTAs of the cpu machine, on torch's threads.
inline void run_on_torch_threads(int64_t count, void (*body)(void*, int64_t), void* context) {
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) body(context, i);
  });
}

inline kittens::execution cpu_execution(uint32_t seed) { return {nullptr, seed, &run_on_torch_threads}; }

#ifdef KITTENS_CUDA
void* current_stream(int device);  // stream.cpp
#endif

}  // namespace kittens_torch
