// FlashAttention backward: dQ, dK, dV of output = softmax(scale * Q K^T, over the visible keys) V and of its logsumexp.
//
// With P = exp(scale S - logsumexp), S = Q K^T: dV = P^T dO, dP = dO V^T, dS = P (dP - delta), dQ = scale dS K, dK = scale dS^T Q, where
// delta = rowsum(dO * O) - dlogsumexp (Dao et al., FlashAttention, appendix B).
//
//   backward_prepare (backward_rows.cuh)          delta and the logsumexp in base 2, one value a row
//   backward_keys_kernel, backward_roles_kernel   dK and dV: a CTA owns keys and walks the queries that see them
//   backward_query_kernel                         dQ: a CTA owns queries and walks the keys they see
//   backward_finish (backward_rows.cuh)           or dQ that backward_keys_kernel has summed on its way, from its sums
//   backward_bias_kernel                          dbias, in the modified class (modifiers.h): a CTA owns a tile of it
#pragma once
#include "backward_bias.cuh"
#include "backward_keys.cuh"
#include "backward_query.cuh"
#include "backward_roles.cuh"
#include "backward_rows.cuh"
