// What the Hopper instance files export: the launcher of a row of backward_rows_sm90.
#pragma once
#include "../backward_params.h"

namespace kittens_torch {

backward_launcher backward_sm90_bfloat16(int configuration);
backward_launcher backward_sm90_float16(int configuration);
backward_launcher modified_backward_sm90_bfloat16(int configuration);
backward_launcher modified_backward_sm90_float16(int configuration);

}  // namespace kittens_torch
