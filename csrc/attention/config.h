// The forward kernel's configurations: one row per tile shape, one table per machine. Everything a row implies (shared memory, registers) is
// checked by static_asserts in forward_shapes.cuh. plan.cpp chooses among the rows.
#pragma once

namespace kittens_torch {

struct forward_row {
  int head_dim, value_dim;  // largest the row takes; smaller ones are padded with zeros inside shared memory
  int block_m, block_n;     // query rows and keys of a tile
  int stages;               // K/V tiles in flight
  int query_stages;         // 2: the next tile's query loads, and its first scores run, under this tile's epilogue
  int output_parts;         // the output leaves in so many column parts through one buffer; 0: in whole through the query's buffer
  bool take_turns;          // warpgroups issue their products one after the other, so that one's softmax runs under the other's products
  bool takes_softcap = true;  // of the modified class

  constexpr int consumers() const { return block_m / 64; }
};

// Beside each row: TFLOP/s on an H200, bfloat16, 16384 tokens, heads x head_dim = 2048, "full | causal" at the length named.
// From several runs of successive versions: figures of different rows need not be of one run.
inline constexpr forward_row forward_rows_sm90[] = {
    // Bound by the exponentials; three consumers share K and V over 192 rows. 16k: 578 | 556; two consumers and 128 rows: 460 | 480.
    {64, 64, 192, 128, 3, 2, 1, true},
    // 96 keys keep O, S and P within 160 registers.
    {96, 96, 192, 96, 3, 2, 1, true},
    // Long rows: three consumers halve the traffic of K and V a product. 16k: 717 | 670; 512: 479 | 299.
    {128, 128, 192, 80, 2, 2, 1, true},
    // Short rows start sooner with 128. 512: 552 | 327; 16k: 739 | 708 where the row above reads 764 | 759.
    {128, 128, 128, 128, 2, 2, 1, true},
    // Three consumers again. 10 heads, full | causal, 16k: 732 | 702; 2k: 602 | 578; 128x112 with two: 723 | 690 and 578 | 560.
    {192, 128, 192, 80, 2, 1, 1, true},
    // The output leaves in halves through a buffer of its own, so the next query loads early. 10 heads, 16k: 755 | 707; 2k: 731 | 587; in whole
    // through the query's buffer 753 | 701 and 712 | 549.
    {192, 192, 128, 96, 2, 1, 2, true},
    // O alone takes 128 registers a thread. It leaves in halves through a buffer of its own, so the next query loads early. 16k: 766 | 766; 2k: 746 |
    // 624; with 80 keys through the query's buffer 771 | 747 and 727 | 571.
    {256, 256, 128, 64, 2, 1, 2, true},
    // Few query rows: one consumer, so that twice the multiprocessors have a tile. Eight heads of 512 keys: 5.8 against 8.7, 8.0 against 10.1 and 10.9
    // against 14.0 us (CUDA graph).
    {64, 64, 64, 128, 3, 2, 1, false},
    {128, 128, 64, 128, 2, 2, 1, false},
    {256, 256, 64, 64, 2, 2, 1, false},
};

// The modified class, one row for each class of head dims: tiles made of 64 x 64 class tiles. Beside 64 scores and 32 outputs what changes the scores
// has registers left with three consumers too, which hide its latencies (half of the keys padding: 215 us); at head_dim 128 192x64 tiles do not
// (documents: 494 against 332 us).
inline constexpr forward_row forward_rows_sm90_modified[] = {
    {64, 64, 192, 128, 3, 2, 1, true},
    // Soft caps have a row of their own: what they take costs other calls 3 to 5 % (a mask of random bits: 2110 against 2225 us).
    {128, 128, 128, 128, 2, 2, 1, true, false},
    {128, 128, 128, 128, 2, 2, 1, true},
    {256, 256, 128, 64, 2, 1, 2, true},
};

// Few query rows against many keys, whose blocks are divided among CTAs (forward_combine.cuh). Memory bounds them: stages are what is in flight. The
// output leaves through no buffer; output_parts are the CTAs that put one tile's parts together.
inline constexpr forward_row forward_rows_sm90_split[] = {
    {64, 64, 64, 128, 6, 1, 4, false},
    {128, 128, 64, 128, 3, 1, 8, false},
    {256, 256, 64, 64, 3, 1, 16, false},
};

// The cpu machine: tiles sized for a 512 KB second-level cache, one consumer per 64 rows, no turns (a CTA is one thread).
// Every class has these rows.
inline constexpr forward_row forward_rows_cpu[] = {
    {64, 64, 128, 128, 1, 1, 0, false},
    {128, 128, 128, 128, 1, 1, 0, false},
    {256, 256, 128, 64, 1, 1, 0, false},
};

inline constexpr forward_row forward_rows_cpu_split[] = {
    {64, 64, 64, 128, 1, 1, 1, false},
    {128, 128, 64, 128, 1, 1, 1, false},
    {256, 256, 64, 64, 1, 1, 1, false},
};

// Shared memory of a row's tiles; barriers and the mailbox add less than the 1024 bytes that alignment rounds up to.
constexpr int forward_tile_bytes(const forward_row& r, int element_bytes, bool split = false) {
  const int output = r.output_parts == 0 || split ? 0 : r.block_m * r.value_dim / r.output_parts;
  return element_bytes * (r.query_stages * r.block_m * r.head_dim + r.stages * r.block_n * (r.head_dim + r.value_dim) + output);
}

inline constexpr int forward_count_sm90 = sizeof(forward_rows_sm90) / sizeof(forward_row);
inline constexpr int forward_count_sm90_modified = sizeof(forward_rows_sm90_modified) / sizeof(forward_row);
inline constexpr int forward_count_sm90_split = sizeof(forward_rows_sm90_split) / sizeof(forward_row);
inline constexpr int forward_count_cpu_split = sizeof(forward_rows_cpu_split) / sizeof(forward_row);
inline constexpr int forward_count_cpu = sizeof(forward_rows_cpu) / sizeof(forward_row);

}  // namespace kittens_torch
