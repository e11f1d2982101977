// Forward on Hopper, float16: every row of the table, with and without a key interval.
#include "../launch_forward.h"
#include "forward_sm90.h"

namespace kittens_torch {

forward_launcher forward_sm90_float16(int configuration, bool interval) {
  return find_forward_launcher<kittens::fp16, forward_rows_sm90, forward_count_sm90>(configuration, interval);
}

}  // namespace kittens_torch
