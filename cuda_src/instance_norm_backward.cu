// Backward of instance normalization, given the mean and rstd that the forward pass used:
//
//   xhat[n, c, s] = (x[n, c, s] - mean[n, c]) * rstd[n, c]
//   grad_bias[c] = sum_ns grad_out[n, c, s]
//   grad_weight[c] = sum_ns grad_out[n, c, s] * xhat[n, c, s]
//   grad_x[n, c, s] = weight[c] * rstd[n, c] * (grad_out[n, c, s] - sum_s grad_out[n, c, s] / S
//                                  - xhat[n, c, s] * sum_s grad_out[n, c, s] * xhat[n, c, s] / S)
//
// Group normalization with as many groups as channels. Arrays: channel_args.cuh; kernels, launch
// and precision: group_gradient.cuh.
#include "group_gradient.cuh"
