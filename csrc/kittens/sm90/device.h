// Host functions of the Hopper machine, callable from code that is not compiled by nvcc.
#pragma once
#include <cstddef>

namespace kittens {

// Makes `device` current for this library's own copy of the CUDA runtime. Null, or an error text.
const char* use_device(int device);
// Multiprocessors of a device, or 0 if it cannot be asked.
int multiprocessors(int device);
// 10 * major + minor compute capability of a device, or 0.
int compute_capability(int device);
// Sets `bytes` bytes to zero on a stream. Null, or an error text.
const char* clear_async(void* pointer, size_t bytes, void* stream);

}  // namespace kittens
