// Batch normalization (Ioffe & Szegedy, arXiv:1502.03167):
//
//   y[n, c, s] = (x[n, c, s] - mean[c]) * rstd[c] * weight[c] + bias[c]
//   mean[c] = sum_ns x[n, c, s] / (N S)
//   rstd[c] = 1 / sqrt(sum_ns (x[n, c, s] - mean[c])^2 / (N S) + eps)
//
//   running_mean[c] = (1 - momentum) * running_mean[c] + momentum * mean[c]
//   running_var[c]  = (1 - momentum) * running_var[c]
//                     + momentum * sum_ns (x[n, c, s] - mean[c])^2 / (N S - 1)
//
// Inference takes mean and variance as they are given.
// Arrays: channel_args.cuh; launch and precision: channel_runs.cuh, channel_brief.cuh,
// channel_columns.cuh, channel_columns_kept.cuh, channel_norm_strips.cuh, channel_table.cuh,
// channel_merge.cuh, channel_map.cuh, channel_map_brief.cuh, channel_kept.cuh.
#include "channel_columns_kept.cuh"
#include "channel_kept.cuh"
#include "channel_map_brief.cuh"
#include "channel_merge.cuh"
#include "channel_norm_strips.cuh"
#include "channel_table.cuh"

struct BatchNorm {
    static constexpr bool kSetsAreChannels = true;    // the statistics of a set are a channel's
    static constexpr bool kSetsAreOneChannel = true;  // one weight and bias for all of a set
};
