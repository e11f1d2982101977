// From torch's boxed calling convention to a function over our tensors, as TORCH_BOX does for torch's.
#pragma once
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "checks.h"

namespace kittens_torch {

template <class T> T unbox(StableIValue value) {
  using torch::stable::detail::to;
  if constexpr (std::is_same_v<T, Tensor>) {
    return Tensor(to<AtenTensorHandle>(value));
  } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
    const auto handle = to<std::optional<AtenTensorHandle>>(value);
    return handle ? T(std::in_place, *handle) : T();
  } else {
    return to<T>(value);
  }
}

template <auto Function> struct boxed;

template <class... Results, class... Arguments, std::tuple<Results...> (*Function)(Arguments...)> struct boxed<Function> {
  template <size_t... I, size_t... J>
  static void call_with(StableIValue* stack, std::index_sequence<I...>, std::index_sequence<J...>) {
    std::tuple<std::remove_cvref_t<Arguments>...> arguments{unbox<std::remove_cvref_t<Arguments>>(stack[I])...};
    std::tuple<Results...> results = std::apply(Function, arguments);
    ((stack[J] = torch::stable::detail::from(std::get<J>(results).release())), ...);
  }
  static void call(StableIValue* stack, uint64_t arguments, uint64_t results) {
    check(arguments == sizeof...(Arguments) && results == sizeof...(Results), "a schema and its function differ in their arguments");
    call_with(stack, std::index_sequence_for<Arguments...>{}, std::index_sequence_for<Results...>{});
  }
};

}  // namespace kittens_torch
