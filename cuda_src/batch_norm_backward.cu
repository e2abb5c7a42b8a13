// Backward of batch normalization, given the mean and rstd that the forward pass used:
//
//   xhat[n, c, s] = (x[n, c, s] - mean[c]) * rstd[c]
//   grad_bias[c] = sum_ns grad_out[n, c, s]
//   grad_weight[c] = sum_ns grad_out[n, c, s] * xhat[n, c, s]
//   grad_x[n, c, s] = weight[c] * rstd[c] * (grad_out[n, c, s] - grad_bias[c] / (N S)
//                                            - xhat[n, c, s] * grad_weight[c] / (N S))
//
// and with frozen statistics grad_x = weight * rstd * grad_out.
// Arrays: channel_args.cuh; kernels, launch and precision: channel_gradient.cuh,
// channel_gradient_brief.cuh, channel_table_gradient.cuh, channel_gradient_kept.cuh,
// channel_gradient_columns_kept.cuh, channel_gradient_strips.cuh.
#include "channel_gradient_brief.cuh"
#include "channel_gradient_columns_kept.cuh"
#include "channel_gradient_kept.cuh"
#include "channel_gradient_strips.cuh"
#include "channel_table_gradient.cuh"
