// A mask is a key interval: row i sees the keys first_key(i) <= j < end_key(i). Causal (both corners), sliding window and key length are all of
// this form. Plain host/device arithmetic.
#pragma once
#include "../kittens/core/defines.h"

namespace kittens_torch {

// What decides whether a row sees a key, and its score: nothing, a key interval, or an interval with score_modifiers (modifiers.h).
enum class mask_class : int { full, interval, modified };

inline constexpr int window_open = 1 << 30;  // farther than any length the operators accept

struct interval_mask {
  int length_k;     // keys from the first one that a row sees to the last one
  int left, right;  // row i sees i - left <= j <= i + right; window_open where that side has no limit
  int start = 0;    // where key 0 lies among the caller's keys: those before it, no row sees

  KITTENS_HOST_DEVICE int first_key(int row) const {
    const int first = row - left;
    return first > 0 ? first : 0;
  }
  KITTENS_HOST_DEVICE int end_key(int row) const {
    const int end = row + right + 1;
    return end < length_k ? end : length_k;
  }
  KITTENS_HOST_DEVICE bool visible(int row, int key) const { return key >= first_key(row) && key < end_key(row); }
};

// corner: 0 none, 1 upper_left (the diagonal starts at query 0, key 0), 2 lower_right (it ends at the last query, last key).
// A window counts keys left and right of the diagonal, -1 is open. Without a corner the diagonal is the lower right one.
inline interval_mask make_interval(int corner, int window_left, int window_right, int length_q, int length_k) {
  const int offset = corner == 1 ? 0 : length_k - length_q;
  interval_mask mask{length_k, window_open, window_open};
  if (window_left >= 0 && window_left < window_open / 2) mask.left = window_left - offset;
  if (window_right >= 0 && window_right < window_open / 2) mask.right = window_right + offset;
  if (corner != 0 && mask.right > offset) mask.right = offset;
  // Keys that no row sees do not exist: what lies there (NaN included) is never loaded.
  if (length_q > 0) {
    const int end = mask.end_key(length_q - 1), first = mask.first_key(0);
    mask.length_k = end > first ? end - first : 0;
    if (first > 0) {  // only a window whose left side is closed begins late
      mask.start = first;
      mask.left += first;
      if (mask.right != window_open) mask.right -= first;
    }
  }
  return mask;
}

// The same mask by the caller's keys: the first `start` of them are there, and no row sees them.
inline interval_mask with_every_key(const interval_mask& mask) {
  interval_mask whole{mask.length_k + mask.start, mask.left, mask.right};
  if (mask.start > 0) {
    whole.left -= mask.start;
    if (mask.right != window_open) whole.right += mask.start;
  }
  return whole;
}

inline bool is_open(const interval_mask& mask) { return mask.left == window_open && mask.right == window_open; }

}  // namespace kittens_torch
