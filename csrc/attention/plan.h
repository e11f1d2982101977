// Host heuristics: which kernel, which row of the configuration table, how many CTAs, and why. Pure functions of the problem.
#pragma once
#include <cstdint>

#include "backward_config.h"
#include "../kittens/cpu/features.h"
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
  kittens::cpu_flavour flavour = kittens::cpu_flavour::generic;  // cpu: the instruction set that runs it
  bool modified = false;  // with score_modifiers
  bool sinks = false;     // with sinks alone
  bool softcap = false;   // with a soft cap
};

struct forward_plan {
  const char* kernel;  // "forward_sm90" or "forward_cpu"
  int configuration;   // row of the machine's table, -1 if none takes the problem
  forward_row row;
  interval_mask mask;
  mask_class kind;     // the kernel's
  bool heads_as_rows;  // the query heads of a key head are the rows of one, so that keys and values are read once for all of them
  int splits;          // ranges of a tile's keys, each a CTA's; 0: no ranges, the kernel makes the output itself
  int64_t workspace_values;  // with splits: floats (doubles for float64) that the kernel hands to forward_combine
  int64_t tiles;       // row tiles of all heads
  int grid;
  int64_t shared_bytes;
  bool prefer_torch;   // cpu: torch's own kernel is faster for a plain call, or was not measured against ours
  const char* reason;
};

// `configuration` forces a row of the table, of the split one where `splits` is positive; -1 leaves the choice to the rules. `splits` forces their
// number, 0 none; -1 leaves that to the rules.
forward_plan plan_forward(const forward_problem& problem, int configuration = -1, int splits = -1);

// What the backward of a problem has to yield.
struct backward_request {
  bool need_query, need_keys;  // dQ; dK or dV
  bool deterministic;          // the same bit for bit at every run
  bool need_bias = false;      // dbias
  bool bias_apart[4] = {};     // where the bias is not broadcast
  double scale = 1;
  bool mask_alone = false;     // what modifies the scores is a bool mask that has vectors (modifiers.h)
};

struct backward_plan {
  const char* kernel;  // "backward_sm90" or "backward_cpu"
  int configuration;   // row of the machine's table, -1 if none takes the problem
  backward_row row;
  interval_mask mask;
  bool sums_query;     // dQ is added up in memory by the kernel that owns keys; else a kernel that owns queries makes it
  bool in_order;       // its tiles of keys take turns at adding, so that dQ is the same bit for bit at every run
  bool folds;          // the kernel that owns keys takes logsumexp and delta as terms, of 16 bytes a row
  bool vectors;        // a kernel takes them as two values a row
  int64_t key_tiles, query_tiles;
  int key_grid, query_grid;
  int64_t bias_tiles;
  int bias_grid;
  int64_t padded_q;          // length_q in whole steps
  int64_t query_rows;        // of all heads, in whole steps
  int64_t workspace_values;  // floats (doubles for float64) beside inputs and outputs: terms, vectors, dQ's sums, the turns' numbers
  int64_t query_sum_values;
  int64_t turns;             // numbers, of a value's room each: one for each step of a head
  int64_t shared_bytes;
  const char* reason;
};

backward_plan plan_backward(const forward_problem& problem, const backward_request& request, int configuration = -1);

}  // namespace kittens_torch
