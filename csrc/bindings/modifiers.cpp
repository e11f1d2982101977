#include "modifiers.h"

#include "../attention/dropout.h"
#include "machine.h"

namespace kittens_torch {
namespace {

using torch::headeronly::ScalarType;

// On the query's device, of one of two types.
void check_tensor(const char* name, const Tensor& t, const Tensor& query, int64_t least_dims, int64_t most_dims, ScalarType type,
                  ScalarType other_type, const char* types) {
  check(t.dim() >= least_dims && t.dim() <= most_dims, name, " must have ", least_dims, least_dims == most_dims ? "" : " or 2",
        " dimensions, got ", t.dim());
  check(t.scalar_type() == type || t.scalar_type() == other_type, name, ": its dtype must be ", types);
  check(t.is_on_device_of(query), name, " must be on the device of the query");
}

// Strides over (batch, head, row, key): 0 where the tensor has one for all.
void broadcast_strides(const char* name, const Tensor& t, const Tensor& query, const Tensor& key, int64_t (&strides)[4]) {
  const int64_t whole[4] = {query.size(0), query.size(1), query.size(2), key.size(2)};
  for (int d = 0; d < 4; d++) {
    check(t.size(d) == 1 || t.size(d) == whole[d], name, " ", shape_text{t}, " must broadcast to (", whole[0], ", ", whole[1], ", ", whole[2], ", ",
          whole[3], "): its size ", t.size(d), " in dimension ", d, " must be 1 or ", whole[d]);
    strides[d] = t.size(d) == 1 ? 0 : t.stride(d);
  }
}

}  // namespace

score_modifiers modifiers_of(const modifier_inputs& inputs, const Tensor& query, const Tensor& key) {
  const bool exact = query.scalar_type() == ScalarType::Double;
  const ScalarType real = exact ? ScalarType::Double : ScalarType::Float;
  const char* real_name = exact ? "float64" : "float32";
  score_modifiers m;
  m.diagonal = static_cast<int>(key.size(2) - query.size(2));
  if (inputs.mask) {
    check_tensor("mask", *inputs.mask, query, 4, 4, ScalarType::Bool, ScalarType::Bool, "bool");
    broadcast_strides("mask", *inputs.mask, query, key, m.mask_stride);
    m.mask = static_cast<const unsigned char*>(inputs.mask->data_ptr());
  }
  if (inputs.bias) {
    check_tensor("bias", *inputs.bias, query, 4, 4, real, query.scalar_type(), exact ? "float64" : "float32 or the query's");
    broadcast_strides("bias", *inputs.bias, query, key, m.bias_stride);
    m.bias = inputs.bias->data_ptr();
    m.bias_is_real = inputs.bias->scalar_type() == real;
  }
  if (inputs.key_lengths) {
    const Tensor& t = *inputs.key_lengths;
    check_tensor("key_lengths", t, query, 1, 1, ScalarType::Int, ScalarType::Int, "int32");
    check(t.size(0) == query.size(0) && (t.size(0) <= 1 || t.stride(0) == 1), "key_lengths ", shape_text{t},
          " must be one contiguous number for each of ", query.size(0), " batches");
    m.key_lengths = static_cast<const int*>(t.data_ptr());
  }
  if (inputs.alibi_slopes) {
    const Tensor& t = *inputs.alibi_slopes;
    check_tensor("alibi_slopes", t, query, 1, 2, real, real, real_name);
    check(t.size(t.dim() - 1) == query.size(1) && (t.dim() == 1 || t.size(0) == query.size(0)), "alibi_slopes ", shape_text{t}, " must be (",
          query.size(1), ") or (", query.size(0), ", ", query.size(1), ")");
    m.alibi_slopes = t.data_ptr();
    m.alibi_stride[0] = t.dim() == 2 ? t.stride(0) : 0;
    m.alibi_stride[1] = t.stride(t.dim() - 1);
  }
  if (inputs.sinks) {
    const Tensor& t = *inputs.sinks;
    check_tensor("sinks", t, query, 1, 1, real, real, real_name);
    check(t.size(0) == query.size(1), "sinks ", shape_text{t}, " must be (", query.size(1), "), one for each head of the query");
    m.sinks = t.data_ptr();
    m.sink_stride = t.stride(0);
  }
  check(inputs.dropout_p >= 0 && inputs.dropout_p < 1, "dropout_p must be at least 0 and below 1, got ", inputs.dropout_p);
  if (inputs.dropout_p > 0) {
    check(inputs.dropout_state != nullptr, "dropout_p ", inputs.dropout_p, " needs a dropout_state");
    const Tensor& t = *inputs.dropout_state;
    check_tensor("dropout_state", t, query, 1, 1, ScalarType::Long, ScalarType::Long, "int64");
    check(t.size(0) == 2 && t.stride(0) == 1, "dropout_state ", shape_text{t}, " must be (2), contiguous: seed and offset");
    m.dropout_state = static_cast<const int64_t*>(t.data_ptr());
    m.dropout_threshold = dropout_threshold(inputs.dropout_p);
    m.keep_scale = dropout_keep_scale(m.dropout_threshold);
  }
  check(std::isfinite(inputs.softcap) && inputs.softcap >= 0, "softcap must be finite and not negative, got ", inputs.softcap);
  m.softcap = inputs.softcap;
  return m;
}

classified_mask classify_mask(const score_modifiers& modifiers, const modifier_inputs& inputs, const interval_mask& visible, const Tensor& query,
                              const Tensor& key, const kittens::execution& execution) {
  classified_mask known;
  if (!modifiers.mask) return known;
  const auto size_of = [&](int d) { return modifiers.mask_stride[d] == 0 ? 1 : static_cast<int>(inputs.mask->size(d)); };
  mask_to_classify m{modifiers.mask, {}, size_of(0), size_of(1), size_of(2), static_cast<int>(key.size(2)), visible};
  for (int d = 0; d < 4; d++) m.stride[d] = modifiers.mask_stride[d];
  if (m.rows == 1) m.visible = {m.keys, window_open, window_open};

  tile_classes& classes = known.classes;
  classes.batch_planes = m.batch > 1 ? m.heads : 0;
  classes.head_planes = m.heads > 1 ? 1 : 0;
  classes.row_tiles = (m.rows + class_tile - 1) / class_tile;
  classes.key_tiles = (m.keys + class_tile - 1) / class_tile;
  const int64_t planes = int64_t(m.batch) * m.heads, strips = planes * classes.row_tiles;
  const bool is_known = inputs.mask_tiles && inputs.mask_ranges && inputs.mask_seen;
  const int64_t seen = m.rows == 1 ? 0 : planes * m.keys;
  const auto memory = [&](const char* name, const Tensor* given, ScalarType type, int64_t count, Tensor& made) -> void* {
    if (!is_known) return (made = empty_contiguous({count}, type, query)).data_ptr();
    check_tensor(name, *given, query, 1, 1, type, type, type == ScalarType::Int ? "int32" : "uint8");
    check(given->size(0) == count && (count <= 1 || given->stride(0) == 1), name, " ", shape_text{*given}, " must be (", count,
          "), contiguous: of another mask?");
    return given->data_ptr();
  };
  classes.tiles = static_cast<unsigned char*>(memory("mask_tiles", inputs.mask_tiles, ScalarType::Byte, planes * classes.plane_bytes(), known.tiles));
  classes.transposed = classes.tiles + planes * classes.plane_bytes() / 2;
  classes.ranges = static_cast<tile_range*>(memory("mask_ranges", inputs.mask_ranges, ScalarType::Int, strips * 2, known.ranges));
  void* seen_bytes = memory("mask_seen", inputs.mask_seen, ScalarType::Byte, seen, known.seen);
  if (m.rows == 1) {
    classes.seen = const_cast<unsigned char*>(m.mask);
    classes.seen_stride[0] = m.stride[0];
    classes.seen_stride[1] = m.stride[1];
    classes.seen_stride[2] = m.stride[3];
  } else {
    if (!is_known) zero(known.seen);
    classes.seen = static_cast<unsigned char*>(seen_bytes);
    classes.seen_stride[0] = int64_t(classes.batch_planes) * m.keys;
    classes.seen_stride[1] = int64_t(classes.head_planes) * m.keys;
    classes.seen_stride[2] = 1;
  }
  if (is_known || strips * m.keys == 0) return known;
  const char* error = nullptr;
#ifdef KITTENS_CUDA
  error = query.is_cuda() ? classify_tiles_sm90(m, classes, execution) : classify_tiles_cpu(m, classes, execution);
#else
  error = classify_tiles_cpu(m, classes, execution);
#endif
  check(error == nullptr, "mask: ", error ? error : "");
  return known;
}

}  // namespace kittens_torch
