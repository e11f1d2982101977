#include "device.h"

#include <cuda_runtime.h>

#include <atomic>

namespace kittens {
namespace {

constexpr int most_devices = 64;

// Zero when the library is loaded, and again after every launch that used one. Their number is far above the launches that can be in flight
// on a device, so none is given out while an earlier launch still counts with it.
constexpr uint32_t pooled_counters = 1 << 16;
__device__ tile_counter counters[pooled_counters];

const char* text_of(cudaError_t code) { return code == cudaSuccess ? nullptr : cudaGetErrorString(code); }

// Asked once per device: an attribute query costs about a microsecond, a whole call should cost ten.
int cached_attribute(std::atomic<int> (&cache)[most_devices], cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= most_devices) return 0;
  int value = cache[device].load(std::memory_order_relaxed);
  if (value == 0 && cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess) cache[device].store(value, std::memory_order_relaxed);
  return value;
}

}  // namespace

const char* use_device(int device) {
  // A thread that has made no CUDA call yet, as autograd's may, has a device but no current context, which the driver's own functions need
  // (cuTensorMapEncodeTiled answers 201). Setting the device binds the context.
  thread_local int bound = -1;
  int current = -1;
  if (bound == device && cudaGetDevice(&current) == cudaSuccess && current == device) return nullptr;
  const cudaError_t code = cudaSetDevice(device);
  if (code == cudaSuccess) bound = device;
  return text_of(code);
}

int multiprocessors(int device) {
  static std::atomic<int> cache[most_devices];
  return cached_attribute(cache, cudaDevAttrMultiProcessorCount, device);
}

int compute_capability(int device) {
  static std::atomic<int> major[most_devices], minor[most_devices];
  return 10 * cached_attribute(major, cudaDevAttrComputeCapabilityMajor, device) +
         cached_attribute(minor, cudaDevAttrComputeCapabilityMinor, device);
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

tile_counter* pooled_counter(int device) {
  static std::atomic<tile_counter*> pools[most_devices];
  static std::atomic<uint32_t> turn;
  if (device < 0 || device >= most_devices) return nullptr;
  tile_counter* pool = pools[device].load(std::memory_order_relaxed);
  if (!pool) {
    void* address = nullptr;
    if (cudaGetSymbolAddress(&address, counters) != cudaSuccess) return nullptr;
    pool = static_cast<tile_counter*>(address);
    pools[device].store(pool, std::memory_order_relaxed);
  }
  return pool + turn.fetch_add(1, std::memory_order_relaxed) % pooled_counters;
}

const char* clear_async(void* pointer, size_t bytes, void* stream) {
  return text_of(cudaMemsetAsync(pointer, 0, bytes, static_cast<cudaStream_t>(stream)));
}

}  // namespace kittens
