// Host functions of the Hopper machine, callable from code that is not compiled by nvcc.
#pragma once
#include <cstddef>

#include "../core/execution.h"

namespace kittens {

// Makes `device` current for this library's own copy of the CUDA runtime. Null, or an error text.
const char* use_device(int device);
// Multiprocessors of a device, or 0 if it cannot be asked.
int multiprocessors(int device);
// 10 * major + minor compute capability of a device, or 0.
int compute_capability(int device);
// A cleared counter for one launch on a stream of the current device, from a pool that lives as long as the library. Null where there is none
// left for a launch that is being captured into a graph: the kernels then walk their tiles in a fixed order.
tile_counter* pooled_counter(int device, void* stream);
// Sets `bytes` bytes to zero on a stream. Null, or an error text.
const char* clear_async(void* pointer, size_t bytes, void* stream);

}  // namespace kittens
