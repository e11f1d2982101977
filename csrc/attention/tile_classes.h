// What is known of a bool mask before a kernel looks at it: which of its 64 x 64 tiles are empty or full, and which keys no row sees. A mask with
// one row for all queries has one row of tiles.
#pragma once
#include <cstdint>

#include "../kittens/core/defines.h"
#include "../kittens/core/execution.h"
#include "mask.h"

namespace kittens_torch {

inline constexpr int class_tile = 64;  // rows and keys of a tile

// The class of a tile: what it has any of. Tiles outside the mask have nothing.
enum tile_class : unsigned char { tile_shows = 1, tile_hides = 2 };

// Rows of classes are padded to a multiple of 8, by 8 at least: kernels look a little beyond the mask, and at eight classes at once.
KITTENS_HOST_DEVICE int padded_classes(int tiles) { return tiles / 8 * 8 + 16; }

// Key tiles first <= t < end of a row of tiles hold all that are not empty; end 0 where there are none.
struct tile_range {
  int first, end;
};

struct tile_classes {
  unsigned char* tiles = nullptr;       // (plane, row tile, key tile), padded both ways, or null: there is no mask
  unsigned char* transposed = nullptr;  // (plane, key tile, row tile)
  tile_range* ranges = nullptr;         // (plane, row tile)
  unsigned char* seen = nullptr;        // a byte for each key of a plane: not 0 where one of its rows sees the key
  int64_t seen_stride[3] = {};          // of (batch, head, key): for a mask with one row this is the mask itself
  int batch_planes = 0, head_planes = 0;  // planes from one batch, or head, to the next; 0 where the mask has one for all
  int row_tiles = 0, key_tiles = 0;

  // Bytes of `tiles` and of `transposed` together, for one plane.
  KITTENS_HOST_DEVICE int64_t plane_bytes() const { return int64_t(2) * padded_classes(row_tiles) * padded_classes(key_tiles); }
  KITTENS_HOST_DEVICE int64_t plane_of(int batch, int head) const { return int64_t(batch) * batch_planes + int64_t(head) * head_planes; }
  KITTENS_HOST_DEVICE int row_tile(int row) const { return row_tiles == 1 ? 0 : row / class_tile; }
  KITTENS_HOST_DEVICE tile_range range(int batch, int head, int row) const { return ranges[plane_of(batch, head) * row_tiles + row_tile(row)]; }

  // The classes of 64 rows from `row` on, by key tile; those of the 64 rows after lie row_step() further.
  KITTENS_HOST_DEVICE const unsigned char* of_rows(int batch, int head, int row) const {
    return tiles + (plane_of(batch, head) * padded_classes(row_tiles) + row_tile(row)) * padded_classes(key_tiles);
  }
  KITTENS_HOST_DEVICE int row_step() const { return row_tiles == 1 ? 0 : padded_classes(key_tiles); }
  // The classes of 64 keys from `key` on, by row tile, of which there may be one for all rows; those of the keys after lie key_step() further.
  KITTENS_HOST_DEVICE const unsigned char* of_keys(int batch, int head, int key) const {
    return transposed + (plane_of(batch, head) * padded_classes(key_tiles) + key / class_tile) * padded_classes(row_tiles);
  }
  KITTENS_HOST_DEVICE int key_step() const { return padded_classes(row_tiles); }
  KITTENS_HOST_DEVICE void set(int64_t plane, int row_tile, int key_tile, int what) const {
    const int rows = padded_classes(row_tiles), keys = padded_classes(key_tiles);
    tiles[(plane * rows + row_tile) * keys + key_tile] = transposed[(plane * keys + key_tile) * rows + row_tile] = static_cast<unsigned char>(what);
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
