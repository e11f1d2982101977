// The backward kernels of the cpu machine for AMX: bfloat16 alone (setup.py passes the flags).
#define KITTENS_MACHINE cpu_amx
#include "backward_cpu.h"

namespace kittens_torch {

backward_launcher backward_cpu_amx(element_type type, int configuration) {
  return type == element_type::bfloat16 ? backward_on_cpu<kittens::bf16>(configuration) : nullptr;
}

}  // namespace kittens_torch
