// The kernels of the tests by name, and how they are launched. A name is its kernel's, then the element type and the
// sizes: "mma_AB_shared bf16 80 128".
#pragma once
#include <initializer_list>
#include <string>
#include <vector>

#include "../../csrc/kittens/tutorial/gemm.cuh"
#include "gradient_kernels.h"
#include "mask_kernels.h"
#include "rider_kernels.h"
#include "pipeline_kernels.h"
#include "product_kernels.h"
#include "term_kernels.h"
#include "turnstile_kernels.h"
#include "weight_kernels.h"

namespace kittens_tests {
inline namespace KITTENS_MACHINE {

using launcher = const char* (*)(const arguments&, int grid, const execution&);

template <class Kernel> const char* launch_test(const arguments& a, int grid, const execution& execution) {
  typename Kernel::params params;
  params.a = a;
  const char* error = params.prepare();
  return error ? error : launch<Kernel>(params, grid, execution);
}

// Tensors 0, 1 and 2 are A, B and C; `grid` is the number of processors.
template <class T> const char* launch_gemm(const arguments& a, int grid, const execution& execution) {
  const auto &left = a.tensors[0], &right = a.tensors[1];
  return kittens_tutorial::launch_gemm<T>(left.data, right.data, a.tensors[2].data, static_cast<int>(left.size[2]),
                                          static_cast<int>(right.size[3]), static_cast<int>(left.size[3]), grid,
                                          execution);
}

template <class T> const char* type_name() {
  return std::is_same_v<T, bf16>    ? "bf16"
         : std::is_same_v<T, fp16>  ? "fp16"
         : std::is_same_v<T, float> ? "float"
                                    : "double";
}

struct shape {
  int n, k;
};

class kernel_list {
 public:
  struct entry {
    std::string name;
    launcher launch;
  };
  const std::vector<entry>& entries() const { return entries_; }

  // What has an element type. The shapes of bf16 cover every width of the instruction, with A in shared memory and in
  // registers, and all three swizzles of both operands in both majors.
  template <class T> void add_all() {
    if constexpr (std::is_same_v<T, bf16>) {
      add_products<T, shape{16, 16}, shape{32, 48}, shape{64, 64}, shape{80, 96}, shape{160, 32}, shape{192, 128}>();
      add_main_products<T, shape{48, 32}, shape{96, 80}, shape{112, 128}, shape{128, 16}, shape{176, 64},
                        shape{224, 48}, shape{256, 64}>();
      add_shared_products<T, shape{64, 192}, shape{128, 256}, shape{256, 128}>();
      add_copies<T, shape{64, 64}, shape{128, 128}, shape{64, 96}, shape{128, 32}, shape{192, 16}, shape{64, 48},
                 shape{128, 80}, shape{64, 256}, shape{256, 64}>();
      add_stores<T, 16, 32, 48, 64, 80, 96, 128, 192, 256>();
      add<convert_kernel<T, 64, 256, 64>>("convert", type_name<T>(), {64, 256, 64});
      add<convert_kernel<T, 48, 80, 32>>("convert", type_name<T>(), {48, 80, 32});
      add<convert_kernel<T, 16, 96, 8>>("convert", type_name<T>(), {16, 96, 8});
      add_transposed<T, 80, 48, 80, 96>();
      add_transposed<T, 96, 32, 96, 128>();
      add_transposed<T, 192, 128, 192, 64>();
      add<exchange_kernel<T, 64>>("exchange", type_name<T>(), {64});
      add<exchange_kernel<T, 96>>("exchange", type_name<T>(), {96});
      add<ring_kernel<T, 2>>("ring", type_name<T>(), {2});
      add<ring_kernel<T, 3>>("ring", type_name<T>(), {3});
      add<exp2_kernel<T, 16>>("exp2_into", type_name<T>(), {16});
    } else {
      add_products<T, shape{48, 48}, shape{128, 64}>();
      add_copies<T, shape{64, 32}, shape{64, 80}, shape{128, 64}>();
      add_stores<T, 32, 80, 128>();
      add<convert_kernel<T, 48, 80, 16>>("convert", type_name<T>(), {48, 80, 16});
      add_transposed<T, 128, 64, 128, 80>();
    }
    add<exchange_kernel<T, 128>>("exchange", type_name<T>(), {128});
    add<ring_kernel<T, 4>>("ring", type_name<T>(), {4});
    add<load_kernel<T, 80>>("load", type_name<T>(), {80});
    add<load_kernel<T, 128>>("load", type_name<T>(), {128});
    add<exp2_kernel<T, 80>>("exp2_into", type_name<T>(), {80});
    add<exp2_kernel<T, 128>>("exp2_into", type_name<T>(), {128});
    add<odd_kernel<T, 80>>("odd", type_name<T>(), {80});
    add<odd_kernel<T, 128>>("odd", type_name<T>(), {128});
    add<drop_kernel<T, 64>>("keep_drawn", type_name<T>(), {64});
    add<drop_kernel<T, 128>>("keep_drawn", type_name<T>(), {128});
    add<rider_kernel<T, 64>>("riders", type_name<T>(), {64});
    add<rider_kernel<T, 128>>("riders", type_name<T>(), {128});
    add<zero_kernel<T, 64>>("zero_rows", type_name<T>(), {64});
    add<zero_kernel<T, 80>>("zero_rows", type_name<T>(), {80});
    add<signed_kernel<T, 64>>("signed", type_name<T>(), {64});
    add<signed_kernel<T, 96>>("signed", type_name<T>(), {96});
    add<finite_kernel<T, 64>>("finite", type_name<T>(), {64});
    add<finite_kernel<T, 80>>("finite", type_name<T>(), {80});
    add<finite_kernel<T, 128>>("finite", type_name<T>(), {128});
    if constexpr (std::is_same_v<accumulator<T>, float>) {
      add<term_kernel<T, 64>>("terms", type_name<T>(), {64});
      add<term_kernel<T, 128>>("terms", type_name<T>(), {128});
    }
    add<scalar_kernel<T>>("scalars", type_name<T>(), {});
    add("gemm", type_name<T>(), {}, &launch_gemm<T>);
  }

  // What depends on the type of the sums alone.
  template <class Real> void add_of_real() {
    add_of_width<Real, 8, 24, 80, 128, 192>();
    add_keeping<Real, 8, 80, 96, 128>();
    add<hide_kernel<Real, 32>>("hide", type_name<Real>(), {32});
    add<hide_kernel<Real, 64>>("hide", type_name<Real>(), {64});
    add<hide_kernel<Real, 128>>("hide", type_name<Real>(), {128});
    add<column_sum_kernel<Real, 64>>("column_sums", type_name<Real>(), {64});
    add<column_sum_kernel<Real, 80>>("column_sums", type_name<Real>(), {80});
    add<vector_kernel<Real>>("vectors", type_name<Real>(), {});
    add<column_kernel<Real, 64>>("map_columns", type_name<Real>(), {64});
    add<column_kernel<Real, 80>>("map_columns", type_name<Real>(), {80});
    add<weight_kernel<Real, 64>>("weights", type_name<Real>(), {64});
    add<weight_kernel<Real, 80>>("weights", type_name<Real>(), {80});
    add<sum_kernel<Real, 64>>("sums", type_name<Real>(), {64});
    add<sum_kernel<Real, 80>>("sums", type_name<Real>(), {80});
    add<turnstile_kernel<Real, 64>>("turnstile", type_name<Real>(), {64});
    add<turnstile_kernel<Real, 128>>("turnstile", type_name<Real>(), {128});
    add<part_kernel<Real, 64, 32>>("parts", type_name<Real>(), {64, 32});
    add<part_kernel<Real, 128, 128>>("parts", type_name<Real>(), {128, 128});
    add<part_kernel<Real, 192, 8>>("parts", type_name<Real>(), {192, 8});
  }

  // What has no element type.
  void add_pipelines() {
    add<mail_kernel>("mail", "int", {});
    add<turn_kernel<true>>("turns_named", "int", {});
    add<turn_kernel<false>>("turns_mbarrier", "int", {});
  }

 private:
  template <class Kernel> void add(const char* kernel, const char* type, std::initializer_list<int> sizes) {
    add(kernel, type, sizes, &launch_test<Kernel>);
  }
  void add(const char* kernel, const char* type, std::initializer_list<int> sizes, launcher launch) {
    std::string name = std::string(kernel) + " " + type;
    for (const int size : sizes) name += " " + std::to_string(size);
    entries_.push_back({name, launch});
  }
  template <product P, left L, class T, shape... Shapes> void add_product(const char* kernel) {
    (add<product_kernel<P, L, T, Shapes.n, Shapes.k>>(kernel, type_name<T>(), {Shapes.n, Shapes.k}), ...);
  }
  template <class T, shape... Shapes> void add_shared_products() {
    add_product<product::ABt, left::shared, T, Shapes...>("mma_ABt_shared");
    add_product<product::AB, left::shared, T, Shapes...>("mma_AB_shared");
    add_product<product::AtB, left::shared, T, Shapes...>("mma_AtB");
  }
  template <class T, shape... Shapes> void add_main_products() {
    add_product<product::ABt, left::shared, T, Shapes...>("mma_ABt_shared");
    add_product<product::AB, left::registers, T, Shapes...>("mma_AB_registers");
  }
  template <class T, shape... Shapes> void add_products() {
    add_shared_products<T, Shapes...>();
    add_product<product::ABt, left::registers, T, Shapes...>("mma_ABt_registers");
    add_product<product::AB, left::registers, T, Shapes...>("mma_AB_registers");
  }
  // Columns of both operands: A is K x WidthA, B is K x WidthB.
  template <class T, int WidthA, int N, int WidthB, int K> void add_transposed() {
    add<product_kernel<product::AtB, left::shared, T, N, K, WidthA, WidthB>>("mma_AtB_columns", type_name<T>(),
                                                                             {N, K, WidthA, WidthB});
  }
  template <class T, shape... Shapes> void add_copies() {
    (add<copy_kernel<T, Shapes.n, Shapes.k>>("copy", type_name<T>(), {Shapes.n, Shapes.k}), ...);
  }
  template <class T, int... Columns> void add_stores() {
    (add<store_kernel<T, Columns>>("store", type_name<T>(), {Columns}), ...);
  }
  template <class Real, int... Columns> void add_keeping() {
    (add<keep_kernel<Real, Columns>>("keep_columns", type_name<Real>(), {Columns}), ...);
  }
  template <class Real, int... Columns> void add_of_width() {
    (add<map_kernel<Real, Columns>>("map", type_name<Real>(), {Columns}), ...);
    (add<row_kernel<Real, Columns>>("rows", type_name<Real>(), {Columns}), ...);
  }

  std::vector<entry> entries_;
};

}  // namespace KITTENS_MACHINE
}  // namespace kittens_tests
