// Which steps of a tile of keys a bool mask leaves, where it is all that modifies the scores: a thread of its own looks at the classes of tiles and
// tells the thread that loads. Both in one thread take more registers than the 24 that the producer's warpgroup has beside consumers of 240.
#pragma once
#include "backward_modifiers.cuh"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

// The thread that loads hears of each step.
template <class C, bool = C::mask_alone> struct backward_found {
  KITTENS_INLINE backward_found(auto&) {}
};
template <class C> struct backward_found<C, true> : kittens::receiver<backward_mask_note, 2> {
  KITTENS_INLINE backward_found(auto& s) : kittens::receiver<backward_mask_note, 2>(s.found.tile) {}
};

template <class C, class Shared> struct backward_scout {
  static KITTENS_KERNEL void run(const backward_key_params<C>& p, Shared& s) {
    kittens::receiver mail(s.mail);
    kittens::sender found(s.found.tile);
    KITTENS_NO_UNROLL while (mail.wait().key >= 0) {
      look(p, mail.current(), found);
      mail.release();
    }
  }

 private:
  static constexpr int tiles_of_step = C::block_q / class_tile, steps_of_word = 4 / tiles_of_step;
  static constexpr unsigned nothing = backward_note::is_last;

  // A step is told when it is known whether another one comes.
  static KITTENS_INLINE void look(const backward_key_params<C>& p, const backward_key_work<C>& w, auto& found) {
    const tile_classes& classes = p.rules.classes;
    int head = w.head * p.group, block = 0, jump = p.sum_step;
    unsigned flags = nothing;
    KITTENS_NO_UNROLL for (int n = 0; n < p.group; n++) {
      const unsigned char* of = classes.of_keys(w.batch, w.head * p.group + n, w.key);
      KITTENS_NO_UNROLL for (int i = 0; i < p.steps; i += steps_of_word) {
        // Four classes at once. Of each byte bit 0: a pair is seen; bits 2 and 3: the keys of the first and of the second consumer have hidden pairs.
        const int at = classes.row_tiles == 1 ? 0 : i * tiles_of_step;
        const uint32_t first = *reinterpret_cast<const uint32_t*>(of + at), second = *reinterpret_cast<const uint32_t*>(of + at + classes.key_step());
        uint32_t what = ((first | second) & 0x01010101u * tile_shows) | (first & 0x01010101u * tile_hides) << 1 | (second & 0x01010101u * tile_hides) << 2;
        if (classes.row_tiles == 1) what = (what & 0xFF) * 0x01010101u;
        if (!(what & 0x01010101u)) continue;
        if (tiles_of_step == 2) what |= what >> 8;
        KITTENS_NO_UNROLL for (int k = i; k < i + steps_of_word && k < p.steps; k++, what >>= 8 * tiles_of_step) {
          if (!(what & 1)) continue;
          if (flags != nothing) {
            found.make(head, block, flags, jump);
            jump = 0;
          }
          jump += ((w.head * p.group + n - head) * p.steps + k - block) * p.sum_step;
          head = w.head * p.group + n;
          block = k;
          flags = what >> 2 & 3;
        }
      }
    }
    // One step is taken in any case, though it be hidden as a whole.
    found.make(head, block, flags == nothing ? 3 | backward_note::is_last : flags | backward_note::is_last, jump);
  }
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
