// The forward kernels of the cpu machine for AVX2, FMA and F16C (setup.py passes the flags).
#define KITTENS_MACHINE cpu_avx2
#include "forward_cpu.h"

namespace kittens_torch {

forward_launcher forward_cpu_avx2(element_type type, int configuration) { return forward_on_cpu(type, configuration); }

forward_launcher split_forward_cpu_avx2(element_type type, int configuration) { return split_forward_on_cpu(type, configuration); }

}  // namespace kittens_torch
