// C (128 x 64) = A (128 x 160) B (64 x 160)^T + bias of the column, by a producer and two consumers: rings, products,
// barriers and their defects.
#include "defect.h"

namespace {

using namespace kittens;

struct pipeline {
  static constexpr int block_m = 128, n = 64, block_k = 32, slices = 5, stages = 2, consumers = 2,
                       warpgroups = consumers + 1;
  static constexpr bool starts_early = true;
  using a_tile = shared_tile<float, block_m, block_k>;
  using b_tile = shared_tile<float, n, block_k>;
  using c_tile = shared_tile<float, block_m, n>;
  using c_rows = shared_tile<float, 64, n>;
  using bias_vector = shared_vector<float, n>;

  struct params {
    tile_map<a_tile> a;
    tile_map<b_tile> b;
    tile_map<c_rows> c;
    const float* bias;
    defect with;
  };
  struct shared {
    a_tile a[stages];
    b_tile b[stages];
    c_tile c;
    bias_vector bias;
    ring_flags<stages> a_flags, b_flags;
    barrier bias_full;
    mailbox<int> mail;
  };

  static void run(const params& p, shared& s, cta cta) {
    const auto with = [&](const char* name) { return p.with.is(name); };
    if (cta.warpgroup == 0) {
      s.a_flags.init(consumers);
      s.b_flags.init(consumers);
      if (!with("no init")) s.bias_full.init(with("too many arrivals") ? 2 : 1);
      s.mail.init(consumers);
    }
    if (!with("no publish_barriers")) cta.publish_barriers();
    if (!with("no await_earlier_launches")) cta.await_earlier_launches();
    if (cta.warpgroup == 0)
      produce(p, s);
    else
      consume(p, s, cta.warpgroup - 1);
  }

  static void produce(const params& p, shared& s) {
    const auto with = [&](const char* name) { return p.with.is(name); };
    sender mail(s.mail);
    mail.send(slices);
    if (with("too many arrivals")) s.bias_full.arrive();
    s.bias_full.expect(bias_vector::bytes + (with("too few bytes") ? 16 : with("too many bytes") ? -16 : 0));
    copy(s.bias, p.bias, s.bias_full);
    if (with("too many arrivals")) s.bias_full.arrive();
    producer a(s.a, s.a_flags);
    producer b(s.b, s.b_flags);
    for (int k = 0; k < slices; k++) {
      a.load(p.a, {0, 0, 0, k * block_k});
      b.load(p.b, {0, 0, 0, k * block_k});
    }
    if (with("copy nobody waits for")) b.load(p.b, {});
  }

  static void consume(const params& p, shared& s, int wg) {
    const auto with = [&](const char* name) { return p.with.is(name); };
    consumer a(s.a, s.a_flags);
    consumer b(s.b, s.b_flags);
    receiver mail(s.mail);
    register_tile<float, n> sum;
    const int count = mail.wait();
    mail.release();
    if (with("message released twice")) mail.release();
    for (int k = 0; k < count; k++) {
      a_tile& a_slice = with("no wait for the copy") ? s.a[k % stages] : a.wait();
      b_tile& b_slice = b.wait();
      if (!with("no mma_begin")) mma_begin(sum);
      mma_ABt(sum, rows_of(a_slice, wg * 64), with("tile never filled") ? reinterpret_cast<b_tile&>(s.c) : b_slice,
              k > 0);
      if (!with("no mma_commit")) mma_commit();
      if (with("released under a product")) a.release();
      if (with("stage overwritten"))
        s.a_flags.empty[k % stages].arrive();  // a release that the checker does not know as one
      if (!with("no mma_wait")) mma_wait<0>();
      if (with("no mma_wait")) map(sum, [](float x) { return x; });
      if (!with("no mma_done")) mma_done(sum);
      if (!with("released under a product") && !with("stage overwritten") && !with("forgotten release")) a.release();
      if (with("released twice")) a.release();
      b.release();
      if (with("read after release") && k == 0) {
        mma_begin(sum);
        mma_ABt(sum, rows_of(a_slice, wg * 64), b_slice, 1);
      }
    }
    if (!with("vector read before its copy")) s.bias_full.wait(0);
    if (with("same phase twice")) s.bias_full.wait(0);
    column_vector<float, 64> bias;
    load_columns(bias, s.bias);
    map_columns(sum, bias, [](float x, float y) { return x + y; });
    store_async(p.c, rows_of(s.c, wg * 64), sum, {wg * 64, 0, 0, 0});
    if (!with("no store_wait_all")) store_wait_all();
  }
};

}  // namespace

extern "C" const char* pipeline_run(const char* name, unsigned seed, float* a, float* b, float* bias, float* c) {
  pipeline::params p;
  p.with = {name};
  p.bias = bias;
  make_tile_map(p.a, matrix(a, pipeline::block_m, pipeline::slices * pipeline::block_k));
  make_tile_map(p.b, matrix(b, pipeline::n, pipeline::slices * pipeline::block_k));
  make_tile_map(p.c, matrix(c, pipeline::block_m, pipeline::n));
  return run_checked<pipeline>(p, seed);
}
