// Python's view of the plan and of the build, without torch and without a GPU. For explain(), build_info() and tests.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "attention/plan.h"
#include "kittens/cpu/features.h"

namespace py = pybind11;
using namespace kittens_torch;

namespace {

element_type type_named(const std::string& name) {
  if (name == "bfloat16") return element_type::bfloat16;
  if (name == "float16") return element_type::float16;
  if (name == "float32") return element_type::float32;
  if (name == "float64") return element_type::float64;
  throw std::invalid_argument("dtype must be bfloat16, float16, float32 or float64, got " + name);
}

machine_kind machine_named(const std::string& name) {
  if (name == "sm90") return machine_kind::sm90;
  if (name == "cpu") return machine_kind::cpu;
  throw std::invalid_argument("machine must be sm90 or cpu, got " + name);
}

kittens::cpu_flavour flavour_named(const std::string& name) {
  if (name.empty()) return kittens::fastest_cpu_flavour();
  for (int i = 0; i < kittens::cpu_flavours; i++)
    if (name == kittens::name(static_cast<kittens::cpu_flavour>(i))) return static_cast<kittens::cpu_flavour>(i);
  throw std::invalid_argument("cpu_features must be generic, avx2, avx512, amx or empty for this processor's, got " + name);
}

forward_plan forward(const std::string& machine, const std::string& dtype, int64_t batch, int64_t heads, int64_t heads_k, int64_t length_q,
                     int64_t length_k, int64_t head_dim, int64_t value_dim, int corner, int window_left, int window_right, int processors,
                     int configuration, const std::string& cpu_features, bool modified, bool sinks, bool softcap, int splits) {
  return plan_forward({machine_named(machine), type_named(dtype), batch, heads, heads_k, length_q, length_k, head_dim, value_dim, corner,
                       window_left, window_right, processors, flavour_named(cpu_features), modified, sinks, softcap},
                      configuration, splits);
}

backward_plan backward(const std::string& machine, const std::string& dtype, int64_t batch, int64_t heads, int64_t heads_k, int64_t length_q,
                       int64_t length_k, int64_t head_dim, int64_t value_dim, int corner, int window_left, int window_right, bool need_query,
                       bool need_keys, bool deterministic, int processors, int configuration, double scale) {
  return plan_backward({machine_named(machine), type_named(dtype), batch, heads, heads_k, length_q, length_k, head_dim, value_dim, corner,
                        window_left, window_right, processors},
                       {need_query, need_keys, deterministic, false, {}, scale}, configuration);
}

// The backward's table of a machine, row by row, as (head_dim, value_dim, block_q, block_k, stages).
py::list backward_configurations(const std::string& machine) {
  const bool sm90 = machine_named(machine) == machine_kind::sm90;
  py::list rows;
  for (int i = 0; i < (sm90 ? backward_count_sm90 : backward_count_cpu); i++) {
    const backward_row& r = sm90 ? backward_rows_sm90[i] : backward_rows_cpu[i];
    rows.append(py::make_tuple(r.head_dim, r.value_dim, r.block_q, r.block_k(), r.stages));
  }
  return rows;
}

// The configuration table of a machine, and on sm90 of a mask class, row by row, as (head_dim, value_dim, block_m, block_n, stages).
py::list configurations(const std::string& machine, bool modified, bool split) {
  const bool sm90 = machine_named(machine) == machine_kind::sm90;
  py::list rows;
  const auto add = [&](const auto& table) {
    for (const forward_row& r : table) rows.append(py::make_tuple(r.head_dim, r.value_dim, r.block_m, r.block_n, r.stages, r.takes_softcap));
  };
  if (split)
    sm90 ? add(forward_rows_sm90_split) : add(forward_rows_cpu_split);
  else if (!sm90)
    add(forward_rows_cpu);
  else
    modified ? add(forward_rows_sm90_modified) : add(forward_rows_sm90);
  return rows;
}

py::dict build() {
  py::list archs, features;
  std::string arch;
  for (const char c : std::string(KITTENS_ARCHS) + " ") {
    if (c != ' ') {
      arch += c;
    } else if (!arch.empty()) {
      archs.append(arch);
      arch.clear();
    }
  }
  for (int i = 0; i < kittens::cpu_flavours; i++)
    if (kittens::is_compiled(static_cast<kittens::cpu_flavour>(i))) features.append(kittens::name(static_cast<kittens::cpu_flavour>(i)));
  py::dict facts;
  facts["archs"] = archs;
  facts["cpu_features"] = features;
  facts["cpu_selected"] = kittens::name(kittens::fastest_cpu_flavour());
  facts["compiler"] = __VERSION__;
  facts["torch_headers"] = KITTENS_TORCH_HEADERS;
  facts["version"] = KITTENS_TORCH_VERSION;
  return facts;
}

}  // namespace

PYBIND11_MODULE(_plan, m) {
  m.doc() = "Which kernel a problem gets, and what was built.";
  py::class_<forward_plan>(m, "ForwardPlan")
      .def_property_readonly("kernel", [](const forward_plan& p) { return p.kernel; })
      .def_readonly("configuration", &forward_plan::configuration)
      .def_property_readonly("block_m", [](const forward_plan& p) { return p.row.block_m; })
      .def_property_readonly("block_n", [](const forward_plan& p) { return p.row.block_n; })
      .def_property_readonly("stages", [](const forward_plan& p) { return p.row.stages; })
      .def_property_readonly("consumers", [](const forward_plan& p) { return p.row.consumers(); })
      .def_readonly("shared_bytes", &forward_plan::shared_bytes)
      .def_readonly("grid", &forward_plan::grid)
      .def_readonly("heads_as_rows", &forward_plan::heads_as_rows)
      .def_readonly("splits", &forward_plan::splits)
      .def_readonly("workspace_values", &forward_plan::workspace_values)
      .def_readonly("prefer_torch", &forward_plan::prefer_torch)
      .def_property_readonly("reason", [](const forward_plan& p) { return p.reason; });
  m.def("forward", &forward, py::kw_only(), py::arg("machine"), py::arg("dtype"), py::arg("batch"), py::arg("heads"), py::arg("heads_k"),
        py::arg("length_q"), py::arg("length_k"), py::arg("head_dim"), py::arg("value_dim"), py::arg("corner"), py::arg("window_left"),
        py::arg("window_right"), py::arg("processors") = 132, py::arg("configuration") = -1, py::arg("cpu_features") = "",
        py::arg("modified") = false, py::arg("sinks") = false, py::arg("softcap") = false, py::arg("splits") = -1);
  m.def("configurations", &configurations, py::arg("machine"), py::arg("modified") = false, py::arg("split") = false);
  py::class_<backward_plan>(m, "BackwardPlan")
      .def_property_readonly("kernel", [](const backward_plan& p) { return p.kernel; })
      .def_readonly("configuration", &backward_plan::configuration)
      .def_property_readonly("block_q", [](const backward_plan& p) { return p.row.block_q; })
      .def_property_readonly("block_k", [](const backward_plan& p) { return p.row.block_k(); })
      .def_readonly("sums_query", &backward_plan::sums_query)
      .def_readonly("in_order", &backward_plan::in_order)
      .def_readonly("workspace_values", &backward_plan::workspace_values)
      .def_readonly("shared_bytes", &backward_plan::shared_bytes)
      .def_readonly("key_grid", &backward_plan::key_grid)
      .def_readonly("query_grid", &backward_plan::query_grid)
      .def_property_readonly("reason", [](const backward_plan& p) { return p.reason; });
  m.def("backward", &backward, py::kw_only(), py::arg("machine"), py::arg("dtype"), py::arg("batch"), py::arg("heads"), py::arg("heads_k"),
        py::arg("length_q"), py::arg("length_k"), py::arg("head_dim"), py::arg("value_dim"), py::arg("corner"), py::arg("window_left"),
        py::arg("window_right"), py::arg("need_query") = true, py::arg("need_keys") = true, py::arg("deterministic") = false,
        py::arg("processors") = 132, py::arg("configuration") = -1, py::arg("scale") = 1.0);
  m.def("backward_configurations", &backward_configurations, py::arg("machine"));
  m.def("build", &build);
}
