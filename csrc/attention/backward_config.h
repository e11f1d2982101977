// The backward kernels' configurations: one row per shape, one table per machine. Everything a row implies (shared memory, registers) is checked
// by static_asserts in backward_shapes.cuh. plan.cpp chooses among the rows.
#pragma once

namespace kittens_torch {

struct backward_row {
  int head_dim, value_dim;  // largest the row takes; smaller ones are padded with zeros inside shared memory
  // The kernel that owns keys (dK and dV). false: 128 keys, each warpgroup sums both gradients of 64. true: 64 keys, one warpgroup sums dV and
  // the other dK.
  bool roles;
  int block_q;      // query rows of its step
  int stages;       // its Q and dO tiles in flight
  int tile_stages;  // its K and V tiles in flight; 2: those of the next tile load early
  // From so many visible keys a query row on, on average, it also adds up dQ in memory, in any order or a fixed one; below, and at 0 always, the kernel
  // that owns queries makes dQ: that costs two products more, but no clearing, adding and reading of sums.
  int sums_from;
  // The kernel that owns 128 query rows (dQ).
  int block_n;                   // keys of its step
  int key_stages, value_stages;  // its K and V tiles in flight
  bool takes_softcap = true;     // of the modified class: the derivative of a soft cap takes registers of the kernels that own keys
  // The kernel that owns keys: logsumexp and delta begin S and dP as terms, by a product more of depth 16, and no step loads them
  // (backward_row_values.cuh).
  bool folds = false;
  // Of the modified class: a bool mask that vectors read is all there is, and every tile of keys is whole.
  bool mask_alone = false;

  constexpr bool sums_query() const { return sums_from > 0; }
  constexpr int block_k() const { return roles ? 64 : 128; }
  static constexpr int block_m = 128;
};

inline constexpr backward_row backward_rows_sm90[] = {
    // 128 queries a step: the scores' products are 128 wide, which shared memory feeds without a stall.
    {64, 64, false, 128, 2, 2, 300, 128, 3, 2},
    // dK, dV and the scores of 64 queries are what the registers hold.
    // Folded, a step waits for no load between its products: 1.06, 1.05, 1.06 full and 1.02, 1.04, 1.06 causal at 1k, 4k, 16k; without sums
    // 1.17, 1.24, 1.26 and 1.12, 1.22, 1.26.
    {128, 128, false, 64, 2, 2, 500, 96, 3, 2, true, true},
    // Above 128 dK and dV of 64 keys take all registers of a warpgroup: two share them.
    {192, 128, true, 64, 2, 2, 0, 80, 3, 2},
    {192, 192, true, 64, 2, 1, 0, 80, 3, 1},
    // Sums of dQ cost more than the two products that they save: full, 2k 388 against 411 TFLOP/s, 16k 431 and 437; causal, 16k 424 and 449.
    {256, 256, true, 64, 2, 1, 0, 64, 2, 1},
};

// The modified class (modifiers.h). Its elementwise work wants registers and steps of 64 queries; dQ is made by its owner, always.
inline constexpr backward_row backward_rows_sm90_modified[] = {
    {64, 64, false, 64, 2, 2, 0, 64, 3, 2},
    // Both gradients of 64 keys and what modifies scores fit a warpgroup's registers but for the derivative of a soft cap.
    {128, 128, false, 64, 2, 2, 0, 64, 3, 2, false},
    {128, 128, true, 64, 2, 2, 0, 64, 3, 2},
    {256, 256, true, 64, 2, 1, 0, 32, 2, 2},
    // A bool mask alone. Half of 4k keys padding, head_dim 64: 642 against 1010 us; documents in 16k, head_dim 128: 850 against 1296.
    {64, 64, false, 128, 2, 2, 1, 64, 3, 2, false, false, true},
    {128, 128, false, 64, 2, 2, 1, 64, 3, 2, false, true, true},
};

// The cpu machine: no limit of registers, so that both warpgroups share the tiles of Q and dO; dQ is summed by its owner, always.
// The same rows serve the modified class.
inline constexpr backward_row backward_rows_cpu[] = {
    {64, 64, false, 128, 1, 1, 0, 128, 2, 1},
    {128, 128, false, 64, 1, 1, 0, 64, 2, 1},
    {256, 256, false, 64, 1, 1, 0, 64, 2, 1},
};

inline constexpr int backward_count_sm90 = sizeof(backward_rows_sm90) / sizeof(backward_row);
inline constexpr int backward_count_sm90_modified = sizeof(backward_rows_sm90_modified) / sizeof(backward_row);
inline constexpr int backward_count_cpu = sizeof(backward_rows_cpu) / sizeof(backward_row);

// Shared memory of a row's tiles, of the kernel that owns keys and of the one that owns queries.
constexpr int backward_key_bytes(const backward_row& r, int element_bytes, bool sums_query, bool folds) {
  const int both = r.head_dim + r.value_dim, weights = (r.roles ? 2 * 64 * r.block_q : 0) + (sums_query ? 2 * r.block_k() * r.block_q : 0);
  return element_bytes * (both * (r.tile_stages * r.block_k() + r.stages * r.block_q) + weights) +
         (folds ? 16 : 8) * r.stages * r.block_q;
}
constexpr int backward_query_bytes(const backward_row& r, int element_bytes) {
  return element_bytes *
         ((r.head_dim + r.value_dim) * r.block_m + r.block_n * (r.key_stages * r.head_dim + r.value_stages * r.value_dim));
}

// Stages, and shared memory, of the kernel that owns the bias's gradient.
constexpr int backward_bias_stages(const backward_row& r) { return r.head_dim <= 128 ? 2 : 1; }
constexpr int backward_bias_bytes(const backward_row& r, int element_bytes) {
  return element_bytes * (r.head_dim + r.value_dim) * (r.block_m + r.block_n) * backward_bias_stages(r);
}

}  // namespace kittens_torch
