// What the host hands to the backward's launcher. Plain structs, shared by host and device; no torch.
#pragma once
#include "modifiers.h"
#include "params.h"

namespace kittens_torch {

struct backward_arguments {
  kittens::tensor_view query, key, value, output, grad_output;  // (batch, head, row, column); any strides the machine's tile_map accepts
  kittens::tensor_view grad_query, grad_key, grad_value;        // data null where the gradient is not asked for
  const void *logsumexp, *grad_logsumexp;                       // (batch, head, row) contiguous; the gradient may be null
  void *logsumexp2, *delta;  // workspace of the same type: (batch, head, padded_q), see backward_rows.cuh; null where all kernels fold
  void* query_sum;           // workspace for dQ, cleared: the kernel that owns keys adds to it; null: the one that owns queries makes dQ
  element_type type;
  int configuration;         // row of the machine's table in backward_config.h
  int padded_q;              // length_q rounded up to whole steps
  int key_grid, query_grid;  // CTAs of either kernel
  double scale;              // > 0
  interval_mask mask;
  kittens::tile_counter *key_counter, *query_counter;  // cleared; hand out tiles, or null: every CTA walks with stride of its grid
  score_modifiers modifiers = {};                      // of the modified class alone
  tile_classes classes = {};                           // of modifiers.mask
  kittens::tensor_view grad_bias = {};                 // the bias's own sizes, 1 where it is broadcast; data null where it is not asked for
  int bias_grid = 0;
  void* terms = nullptr;                               // workspace of 16 bytes for each of these rows, where backward_plan::folds says so
  // Workspace, cleared: a number for each step of a head, where the tiles of keys take turns at adding to query_sum. Null: they add in any order.
  // Without a key_counter all CTAs must then run at the same time.
  int* query_turns = nullptr;
};

// Launches the kernels of one (element type, configuration), or returns an error text. Null if it went well.
using backward_launcher = const char* (*)(const backward_arguments&, const kittens::execution&);

}  // namespace kittens_torch
