// The classes of a mask's tiles, on the GPU: a CTA for each row of tiles, whose warps take a tile each in turn.
#include <cuda_runtime.h>

#include "tile_classes.h"

namespace kittens_torch {
namespace {

constexpr int warps = 8;
constexpr unsigned every_lane = ~0u;

// Whether there is a 1, or a 0, among the bytes of one tile's rows and keys that exist.
struct tile_bytes {
  bool shows, hides;
};

// Sixteen lanes a row, four keys a lane. The tile is whole, and its rows see all of its keys but for the mask.
__device__ tile_bytes read_words(const unsigned char* tile, int64_t row_stride, int rows, unsigned char* seen) {
  const int lane = threadIdx.x & 31;
  const unsigned char* mine = tile + (lane & 15) * 4;
  uint32_t any = 0, all = 0x01010101;
#pragma unroll 8
  for (int row = lane >> 4; row < rows; row += 2) {
    const uint32_t bytes = __ldg(reinterpret_cast<const uint32_t*>(mine + row * row_stride));
    any |= bytes;
    all &= bytes;
  }
  if (seen)
    for (int i = 0; i < 4; i++)
      if (any >> (8 * i) & 0xFF) seen[(lane & 15) * 4 + i] = 1;
  return {any != 0, all != 0x01010101};
}

// Two keys a lane, whatever the strides, the edges and the interval.
__device__ tile_bytes read_bytes(const mask_to_classify& m, const unsigned char* plane, int first_row, int end_row, int first_key,
                                 unsigned char* seen) {
  bool shows = false, hides = false;
  for (int key = first_key + (threadIdx.x & 31); key < first_key + class_tile && key < m.keys; key += 32) {
    bool key_seen = false;
    for (int row = first_row; row < end_row; row++) {
      const bool visible = plane[row * m.stride[2] + key * m.stride[3]] != 0;
      shows |= visible;
      hides |= !visible;
      key_seen |= visible && m.visible.visible(row, key);
    }
    if (seen && key_seen) seen[key - first_key] = 1;
  }
  return {shows, hides};
}

__global__ void __launch_bounds__(warps * 32, 4) classify(const mask_to_classify m, const tile_classes classes) {
  __shared__ int first_tile, end_tile;
  const int padded_rows = padded_classes(classes.row_tiles), row_tile = static_cast<int>(blockIdx.x % padded_rows);
  const int64_t plane = blockIdx.x / padded_rows;
  if (row_tile >= classes.row_tiles) {
    for (int tile = threadIdx.x; tile < padded_classes(classes.key_tiles); tile += warps * 32) classes.set(plane, row_tile, tile, 0);
    return;
  }
  const int first_row = row_tile * class_tile;
  const int end_row = first_row + class_tile < m.rows ? first_row + class_tile : m.rows;
  const unsigned char* mask = m.mask + plane / m.heads * m.stride[0] + plane % m.heads * m.stride[1];
  if (threadIdx.x == 0) {
    first_tile = classes.key_tiles;
    end_tile = 0;
  }
  __syncthreads();
  for (int tile = classes.key_tiles + threadIdx.x; tile < padded_classes(classes.key_tiles); tile += warps * 32) classes.set(plane, row_tile, tile, 0);
  for (int tile = threadIdx.x / 32; tile < classes.key_tiles; tile += warps) {
    const int first_key = tile * class_tile, end_key = first_key + class_tile;
    unsigned char* seen = m.rows > 1 ? classes.seen + plane * m.keys + first_key : nullptr;
    const unsigned char* corner = mask + first_row * m.stride[2] + first_key * m.stride[3];
    const bool words = m.stride[3] == 1 && end_key <= m.keys && reinterpret_cast<uintptr_t>(corner) % 4 == 0 && m.stride[2] % 4 == 0 &&
                       m.visible.first_key(end_row - 1) <= first_key && m.visible.end_key(first_row) >= end_key;
    const tile_bytes bytes =
        words ? read_words(corner, m.stride[2], end_row - first_row, seen) : read_bytes(m, mask, first_row, end_row, first_key, seen);
    const bool shows = __any_sync(every_lane, bytes.shows), hides = __any_sync(every_lane, bytes.hides);
    if ((threadIdx.x & 31) == 0) {
      classes.set(plane, row_tile, tile, (shows ? tile_shows : 0) | (hides ? tile_hides : 0));
      if (shows) {
        atomicMin(&first_tile, tile);
        atomicMax(&end_tile, tile + 1);
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) classes.ranges[plane * classes.row_tiles + row_tile] = end_tile > 0 ? tile_range{first_tile, end_tile} : tile_range{0, 0};
}

}  // namespace

const char* classify_tiles_sm90(const mask_to_classify& m, const tile_classes& classes, const kittens::execution& execution) {
  const int64_t strips = int64_t(m.batch) * m.heads * padded_classes(classes.row_tiles);
  if (strips >= int64_t(1) << 31) return "the mask has more than 2^31 rows of tiles";
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(strips));
  config.blockDim = dim3(warps * 32);
  config.stream = static_cast<cudaStream_t>(execution.stream);
  const cudaError_t code = cudaLaunchKernelEx(&config, classify, m, classes);  // cudaGetLastError may tell of an earlier call
  return code == cudaSuccess ? nullptr : cudaGetErrorString(code);
}

}  // namespace kittens_torch
