// Six tiles, taken by three CTAs from a counter, add to each of four places in the order of their numbers: turnstiles,
// and their defects. CTAs run on a thread each, or one after the other.
#include <thread>
#include <vector>

#include "defect.h"

namespace {

using namespace kittens;

struct ordered {
  static constexpr int tiles = 6, places = 4, columns = 16, warpgroups = 3, elected = 3;
  struct message {
    int tile;
  };
  struct params {
    tile_counter* counter;
    const float* values;
    float* sums;
    int* ended;
    defect with;
  };
  struct shared {
    mailbox<message> mail;
    turnstile stile;
  };

  static void run(const params& p, shared& s, cta cta) {
    const auto with = [&](const char* name) { return p.with.is(name); };
    if (cta.warpgroup == 0 && cta.elect()) {
      s.mail.init(2, 2);
      s.stile.init(2);
    }
    cta.publish_barriers();
    const auto each_visit = [&](auto visit) {
      receiver mail(s.mail);
      while (mail.wait().tile >= 0) {
        const int tile = mail.current().tile;
        for (int place = 0; place < places; place++) visit(tile, place, tile == 2 && place == 1);
        mail.release();
      }
    };
    if (cta.warpgroup == 0) {
      if (cta.elect()) {
        sender mail(s.mail);
        const bool by_index = with("tiles by index");
        int tile = by_index ? cta.index : take_tile(p.counter, cta) - cta.count;
        while (tile < tiles) {
          mail.send({tile});
          tile = by_index ? tile + cta.count : take_tile(p.counter, cta) - cta.count;
        }
        mail.send({-1});
        retire(p.counter, cta);
      }
      if (cta.elect(1)) {
        opener turns(s.stile);
        each_visit([&](int tile, int place, bool here) {
          const int turn = with("a turn that never comes") && here   ? tile + tiles
                           : with("one turn for two tiles") && here ? tile - 1
                                                                     : tile;
          turns.open(p.ended + place, turn);
          if (with("a barrier of warpgroups") && here) named_barrier{first_free_barrier, 3}.sync();
        });
      }
      if (cta.elect(2)) {
        closer turns(s.stile);
        each_visit([&](int, int place, bool here) {
          turns.close(p.ended + (with("another place closed") && here ? place + 1 : place));
          if (with("passed on twice") && here) turns.close(p.ended + place);
        });
      }
      return;
    }
    const int wg = cta.warpgroup - 1;
    visitor turns(s.stile);
    each_visit([&](int tile, int place, bool here) {
      register_tile<float, columns> t;
      fill(t, p.values[2 * tile + wg]);
      tile_sums<float, false> sums(p.sums + (2 * place + wg) * 64 * columns);
      if (with("added before its turn") && here) sums.add(t);
      if (!(with("not entered") && here)) turns.enter();
      if (with("entered twice") && here) turns.enter();
      if (!(with("added before its turn") && here) && !(with("added after its turn") && here)) sums.add(t);
      if (!(with("not left") && here)) turns.leave();
      if (with("added after its turn") && here) sums.add(t);
    });
  }
};

void on_threads(int64_t count, void (*body)(void* context, int64_t index), void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; i++) threads.emplace_back(body, context, i);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

extern "C" const char* ordered_run(const char* name, unsigned seed, int threads, float* values, float* sums, int* ended) {
  tile_counter counter{};
  execution execution;
  execution.seed = seed;
  execution.parallel_for = threads ? &on_threads : nullptr;
  return launch<ordered>({&counter, values, sums, ended, {name}}, 3, execution);
}
