// A torch tensor as the operators see it. Whatever is asked of torch is a call through its stable ABI, so what every check and every plan asks is
// read once, and a tensor is the owner of its handle alone: torch::stable::Tensor asks anew each time and shares its handle.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <utility>

namespace kittens_torch {

using shape4 = std::array<int64_t, 4>;

class Tensor {
 public:
  using ScalarType = torch::headeronly::ScalarType;

  Tensor() = default;  // none: only to be assigned to
  // Takes the handle over.
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {
    int64_t *sizes = nullptr, *strides = nullptr;
    int32_t type = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device_type_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &device_index_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data_));
    for (int d = 0; d < dim_ && d < 4; d++) {
      sizes_[d] = sizes[d];
      strides_[d] = strides[d];
    }
    type_ = type_of(type);
  }
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    data_ = other.data_;
    dim_ = other.dim_;
    sizes_ = other.sizes_;
    strides_ = other.strides_;
    type_ = other.type_;
    device_type_ = other.device_type_;
    device_index_ = other.device_index_;
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }
  // To whoever owns it from here on.
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  // For operations that torch's headers offer, where they are rare.
  torch::stable::Tensor shared() const {
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle_, &handle));
    return torch::stable::Tensor(handle);
  }

  void* data_ptr() const { return data_; }
  int64_t dim() const { return dim_; }
  // Of the first four dimensions.
  int64_t size(int64_t d) const { return sizes_[d]; }
  int64_t stride(int64_t d) const { return strides_[d]; }
  const shape4& sizes() const { return sizes_; }
  const shape4& strides() const { return strides_; }
  ScalarType scalar_type() const { return type_; }
  int32_t device_type() const { return device_type_; }
  int32_t get_device_index() const { return device_index_; }
  bool is_cuda() const { return device_type_ == aoti_torch_device_type_cuda(); }
  bool is_on_device_of(const Tensor& other) const { return device_type_ == other.device_type_ && device_index_ == other.device_index_; }
  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < dim_ && d < 4; d++) n *= sizes_[d];
    return n;
  }

 private:
  // torch's own numbers of dtypes may change. The usual ones first: each is a call.
  static ScalarType type_of(int32_t code) {
    if (code == aoti_torch_dtype_bfloat16()) return ScalarType::BFloat16;
    if (code == aoti_torch_dtype_float16()) return ScalarType::Half;
    if (code == aoti_torch_dtype_float32()) return ScalarType::Float;
    return torch::stable::detail::to<ScalarType>(torch::stable::detail::from(code));
  }

  AtenTensorHandle handle_ = nullptr;
  void* data_ = nullptr;
  int64_t dim_ = 0;
  shape4 sizes_{}, strides_{};
  ScalarType type_ = ScalarType::Undefined;
  int32_t device_type_ = 0, device_index_ = 0;
};

inline void copy(const Tensor& to, const Tensor& from) { TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(to.get(), from.get(), 0)); }
inline void zero(const Tensor& t) { TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(t.get())); }

}  // namespace kittens_torch
