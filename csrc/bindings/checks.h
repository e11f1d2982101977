// One way to refuse: a Python RuntimeError whose text names the argument, its value and what is allowed.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <sstream>
#include <string>

namespace kittens_torch {

template <class... Parts> std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// Throws with the parts joined unless the condition holds.
template <class... Parts> void check(bool condition, const Parts&... parts) {
  if (!condition) throw std::runtime_error(text("kittens_torch: ", parts...));
}

inline std::string shape_text(const torch::stable::Tensor& t) {
  std::string s = "(";
  for (int64_t i = 0; i < t.dim(); i++) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + ")";
}

}  // namespace kittens_torch
