// Backward of group normalization, given the mean and rstd that the forward pass used; a group g
// has C / G channels:
//
//   xhat[n, c, s] = (x[n, c, s] - mean[n, g]) * rstd[n, g]
//   grad_bias[c] = sum_ns grad_out[n, c, s]
//   grad_weight[c] = sum_ns grad_out[n, c, s] * xhat[n, c, s]
//   a[n, g] = sum_(c in g, s) weight[c] * grad_out[n, c, s] / (C / G S)
//   b[n, g] = sum_(c in g, s) weight[c] * grad_out[n, c, s] * xhat[n, c, s] / (C / G S)
//   grad_x[n, c, s] = rstd[n, g] * (weight[c] * grad_out[n, c, s] - a[n, g]
//                                   - xhat[n, c, s] * b[n, g])
//
// Arrays: channel_args.cuh; kernels, launch and precision: group_gradient.cuh.
#include "group_gradient.cuh"
