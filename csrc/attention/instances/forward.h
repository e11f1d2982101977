#pragma once
#include "../params.h"
namespace kittens_torch {
forward_launcher find_forward_cpu(element_type type, int configuration);
forward_launcher find_forward_checked(element_type type, int configuration, bool interval);
forward_launcher find_forward_sm90(element_type type, int configuration, bool interval);
}
