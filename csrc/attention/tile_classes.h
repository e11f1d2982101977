// What is known of a bool mask before a kernel looks at it: which of its 64 x 64 tiles are empty or full, and which keys no row sees. A mask with
// one row for all queries has one row of tiles.
#pragma once
#include <cstdint>

#include "../kittens/core/defines.h"
#include "../kittens/core/execution.h"
#include "mask.h"

namespace kittens_torch {

inline constexpr int class_tile = 64;  // rows and keys of a tile

enum tile_class : unsigned char { tile_empty = 0, tile_mixed = 1, tile_full = 2 };

// Key tiles first <= t < end of a row of tiles hold all that are not empty; end 0 where there are none.
struct tile_range {
  int first, end;
};

struct tile_classes {
  unsigned char* tiles = nullptr;  // (plane, row tile, key tile), or null: nothing is known
  tile_range* ranges = nullptr;    // (plane, row tile)
  unsigned char* seen = nullptr;   // a byte for each key of a plane: not 0 where one of its rows sees the key
  int64_t seen_stride[3] = {};     // of (batch, head, key): for a mask with one row this is the mask itself
  int batch_planes = 0, head_planes = 0;  // planes from one batch, or head, to the next; 0 where the mask has one for all
  int row_tiles = 0, key_tiles = 0;

  KITTENS_HOST_DEVICE int64_t row_of_tiles(int batch, int head, int row) const {
    const int64_t plane = int64_t(batch) * batch_planes + int64_t(head) * head_planes;
    return plane * row_tiles + (row_tiles == 1 ? 0 : row / class_tile);
  }
  KITTENS_HOST_DEVICE bool key_is_seen(int batch, int head, int key) const {
    return seen[batch * seen_stride[0] + head * seen_stride[1] + key * seen_stride[2]] != 0;
  }
};

// A bool mask to be classified: its own sizes, 1 where it is broadcast.
struct mask_to_classify {
  const unsigned char* mask;
  int64_t stride[4];
  int batch, heads, rows, keys;
  interval_mask visible;  // what no row sees under it counts as unseen, where the mask has more than one row
};

// Fill `classes`, whose `seen` is zero where it is not the mask itself. Null or an error text.
const char* classify_tiles_sm90(const mask_to_classify&, const tile_classes& classes, const kittens::execution&);
const char* classify_tiles_cpu(const mask_to_classify&, const tile_classes& classes, const kittens::execution&);

}  // namespace kittens_torch
