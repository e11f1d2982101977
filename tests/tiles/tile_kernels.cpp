// The test kernels on a flavour of the cpu machine (KITTENS_MACHINE, KITTENS_CHECKED), as a library for ctypes.
#include <thread>

#include "kernel_list.h"

namespace {

const kittens_tests::kernel_list& kernels() {
  static const kittens_tests::kernel_list list = [] {
    kittens_tests::kernel_list made;
    made.add_all<kittens::bf16>();
    made.add_all<kittens::fp16>();
    made.add_all<float>();
    made.add_all<double>();
    made.add_of_real<float>();
    made.add_of_real<double>();
    made.add_pipelines();
    return made;
  }();
  return list;
}

// One thread for every CTA: they overlap as much as the processor lets them.
void parallel_for(int64_t count, void (*body)(void* context, int64_t index), void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; i++) threads.emplace_back(body, context, i);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int kernel_count() { return static_cast<int>(kernels().entries().size()); }
EXPORT const char* kernel_name(int index) { return kernels().entries()[index].name.c_str(); }
EXPORT const char* run_kernel(int index, const kittens_tests::arguments* arguments, int grid, uint32_t seed, void*) {
  return kernels().entries()[index].launch(*arguments, grid, {nullptr, seed, grid > 1 ? &parallel_for : nullptr});
}
