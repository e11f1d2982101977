// What the Hopper instance files export: the launcher of a row of forward_rows_sm90.
#pragma once
#include "../params.h"

namespace kittens_torch {

forward_launcher forward_sm90_bfloat16(int configuration, bool interval);
forward_launcher forward_sm90_float16(int configuration, bool interval);
forward_launcher split_forward_sm90_bfloat16(int configuration);
forward_launcher split_forward_sm90_float16(int configuration);
forward_launcher modified_forward_sm90_bfloat16(int configuration);
forward_launcher modified_forward_sm90_float16(int configuration);

}  // namespace kittens_torch
