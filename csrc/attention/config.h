// The forward kernel's configurations: one row per tile shape, one table per machine. Everything a row implies (shared memory, registers) is
// checked by static_asserts in forward.cuh. plan.cpp chooses among the rows.
#pragma once

namespace kittens_torch {

struct forward_row {
  int head_dim, value_dim;  // largest the row takes; smaller ones are padded with zeros inside shared memory
  int block_m, block_n;     // query rows and keys of a tile
  int stages;               // K/V tiles in flight
  int query_stages;         // 2: the next tile's query loads, and its first scores run, under this tile's epilogue
  bool output_in_query;     // the output leaves through the query's buffer (no room for one of its own)
  bool take_turns;          // warpgroups issue their products one after the other, so that one's softmax runs under the other's products

  constexpr int consumers() const { return block_m / 64; }
};

// TFLOP/s on an H200, bfloat16, 16384 tokens, heads x head_dim = 2048, "full | causal".
inline constexpr forward_row forward_rows_sm90[] = {
    // head_dim 64: limited by the exponentials. Three consumers share K and V over 192 rows.
    {64, 64, 192, 128, 3, 2, false, true},
    // head_dim 64, short causal rows: less of a 128-row tile lies above the diagonal.
    {64, 64, 128, 128, 3, 2, false, true},
    // head_dim 128: three consumers halve the traffic of K and V per product; 80 keys keep O, S and P within 160 registers.
    {128, 128, 192, 80, 2, 2, false, true},
    // head_dim 128, short rows: fewer keys per row tile to amortise a 192-row tile's start.
    {128, 128, 128, 128, 2, 2, false, true},
    // head_dim 256: O alone takes 128 registers a thread, so two consumers and 80 keys.
    {256, 256, 128, 80, 2, 1, true, true},
};

// The cpu machine: tiles sized for a 512 KB second-level cache, one consumer per 64 rows, no turns (a CTA is one thread).
inline constexpr forward_row forward_rows_cpu[] = {
    {64, 64, 128, 128, 1, 1, true, false},
    {128, 128, 128, 128, 1, 1, true, false},
    {256, 256, 128, 64, 1, 1, true, false},
};

// Shared memory of a row's tiles; barriers and the mailbox add less than the 1024 bytes that alignment rounds up to.
constexpr int forward_tile_bytes(const forward_row& r, int element_bytes) {
  const int output = r.output_in_query ? 0 : r.block_m * r.value_dim;
  return element_bytes * (r.query_stages * r.block_m * r.head_dim + r.stages * r.block_n * (r.head_dim + r.value_dim) + output);
}

inline constexpr int forward_count_sm90 = sizeof(forward_rows_sm90) / sizeof(forward_row);
inline constexpr int forward_count_cpu = sizeof(forward_rows_cpu) / sizeof(forward_row);

}  // namespace kittens_torch
