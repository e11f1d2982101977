// The forward kernels of the cpu machine for AMX: bfloat16 alone (setup.py passes the flags).
#define KITTENS_MACHINE cpu_amx
#include "forward_cpu.h"

namespace kittens_torch {

forward_launcher forward_cpu_amx(element_type type, int configuration) {
  return type == element_type::bfloat16 ? forward_on_cpu<kittens::bf16>(configuration) : nullptr;
}

forward_launcher split_forward_cpu_amx(element_type type, int configuration) {
  return type == element_type::bfloat16 ? split_forward_on_cpu<kittens::bf16>(configuration) : nullptr;
}

}  // namespace kittens_torch
