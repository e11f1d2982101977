// Where the compiled forward kernels are found. A launcher is null where there is no such kernel.
#pragma once
#include "../params.h"

namespace kittens_torch {

// A row of forward_rows_sm90 on the GPU (bfloat16, float16).
forward_launcher find_forward_sm90(element_type, int configuration, bool interval);

// A row of forward_rows_cpu on the fastest instruction set of this processor; every element type. The interval class
// covers all masks.
forward_launcher find_forward_cpu(element_type, int configuration);

// A row of forward_rows_sm90, what users run on the GPU, on the checked cpu machine (bfloat16, float16, float32).
forward_launcher find_forward_checked(element_type, int configuration, bool interval);

// Keys divided among CTAs: rows of forward_rows_sm90_split, of forward_rows_cpu_split, and the former on the checked machine.
forward_launcher find_split_forward_sm90(element_type, int configuration);
forward_launcher find_split_forward_cpu(element_type, int configuration);
forward_launcher find_split_forward_checked(element_type, int configuration);

// The same of the modified class (mask_class): rows of forward_rows_sm90_modified, of forward_rows_cpu, and the former on the checked machine.
forward_launcher find_modified_forward_sm90(element_type, int configuration);
forward_launcher find_modified_forward_cpu(element_type, int configuration);
forward_launcher find_modified_forward_checked(element_type, int configuration);

// One instruction set each, every element type (AMX: bfloat16). Callers make sure that the processor has it.
forward_launcher forward_cpu_generic(element_type, int configuration);
forward_launcher forward_cpu_avx2(element_type, int configuration);
forward_launcher forward_cpu_avx512(element_type, int configuration);
forward_launcher forward_cpu_amx(element_type, int configuration);
forward_launcher split_forward_cpu_generic(element_type, int configuration);
forward_launcher split_forward_cpu_avx2(element_type, int configuration);
forward_launcher split_forward_cpu_avx512(element_type, int configuration);
forward_launcher split_forward_cpu_amx(element_type, int configuration);
forward_launcher modified_forward_cpu_generic(element_type, int configuration);
forward_launcher modified_forward_cpu_avx2(element_type, int configuration);
forward_launcher modified_forward_cpu_avx512(element_type, int configuration);
forward_launcher modified_forward_cpu_amx(element_type, int configuration);

}  // namespace kittens_torch
