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
// Whether work on the stream is being recorded into a graph.
bool is_capturing(void* stream);
// A cleared counter for one launch on the current device, from a pool that lives as long as the library; null if the device cannot be asked.
// Not for a launch that is being captured: a graph would keep it.
tile_counter* pooled_counter(int device);
// Sets `bytes` bytes to zero on a stream. Null, or an error text.
const char* clear_async(void* pointer, size_t bytes, void* stream);

}  // namespace kittens
