// The forward kernels with modifiers of the cpu machine for AMX: bfloat16 alone (setup.py passes the flags).
#define KITTENS_MACHINE cpu_amx
#include "modified_forward_cpu.h"

namespace kittens_torch {

forward_launcher modified_forward_cpu_amx(element_type type, int configuration) {
  return type == element_type::bfloat16 ? find_modified_launcher<kittens::bf16, forward_rows_cpu, forward_count_cpu>(configuration) : nullptr;
}

}  // namespace kittens_torch
