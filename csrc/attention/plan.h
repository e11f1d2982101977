// Host heuristics: which kernel, which row of the configuration table, how many CTAs, and why. Pure functions of the problem.
#pragma once
#include <cstdint>

#include "config.h"
#include "mask.h"
#include "params.h"

namespace kittens_torch {

enum class machine_kind : int { sm90, cpu };

struct forward_problem {
  machine_kind machine;
  element_type type;
  int64_t batch, heads, heads_k, length_q, length_k, head_dim, value_dim;
  int corner, window_left, window_right;
  int processors;  // multiprocessors, or threads
};

struct forward_plan {
  const char* kernel;  // "forward_sm90" or "forward_cpu"
  int configuration;   // row of the machine's table, -1 if none takes the problem
  forward_row row;
  interval_mask mask;
  bool interval;       // the kernel with a key interval, or the one that sees every key
  int64_t tiles;
  int grid;
  int64_t shared_bytes;
  bool prefer_torch;   // cpu: torch's own kernel is faster for a plain call
  const char* reason;
};

// `configuration` forces a row of the table; -1 leaves the choice to the rules.
forward_plan plan_forward(const forward_problem& problem, int configuration = -1);

}  // namespace kittens_torch
