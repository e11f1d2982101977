// Forward with modifiers on Hopper, float16: every row of the modified class's table.
#include "../launch_forward.h"
#include "forward_sm90.h"

namespace kittens_torch {

forward_launcher modified_forward_sm90_float16(int configuration) {
  return find_modified_launcher<kittens::fp16, forward_rows_sm90_modified, forward_count_sm90_modified>(configuration);
}

}  // namespace kittens_torch
