// The test kernels on sm90, as a library for ctypes.
#include "kernel_list.h"

namespace {

const kittens_tests::kernel_list& kernels() {
  static const kittens_tests::kernel_list list = [] {
    kittens_tests::kernel_list made;
    made.add_all<kittens::bf16>();
    made.add_all<kittens::fp16>();
    made.add_of_real<float>();
    made.add_pipelines();
    return made;
  }();
  return list;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int kernel_count() { return static_cast<int>(kernels().entries().size()); }
EXPORT const char* kernel_name(int index) { return kernels().entries()[index].name.c_str(); }
EXPORT const char* run_kernel(int index, const kittens_tests::arguments* arguments, int grid, uint32_t, void* stream) {
  return kernels().entries()[index].launch(*arguments, grid, {stream});
}
