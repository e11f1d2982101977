// Host side: tensor maps and launches. Nothing here needs libcuda at link time; the driver's functions are asked of the runtime.
#pragma once
#include <cuda_runtime.h>
#include <atomic>
#include <cstdio>

#include "../core/execution.h"
#include "copies.cuh"

namespace kittens {
inline namespace KITTENS_MACHINE {

inline constexpr int shared_memory_limit = 232448;  // bytes a CTA may have: 227 KB

// A launch configured by its kernel: params, shared, warpgroups, run(). One CTA per multiprocessor, so that a thread's registers follow from
// setmaxnreg alone.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::warpgroups * 128, 1) entry(const __grid_constant__ typename Kernel::params params) {
  extern __shared__ __align__(1024) char memory[];
  if constexpr (starts_early<Kernel>()) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  Kernel::run(params, *reinterpret_cast<typename Kernel::shared*>(memory),
              cta{thread::warpgroup(), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)});
}

// An error text that outlives the call that made it.
template <class... Args> const char* describe(const char* format, Args... args) {
  thread_local char text[256];
  snprintf(text, sizeof text, format, args...);
  return text;
}

using encode_tiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                  const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                  CUtensorMapFloatOOBfill);

// Null where the driver has none.
template <class Function> Function find_driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result) != cudaSuccess) return nullptr;
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
}

// The tensor must have stride 1 along its columns, other strides that are multiples of 16 bytes, and a 16-byte aligned base.
template <class T, int R, int C> const char* make_tile_map(tile_map<shared_tile<T, R, C>>& out, const tensor_view& t) {
  using layout = tile_layout<T, R, C>;
  static_assert(R <= 256, "tile_map: a TMA box has at most 256 rows");
  static const auto encode = find_driver_function<encode_tiled>("cuTensorMapEncodeTiled");
  if (!encode) return "the CUDA driver has no cuTensorMapEncodeTiled: a driver for CUDA 12 or newer is needed";
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(t.size[3]), static_cast<cuuint64_t>(t.size[2]), static_cast<cuuint64_t>(t.size[1]),
                               static_cast<cuuint64_t>(t.size[0])};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(t.stride[2]) * sizeof(T), static_cast<cuuint64_t>(t.stride[1]) * sizeof(T),
                                 static_cast<cuuint64_t>(t.stride[0]) * sizeof(T)};
  const cuuint32_t box[4] = {layout::panel_columns, R, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUtensorMapSwizzle mode = layout::mode == swizzle::bytes128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                  : layout::mode == swizzle::bytes64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                                     : CU_TENSOR_MAP_SWIZZLE_32B;
  const CUresult code =
      encode(&out.map, std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, t.data, sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, mode, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code == CUDA_SUCCESS) return nullptr;
  return describe("cuTensorMapEncodeTiled refused a tensor of size (%lld, %lld, %lld, %lld), strides (%lld, %lld, %lld) (error %d)",
                  static_cast<long long>(t.size[0]), static_cast<long long>(t.size[1]), static_cast<long long>(t.size[2]),
                  static_cast<long long>(t.size[3]), static_cast<long long>(t.stride[0]), static_cast<long long>(t.stride[1]),
                  static_cast<long long>(t.stride[2]), static_cast<int>(code));
}

inline constexpr int most_devices = 64;

using launch_kernel = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);

template <class Kernel> const char* launch(const typename Kernel::params& params, int grid, const execution& execution) {
  constexpr int bytes = sizeof(typename Kernel::shared);
  static_assert(Kernel::warpgroups >= 1 && Kernel::warpgroups <= 4, "launch: a CTA has 1 to 4 warpgroups: each has a named barrier of its own");
  static_assert(elected_threads<Kernel>() >= 1 && elected_threads<Kernel>() <= 4, "launch: each thread that runs alone has a warp of warpgroup 0");
  static_assert(bytes <= shared_memory_limit, "launch: the kernel's shared struct exceeds the 227 KB that a CTA may have");
  static_assert(sizeof(typename Kernel::params) <= 4096, "launch: kernel parameters exceed 4 KB");
  // By the driver, which has no kernel to look up: 0.4 us of a call of 9.
  static const auto launch_by_driver = find_driver_function<launch_kernel>("cuLaunchKernelEx");
  if (!launch_by_driver) return "the CUDA driver has no cuLaunchKernelEx: a driver for CUDA 12 or newer is needed";
  static std::atomic<CUfunction> functions[most_devices];  // each device's copy of the kernel, once it may have the shared memory
  int device = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code != cudaSuccess) return describe("the launch failed: %s", cudaGetErrorString(code));
  CUfunction function = device < most_devices ? functions[device].load(std::memory_order_relaxed) : nullptr;
  if (!function) {
    code = cudaFuncSetAttribute(entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (code == cudaSuccess) code = cudaGetFuncBySymbol(&function, reinterpret_cast<const void*>(&entry<Kernel>));
    if (code != cudaSuccess) return describe("the launch failed: %s", cudaGetErrorString(code));
    if (device < most_devices) functions[device].store(function, std::memory_order_relaxed);
  }
  CUlaunchAttribute early{};
  early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  early.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(grid);
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.blockDimX = Kernel::warpgroups * 128;
  config.sharedMemBytes = bytes;
  config.hStream = static_cast<CUstream>(execution.stream);
  config.attrs = &early;
  config.numAttrs = starts_early<Kernel>() ? 1 : 0;
  void* arguments[] = {const_cast<typename Kernel::params*>(&params)};
  const CUresult launched = launch_by_driver(&config, function, arguments, nullptr);
  // The runtime numbers its errors as the driver does.
  return launched == CUDA_SUCCESS ? nullptr : describe("the launch failed: %s", cudaGetErrorString(static_cast<cudaError_t>(launched)));
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens
