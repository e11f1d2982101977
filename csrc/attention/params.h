// What the host hands to an operator's launcher. Plain structs, shared by host and device; no torch.
#pragma once
#include "../kittens/core/execution.h"
#include "../kittens/core/shapes.h"
#include "mask.h"
#include "modifiers.h"
#include "tile_classes.h"

namespace kittens_torch {

enum class element_type : int { bfloat16, float16, float32, float64 };

struct forward_arguments {
  kittens::tensor_view query, key, value, output;  // (batch, head, row, column); any strides the machine's tile_map accepts
  void* logsumexp;                                 // (batch, head, row) contiguous, float (double for float64); or null
  element_type type;
  int configuration;                               // row of the machine's table in config.h
  int grid;                                        // CTAs to launch
  double scale;                                    // > 0
  interval_mask mask;
  kittens::tile_counter* counter;                  // cleared; hands out tiles, or null: every CTA walks with stride `grid`
  score_modifiers modifiers = {};                  // of mask_class::modified, but for the sinks, which every class has
  tile_classes classes = {};                       // of modifiers.mask
  int splits = 0;                                  // ranges of a tile's keys, each a CTA's (forward_combine.cuh); 0: no ranges, another kernel
  void* parts = nullptr;                           // with splits: what CTAs hand to forward_combine
  bool sinks_by_row = false;                       // with splits: a head's rows are the heads of the caller, each with a sink, at stride 1
};

// Launches the kernel of one (element type, configuration, mask class), or returns an error text. Null if it went well.
using forward_launcher = const char* (*)(const forward_arguments&, const kittens::execution&);

}  // namespace kittens_torch
