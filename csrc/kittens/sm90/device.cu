#include "device.h"

#include <cuda_runtime.h>

#include <atomic>

namespace kittens {
namespace {

constexpr int most_devices = 64;

// Zero when the library is loaded, and again after every launch that used one. Those of single launches go round: their number is far above the
// launches that can be in flight on a device, so none is given out while an earlier launch still counts with it. A launch in a graph keeps its
// own for ever. Clearing one in the graph instead would be a node more: 2 us of a call of 30.
constexpr uint32_t launch_counters = 1 << 16, graph_counters = 1 << 18;
__device__ tile_counter counters[launch_counters + graph_counters];

const char* text_of(cudaError_t code) { return code == cudaSuccess ? nullptr : cudaGetErrorString(code); }

// Asked once per device: an attribute query costs about a microsecond, a whole call should cost ten.
int cached_attribute(std::atomic<int> (&cache)[most_devices], cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= most_devices) return 0;
  int value = cache[device].load(std::memory_order_relaxed);
  if (value == 0 && cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess) cache[device].store(value, std::memory_order_relaxed);
  return value;
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
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

tile_counter* pooled_counter(int device, void* stream) {
  static std::atomic<tile_counter*> pools[most_devices];
  static std::atomic<uint32_t> launches, graph_launches;
  if (device < 0 || device >= most_devices) return nullptr;
  tile_counter* pool = pools[device].load(std::memory_order_relaxed);
  if (!pool) {
    void* address = nullptr;
    if (cudaGetSymbolAddress(&address, counters) != cudaSuccess) return nullptr;
    pool = static_cast<tile_counter*>(address);
    pools[device].store(pool, std::memory_order_relaxed);
  }
  if (!is_capturing(stream)) return pool + launches.fetch_add(1, std::memory_order_relaxed) % launch_counters;
  const uint32_t taken = graph_launches.load(std::memory_order_relaxed) < graph_counters ? graph_launches.fetch_add(1) : graph_counters;
  return taken < graph_counters ? pool + launch_counters + taken : nullptr;
}

const char* clear_async(void* pointer, size_t bytes, void* stream) {
  return text_of(cudaMemsetAsync(pointer, 0, bytes, static_cast<cudaStream_t>(stream)));
}

}  // namespace kittens
