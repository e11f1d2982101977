// kittens_torch._direct: the forward op for an eager call without gradients, from Python to the launch without torch's dispatcher, whose way from
// Python and back takes longer than all else before the launch. DLPack's exchange functions, which torch's tensors offer from C, hand over what a
// tensor is. Plain CPython, of its limited API: one build for every Python >= 3.10.
#include <ATen/dlpack.h>
#include <Python.h>
#include <dlfcn.h>

#include <initializer_list>
#include <limits>

#include "bindings/direct.h"

namespace {

constexpr int most_questions = 8;

struct torch_functions {
  const DLPackExchangeAPI* exchange = nullptr;
  direct_forward forward = nullptr;
  direct_layout layout = nullptr;
  PyObject *tensor = nullptr, *parameter = nullptr;  // the types of plain tensors: what derives from them may be anything
  PyObject *empty_like = nullptr, *new_empty_strided = nullptr, *is_negative = nullptr, *requires_grad = nullptr;
  PyObject *gradients_are_on = nullptr, *autocasts = nullptr;
  PyObject* questions[most_questions];
  Py_ssize_t question_count = 0;
} from_torch;

PyObject* decline() {
  PyErr_Clear();
  Py_RETURN_NONE;
}

// Whether a call without arguments answers with something true, or fails.
bool says_yes(PyObject* answer) {
  const bool yes = !answer || PyObject_IsTrue(answer) != 0;
  Py_DecRef(answer);
  return yes;
}

// False for what no kernel takes, and for tensors without memory. The sizes and strides are the tensor's own.
bool describe(PyObject* tensor, direct_tensor& out) {
  const PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  if (type != from_torch.tensor && type != from_torch.parameter) return false;
  DLTensor t;
  if (from_torch.exchange->dltensor_from_py_object_no_sync(tensor, &t) != 0) return false;
  if (t.ndim != 4 || !t.data || !t.strides || (t.device.device_type != kDLCUDA && t.device.device_type != kDLCPU)) return false;
  out.cuda_device = t.device.device_type == kDLCUDA ? t.device.device_id : -1;
  out.data = static_cast<char*>(t.data) + t.byte_offset;
  out.sizes = t.shape;
  out.strides = t.strides;
  if (t.dtype.code == kDLBfloat && t.dtype.bits == 16) return out.type = direct_tensor::bfloat16, true;
  // The imaginary part of a conjugate is a tensor whose numbers are still to be negated.
  if (t.dtype.code != kDLFloat || says_yes(PyObject_CallFunctionObjArgs(from_torch.is_negative, tensor, nullptr))) return false;
  out.type = t.dtype.bits == 16 ? direct_tensor::float16 : t.dtype.bits == 32 ? direct_tensor::float32 : direct_tensor::float64;
  return t.dtype.bits >= 16;
}

PyObject* make_output(PyObject* query, const direct_tensor& q, const direct_tensor& v) {
  int64_t strides[4] = {};
  if (from_torch.layout(q, v, strides)) return PyObject_CallFunctionObjArgs(from_torch.empty_like, query, nullptr);
  const auto number = [](int64_t n) { return static_cast<long long>(n); };
  PyObject* arguments = Py_BuildValue("(O(LLLL)(LLLL))", query, number(q.sizes[0]), number(q.sizes[1]), number(q.sizes[2]), number(v.sizes[3]),
                                      number(strides[0]), number(strides[1]), number(strides[2]), number(strides[3]));
  PyObject* output = arguments ? PyObject_CallObject(from_torch.new_empty_strided, arguments) : nullptr;
  Py_DecRef(arguments);
  return output;
}

bool somebody_must_see_the_op() {
  for (Py_ssize_t i = 0; i < from_torch.question_count; i++)
    if (says_yes(PyObject_CallNoArgs(from_torch.questions[i]))) return true;
  return false;
}

// A scale of 0 stands for 1 / sqrt(head_dim).
PyObject* launch(PyObject* query, const direct_tensor (&tensors)[3], double scale, int64_t corner) {
  direct_tensor out;
  PyObject* output = make_output(query, tensors[0], tensors[2]);
  if (!output || !describe(output, out)) {
    Py_DecRef(output);
    return decline();
  }
  PyThreadState* state = PyEval_SaveThread();
  const bool launched = from_torch.forward(tensors[0], tensors[1], tensors[2], out, scale, corner);
  PyEval_RestoreThread(state);
  if (launched) return output;
  Py_DecRef(output);
  return decline();
}

// (query, key, value, scale or None, corner) -> output, or None where the op must be taken.
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, "forward takes query, key, value, scale and corner");
    return nullptr;
  }
  if (somebody_must_see_the_op()) return decline();
  direct_tensor tensors[3];
  for (int i = 0; i < 3; i++)
    if (!describe(arguments[i], tensors[i])) return decline();
  const double scale = arguments[3] == Py_None ? 0.0 : PyFloat_AsDouble(arguments[3]);
  const long long corner = PyLong_AsLongLong(arguments[4]);
  if (PyErr_Occurred()) return nullptr;
  return launch(arguments[0], tensors, scale, corner);
}

bool is_bool(PyObject* object) { return object == Py_True || object == Py_False; }

// The arguments of torch's scaled_dot_product_attention -> output, or None where more must be looked at: everything but the plain call on a GPU
// whose gradient nobody wants.
PyObject* drop_in(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 8) {
    PyErr_SetString(PyExc_TypeError, "drop_in takes query, key, value, attn_mask, dropout_p, is_causal, scale and enable_gqa");
    return nullptr;
  }
  PyObject *const mask = arguments[3], *const dropout_p = arguments[4], *const is_causal = arguments[5], *const given_scale = arguments[6],
                                      *const enable_gqa = arguments[7];
  const auto is_float = [](PyObject* object) { return Py_TYPE(object) == &PyFloat_Type; };
  if (mask != Py_None || !is_float(dropout_p) || PyFloat_AsDouble(dropout_p) != 0.0 || !is_bool(is_causal) || !is_bool(enable_gqa)) return decline();
  double scale = 0.0;
  if (given_scale != Py_None) {
    if (!is_float(given_scale)) return decline();
    scale = PyFloat_AsDouble(given_scale);
    if (!(scale >= std::numeric_limits<float>::min() && scale <= std::numeric_limits<float>::max())) return decline();
  }
  direct_tensor tensors[3];
  for (int i = 0; i < 3; i++)
    if (!describe(arguments[i], tensors[i]) || tensors[i].cuda_device < 0) return decline();
  const int64_t heads = tensors[0].sizes[1], heads_k = tensors[1].sizes[1];
  if (enable_gqa == Py_False && heads_k != heads && heads_k != 1) return decline();
  if (says_yes(PyObject_CallNoArgs(from_torch.gradients_are_on)))
    for (int i = 0; i < 3; i++)
      if (says_yes(PyObject_GetAttr(arguments[i], from_torch.requires_grad))) return decline();
  if (says_yes(PyObject_CallNoArgs(from_torch.autocasts)) || somebody_must_see_the_op()) return decline();
  return launch(arguments[0], tensors, scale, is_causal == Py_True);
}

template <class Function> bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) PyErr_Format(PyExc_ImportError, "the op library has no %s: reinstall kittens_torch", name);
  return function != nullptr;
}

// (path of the op library, torch.Tensor, torch.nn.Parameter, torch.empty_like, functions whose true answer says that somebody must see the op,
// torch.is_grad_enabled, a function that tells whether CUDA tensors are autocast)
PyObject* prepare(PyObject*, PyObject* arguments) {
  torch_functions found;
  const char* path = nullptr;
  PyObject *empty_like = nullptr, *questions = nullptr;
  if (!PyArg_ParseTuple(arguments, "sOOOO!OO", &path, &found.tensor, &found.parameter, &empty_like, &PyTuple_Type, &questions,
                        &found.gradients_are_on, &found.autocasts))
    return nullptr;
  PyObject* capsule = PyObject_GetAttrString(found.tensor, "__dlpack_c_exchange_api__");
  if (!capsule) return nullptr;
  found.exchange = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DecRef(capsule);  // the type keeps it
  if (!found.exchange) return nullptr;
  if (found.exchange->header.version.major != 1 || !found.exchange->dltensor_from_py_object_no_sync) {
    PyErr_SetString(PyExc_ImportError, "this torch's DLPack exchange functions are of another version");
    return nullptr;
  }
  void* library = dlopen(path, RTLD_NOLOAD | RTLD_LAZY);
  if (!library) {
    PyErr_Format(PyExc_ImportError, "%s is not loaded", path);
    return nullptr;
  }
  if (!find(library, KITTENS_DIRECT_FORWARD, found.forward) || !find(library, KITTENS_DIRECT_LAYOUT, found.layout)) return nullptr;
  found.question_count = PyTuple_Size(questions);
  if (found.question_count > most_questions) {
    PyErr_SetString(PyExc_ValueError, "too many questions");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < found.question_count; i++) Py_IncRef(found.questions[i] = PyTuple_GetItem(questions, i));
  found.empty_like = empty_like;
  found.new_empty_strided = PyObject_GetAttrString(found.tensor, "new_empty_strided");
  found.is_negative = PyObject_GetAttrString(found.tensor, "is_neg");
  found.requires_grad = PyUnicode_InternFromString("requires_grad");
  if (!found.new_empty_strided || !found.is_negative || !found.requires_grad) return nullptr;
  for (PyObject* kept : {found.tensor, found.parameter, found.empty_like, found.gradients_are_on, found.autocasts}) Py_IncRef(kept);
  from_torch = found;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&forward)), METH_FASTCALL,
     "forward(query, key, value, scale, corner): the output, or None where the op must be taken"},
    {"drop_in", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&drop_in)), METH_FASTCALL,
     "drop_in(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa): the output, or None where more must be looked at"},
    {"prepare", &prepare, METH_VARARGS, "prepare(library, torch.Tensor, torch.nn.Parameter, torch.empty_like, questions, is_grad_enabled, autocasts)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_direct", "The forward op without torch's dispatcher; see ops.py.", -1, methods, nullptr, nullptr,
                      nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__direct() { return PyModule_Create(&module); }
