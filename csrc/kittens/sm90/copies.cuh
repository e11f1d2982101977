// Between global and shared memory (TMA), and between registers and both.
#pragma once
#include <cuda.h>

#include "barriers.cuh"

namespace kittens {
inline namespace KITTENS_MACHINE {

// A (batch, head, row, column) tensor read and written in boxes of Tile: one TMA box per panel of the tile.
template <class Tile> struct tile_map {
  using tile = Tile;
  CUtensorMap map;
};

// One thread. Fills the tile from `where` on; what lies outside the tensor becomes zero. Completes on `full`.
template <class T, int R, int C>
KITTENS_INLINE void copy(shared_tile<T, R, C>& tile, const tile_map<shared_tile<T, R, C>>& map, place where, barrier& full) {
  using layout = tile_layout<T, R, C>;
  KITTENS_UNROLL for (int panel = 0; panel < layout::panels; panel++)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            shared_address(tile.data) + panel * layout::panel_bytes),
        "l"(reinterpret_cast<uint64_t>(&map.map)), "r"(shared_address(&full.state)), "r"(where.column + panel * layout::panel_columns),
        "r"(where.row), "r"(where.head), "r"(where.batch)
        : "memory");
}

template <class T, int N> KITTENS_INLINE void copy(shared_vector<T, N>& vector, const T* source, barrier& full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(vector.data)),
               "l"(source), "r"(vector.bytes), "r"(shared_address(&full.state))
               : "memory");
}

// Registers to 64 rows of a shared tile. Each stmatrix writes 16 rows x 16 columns a warp; 16-byte chunks are swizzled as TMA does it: chunk
// index xor the row within the swizzle's period.
template <class T, int R, int C> KITTENS_INLINE void store(shared_rows<shared_tile<T, R, C>> to, const register_tile<T, C>& t) {
  using layout = tile_layout<T, R, C>;
  constexpr uint32_t chunks = layout::span_bytes / 16, rows_per_step = 8 / chunks;
  const uint32_t me = thread::in_warpgroup_now(), lane = me & 31, row = to.first + (me >> 5) * 16 + (lane & 15);
  const uint32_t base = shared_address(to.tile.data) + row * layout::span_bytes, twist = (row / rows_per_step) % chunks;
  KITTENS_UNROLL for (int j = 0; j < C / 16; j++) {
    const uint32_t chunk = j * 2 + (lane >> 4);
    const uint32_t address = base + (chunk / chunks) * layout::panel_bytes + (((chunk % chunks) ^ twist) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(t.d[4 * j]), "r"(t.d[4 * j + 1]),
                 "r"(t.d[4 * j + 2]), "r"(t.d[4 * j + 3])
                 : "memory");
  }
}

// Where this lane finds 16 rows x 16 columns of its warp for stmatrix and ldmatrix.
template <class T, int R, int C> struct matrix_addresses {
  using layout = tile_layout<T, R, C>;
  static constexpr uint32_t chunks = layout::span_bytes / 16, rows_per_step = 8 / chunks;
  uint32_t base, twist, half;

  KITTENS_INLINE matrix_addresses(const shared_tile<T, R, C>& tile, int first) {
    const uint32_t me = thread::in_warpgroup_now(), lane = me & 31, row = first + (me >> 5) * 16 + (lane & 15);
    base = shared_address(tile.data) + row * layout::span_bytes;
    twist = (row / rows_per_step) % chunks;
    half = lane >> 4;
  }
  KITTENS_INLINE uint32_t of(int j) const {  // of columns 16 j to 16 j + 15
    const uint32_t chunk = j * 2 + half;
    return base + (chunk / chunks) * layout::panel_bytes + (((chunk % chunks) ^ twist) << 4);
  }
  // The four registers of those columns, in the order of a 16-bit register tile.
  KITTENS_INLINE void load(int j, uint32_t (&pairs)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "r"(of(j))
                 : "memory");
  }
};

// 64 rows of a shared tile to registers, widened.
template <class T, int R, int C> KITTENS_INLINE void load(register_tile<float, C>& t, shared_rows<shared_tile<T, R, C>> from) {
  const matrix_addresses<T, R, C> at(from.tile, from.first);
  KITTENS_UNROLL for (int j = 0; j < C / 16; j++) {
    uint32_t pairs[4];
    at.load(j, pairs);
    KITTENS_UNROLL for (int i = 0; i < 4; i++) {
      const float2 x = unpack<T>(pairs[i]);
      t.d[8 * j + 2 * i] = x.x;
      t.d[8 * j + 2 * i + 1] = x.y;
    }
  }
}

// The same, as they are.
template <class T, int R, int C>
  requires is_16_bit<T>
KITTENS_INLINE void load(register_tile<T, C>& t, shared_rows<shared_tile<T, R, C>> from) {
  const matrix_addresses<T, R, C> at(from.tile, from.first);
  KITTENS_UNROLL for (int j = 0; j < C / 16; j++) at.load(j, *reinterpret_cast<uint32_t(*)[4]>(t.d + 4 * j));
}
// The transpose of 64 columns.
template <class T, int R, int C>
  requires is_16_bit<T>
KITTENS_INLINE void load_transposed(register_tile<T, R>& t, shared_columns<shared_tile<T, R, C>> from) {
  using layout = tile_layout<T, R, C>;
  constexpr uint32_t chunks = layout::span_bytes / 16, rows_per_step = 8 / chunks;
  const uint32_t me = thread::in_warpgroup_now(), lane = me & 31, row = (lane & 7) + (lane >> 4) * 8;
  const uint32_t chunk = from.first / 8 + (me >> 5) * 2 + (lane >> 3 & 1), twist = (row / rows_per_step) % chunks;
  const uint32_t address = shared_address(from.tile.data) + (chunk / chunks) * layout::panel_bytes + row * layout::span_bytes + (((chunk % chunks) ^ twist) << 4);
  KITTENS_UNROLL for (int j = 0; j < R / 16; j++)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(t.d[4 * j]), "=r"(t.d[4 * j + 1]), "=r"(t.d[4 * j + 2]), "=r"(t.d[4 * j + 3])
                 : "r"(address + j * 16 * layout::span_bytes)
                 : "memory");
}

// v += the dot products of the rows of a and b, each thread its share.
template <class T, int R, int C>
KITTENS_INLINE void row_dot(row_vector<float>& v, shared_rows<shared_tile<T, R, C>> a, shared_rows<shared_tile<T, R, C>> b) {
  const matrix_addresses<T, R, C> at_a(a.tile, a.first), at_b(b.tile, b.first);
  KITTENS_UNROLL for (int j = 0; j < C / 16; j++) {
    uint32_t left[4], right[4];
    at_a.load(j, left);
    at_b.load(j, right);
    KITTENS_UNROLL for (int i = 0; i < 4; i++) {
      const float2 x = unpack<T>(left[i]), y = unpack<T>(right[i]);
      v.d[i & 1] += x.x * y.x + x.y * y.y;
    }
  }
}

// Whether an element of a tile of a 16-bit type is infinite or NaN. The warpgroup meets here.
template <class T, int R, int C> KITTENS_INLINE bool any_not_finite(const shared_tile<T, R, C>& tile) {
  const uint4* data = reinterpret_cast<const uint4*>(tile.data);
  constexpr uint32_t exponent = std::is_same_v<T, bf16> ? 0x7f80u : 0x7c00u;
  bool found = false;
  KITTENS_NO_UNROLL for (int i = thread::in_warpgroup_now(); i < R * C / 8; i += 128) {
    const uint4 x = data[i];
    const auto is_bad = [](uint32_t pair) { return (pair & exponent) == exponent || (pair >> 16 & exponent) == exponent; };
    found |= is_bad(x.x) || is_bad(x.y) || is_bad(x.z) || is_bad(x.w);
  }
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, one;\n"
      "setp.ne.s32 mine, %1, 0;\n"
      "barrier.cta.red.or.aligned.pred one, %2, 128, mine;\n"
      "selp.s32 %0, 1, 0, one;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<int>(found)), "r"(thread::warpgroup())
      : "memory");
  return any != 0;
}

// N rows of a shared tile: what is infinite or NaN becomes zero. Publish before products read them.
template <int N, class T, int R, int C> KITTENS_INLINE void zero_not_finite(shared_rows<shared_tile<T, R, C>> rows) {
  using layout = tile_layout<T, R, C>;
  constexpr int span = layout::span_bytes / 2;
  constexpr uint16_t exponent = std::is_same_v<T, bf16> ? 0x7f80u : 0x7c00u;
  uint16_t* data = reinterpret_cast<uint16_t*>(rows.tile.data);
  KITTENS_NO_UNROLL for (int i = thread::in_warpgroup_now(); i < N * C; i += 128) {
    uint16_t& x = data[i / (N * span) * (R * span) + rows.first * span + i % (N * span)];
    if ((x & exponent) == exponent) x = 0;
  }
}

// The N rows from `to` on with zero(row): row 0 is the first of them. Publish before products read them.
template <int N, class T, int R, int C, class F> KITTENS_INLINE void zero_rows(shared_rows<shared_tile<T, R, C>> to, F zero) {
  using layout = tile_layout<T, R, C>;
  constexpr int chunks = layout::span_bytes / 16;
  // Every warp does all of it: rarely run, and the lane is at hand where the thread's number would take a register.
  KITTENS_NO_UNROLL for (int row = thread::lane(); row < N; row += 32) {
    if (!zero(row)) continue;
    char* span = reinterpret_cast<char*>(to.tile.data) + (to.first + row) * layout::span_bytes;
    KITTENS_NO_UNROLL for (int i = 0; i < layout::panels * chunks; i++)
      *reinterpret_cast<uint4*>(span + i / chunks * layout::panel_bytes + i % chunks * 16) = uint4{0, 0, 0, 0};
  }
}

// Makes stores visible to the products and copies of every warpgroup that meets at the barrier.
KITTENS_INLINE void publish(named_barrier where) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  where.sync();
}

// The same, without waiting there: for warpgroups that sync at the barrier later.
KITTENS_INLINE void publish_arrive(named_barrier where) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  where.arrive();
}

// 64 published rows to global memory; what lies outside the tensor is clipped. The source may be reused after store_wait_read().
template <class T, int R, int C>
KITTENS_INLINE void send(const tile_map<shared_tile<T, 64, C>>& map, shared_rows<shared_tile<T, R, C>> from, place where) {
  using layout = tile_layout<T, R, C>;
  if (thread::in_warpgroup() == 0) {
    KITTENS_UNROLL for (int panel = 0; panel < layout::panels; panel++)
      asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                       reinterpret_cast<uint64_t>(&map.map)),
                   "r"(shared_address(from.tile.data) + panel * layout::panel_bytes + from.first * layout::span_bytes),
                   "r"(where.column + panel * layout::panel_columns), "r"(where.row), "r"(where.head), "r"(where.batch)
                   : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}

KITTENS_INLINE void store_wait_read() {
  if (thread::in_warpgroup() == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
KITTENS_INLINE void store_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // threads that have sent nothing do not wait
}

template <class T, int R, int C>
KITTENS_INLINE void store_async(const tile_map<shared_tile<T, 64, C>>& map, shared_rows<shared_tile<T, R, C>> through,
                                const register_tile<T, C>& t, place where) {
  store_wait_read();
  sync_warpgroup();
  store(through, t);
  publish({thread::warpgroup(), 1});
  send(map, through, where);
}

// pointer[row] = v[row] for row < count
KITTENS_INLINE void store_rows(float* pointer, const row_vector<float>& v, int count) {
  if ((thread::lane() & 3) == 0) KITTENS_UNROLL for (int i = 0; i < 2; i++) {
      const int row = thread::first_row() + 8 * i;
      if (row < count) pointer[row] = v.d[i];
    }
}

// v[row] = pointer[row] for row < count, else `otherwise`
KITTENS_INLINE void load_rows(row_vector<float>& v, const float* pointer, int count, float otherwise) {
  KITTENS_UNROLL for (int i = 0; i < 2; i++) {
    const int row = thread::first_row() + 8 * i;
    v.d[i] = row < count ? pointer[row] : otherwise;
  }
}

// v = the column sums of t, in a fixed order. The warpgroup meets here; v may be read once it has met others.
template <int C> KITTENS_INLINE void sum_columns(shared_vector<float, C>& v, const register_tile<float, C>& t) {
  KITTENS_NO_UNROLL for (int warp = 0; warp < 4; warp++) {
    if (thread::warp() == warp)
      KITTENS_UNROLL for (int i = 0; i < C / 2; i += i % 2 ? 3 : 1) {
        float x = t.d[i] + t.d[i + 2];
        KITTENS_UNROLL for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
        float& sum = v.data[8 * (i / 4) + thread::first_column() + i % 2];
        if (thread::lane() < 4) sum = warp == 0 ? x : sum + x;
      }
    sync_warpgroup();
  }
}

// 64 x C float tiles in global memory, one after the other, summed into by many; the order of their elements is private to these two. Lanes write
// 16 bytes each, side by side: 3.8 TB/s over the chip, against 2.4 in pairs and 1.1 one by one.
// The additions drain slowly, and their address register is not free before. Held, it is one that nothing else waits for; else it is made anew for
// each tile, which leaves a register more. Which is faster depends on the kernel: see backward_keys.cuh.
template <class T, bool Held> struct tile_sums {
  static_assert(std::is_same_v<T, float>, "tile_sums: the GPU sums floats");
  T* at;

  KITTENS_INLINE explicit tile_sums(T* first) : at(Held ? first + thread::in_warpgroup() * 4 : first) {}
  template <int C> KITTENS_INLINE void add(const register_tile<float, C>& t) {
    T* mine = Held ? at : at + thread::in_warpgroup() * 4;
    KITTENS_UNROLL for (int i = 0; i < C / 8; i++)
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(mine + i * 512), "f"(t.d[4 * i]), "f"(t.d[4 * i + 1]),
                   "f"(t.d[4 * i + 2]), "f"(t.d[4 * i + 3])
                   : "memory");
  }
  // `values` further: best not a constant, which the compiler would fold into the addresses, and move the register while additions drain.
  KITTENS_INLINE void advance(int64_t values) { at += values; }
};
template <int C> KITTENS_INLINE void take_from(register_tile<float, C>& t, const float* sums) {
  const float4* mine = reinterpret_cast<const float4*>(sums) + thread::in_warpgroup();
  KITTENS_UNROLL for (int i = 0; i < C / 8; i++) {
    const float4 x = mine[i * 128];
    t.d[4 * i] = x.x, t.d[4 * i + 1] = x.y, t.d[4 * i + 2] = x.z, t.d[4 * i + 3] = x.w;
  }
}
// The same of the rows below `rows`; the others become zero.
template <int C> KITTENS_INLINE void take_from(register_tile<float, C>& t, const float* from, int rows) {
  const float4* mine = reinterpret_cast<const float4*>(from) + thread::in_warpgroup();
  const bool upper = thread::first_row() < rows, lower = thread::first_row() + 8 < rows;
  KITTENS_UNROLL for (int i = 0; i < C / 8; i++) {
    const float4 x = upper ? mine[i * 128] : float4{};
    t.d[4 * i] = x.x, t.d[4 * i + 1] = x.y, t.d[4 * i + 2] = lower ? x.z : 0, t.d[4 * i + 3] = lower ? x.w : 0;
  }
}
// The rows of t below `rows`, as tiles of `Columns` columns one after the other, each of which take_from reads. What takes their place beyond is
// not to be read.
template <int Columns, int C> KITTENS_INLINE void put_parts(float* to, const register_tile<float, C>& t, int rows) {
  static_assert(C % Columns == 0 && Columns % 8 == 0, "put_parts: parts must be multiples of 8 columns that divide the tile's");
  float4* mine = reinterpret_cast<float4*>(to) + thread::in_warpgroup();
  if (thread::first_row() < rows)
    KITTENS_UNROLL for (int i = 0; i < C / 8; i++) mine[i * 128] = {t.d[4 * i], t.d[4 * i + 1], t.d[4 * i + 2], t.d[4 * i + 3]};
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens
