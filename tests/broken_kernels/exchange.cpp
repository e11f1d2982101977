// Y = X W for X (128 x 64), W (64 x 64), by two warpgroups that take X to shared memory and multiply the half that the
// other one has stored: stores, sends, named barriers and register operands, and their defects. U = 2 X W, from
// registers, goes out through the same shared tile.
#include "defect.h"

namespace {

using namespace kittens;

struct exchange {
  static constexpr int rows = 128, n = 64, warpgroups = 2;
  using w_tile = shared_tile<float, n, n>;
  using x_tile = shared_tile<float, rows, n>;
  using x_rows = shared_tile<float, 64, n>;

  struct params {
    tile_map<w_tile> w;
    tile_map<x_rows> y, u;
    const float* x;
    defect with;
  };
  struct shared {
    w_tile w;
    x_tile x, out;
    barrier full;
  };

  static void run(const params& p, shared& s, cta cta) {
    const auto with = [&](const char* name) { return p.with.is(name); };
    const int wg = cta.warpgroup, other = 1 - wg, mine = wg * 64, its = other * 64;
    const named_barrier both{first_free_barrier, 2}, own{first_free_barrier + 1 + wg, 1};
    if (wg == 0) s.full.init(1);
    cta.publish_barriers();
    if (wg == 0) {
      s.full.expect(w_tile::bytes);
      copy(s.w, p.w, {}, s.full);
    }

    register_tile<float, n> x, y;
    map(x, [&](int r, int c, float) { return p.x[(mine + r) * n + c]; });
    store(rows_of(s.x, mine), x);
    if (with("store not published"))
      both.sync();
    else if (with("published to itself only"))
      publish(own);
    else if (with("reserved barrier"))
      publish({first_free_barrier - 1, 2});
    else
      publish(both);
    s.full.wait(0);
    mma_begin(y);
    mma_AB(y, rows_of(s.x, its), s.w, 0);
    mma_commit();
    mma_wait<0>();
    mma_done(y);
    store(rows_of(s.out, its), y);
    if (!with("sent before publish")) publish(own);
    send(p.y, rows_of(s.out, its), {its, 0, 0, 0});

    mma_begin(y, x);
    mma_AB(y, x, s.w, 0);
    mma_commit();
    if (with("operand changed under a product")) map(x, [](float v) { return v + 1; });
    mma_wait<0>();
    mma_done(y);
    if (with("product in flight at the end")) {
      mma_begin(y, x);
      mma_AB(y, x, s.w, 0);
      mma_commit();
      return;
    }
    map(y, [](float v) { return 2 * v; });
    if (!with("overwritten under a send")) store_wait_read();
    store(rows_of(s.out, its), y);
    publish(own);
    send(p.u, rows_of(s.out, its), {mine, 0, 0, 0});
    if (with("inconsistent participants")) named_barrier{first_free_barrier + 3, 1 + wg}.arrive();
    if (with("arrival left over") && wg == 0) named_barrier{first_free_barrier + 3, 2}.arrive();
    store_wait_all();
  }
};

}  // namespace

extern "C" const char* exchange_run(const char* name, unsigned seed, float* x, float* w, float* y, float* u) {
  exchange::params p;
  p.with = {name};
  p.x = x;
  make_tile_map(p.w, matrix(w, exchange::n, exchange::n));
  make_tile_map(p.y, matrix(y, exchange::rows, exchange::n));
  make_tile_map(p.u, matrix(u, exchange::rows, exchange::n));
  return run_checked<exchange>(p, seed);
}
