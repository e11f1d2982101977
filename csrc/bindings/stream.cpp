// torch's current stream, asked of libtorch_cuda at run time: this library also loads where torch is built without CUDA.
#include <dlfcn.h>

#include "machine.h"

#ifdef KITTENS_CUDA

namespace kittens_torch {

void* current_stream(int device) {
  using getter = AOTITorchError (*)(int32_t, void**);
  // torch loads its libraries RTLD_LOCAL, so the default search finds nothing: take the handle of the one already loaded.
  static const getter get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library ? reinterpret_cast<getter>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  check(get != nullptr, "this torch has CUDA tensors but no aoti_torch_get_current_cuda_stream: torch >= 2.11 with CUDA is needed");
  void* stream = nullptr;
  check(get(device, &stream) == AOTI_TORCH_SUCCESS, "torch did not give the current stream of device ", device);
  return stream;
}

}  // namespace kittens_torch

#endif
