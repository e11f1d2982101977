// Backward with modifiers on Hopper, bfloat16: every row of the modified class's table.
#include "../launch_backward.h"
#include "backward_sm90.h"

namespace kittens_torch {

backward_launcher modified_backward_sm90_bfloat16(int configuration) {
  return find_modified_backward_launcher<kittens::bf16, backward_rows_sm90_modified, backward_count_sm90_modified>(configuration);
}

}  // namespace kittens_torch
