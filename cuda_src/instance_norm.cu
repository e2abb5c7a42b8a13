// Instance normalization (Ulyanov, Vedaldi & Lempitsky, arXiv:1607.08022):
//
//   y[n, c, s] = (x[n, c, s] - mean[n, c]) * rstd[n, c] * weight[c] + bias[c]
//   mean[n, c] = sum_s x[n, c, s] / S
//   rstd[n, c] = 1 / sqrt(sum_s (x[n, c, s] - mean[n, c])^2 / S + eps)
//
// Running statistics take the averages over n of mean[n, c] and of the unbiased variances.
// Arrays: channel_args.cuh; launch and precision: channel_runs.cuh, channel_brief.cuh,
// channel_columns.cuh, channel_columns_kept.cuh, channel_merge.cuh, channel_map.cuh,
// channel_map_brief.cuh, channel_kept.cuh.
#include "channel_brief.cuh"
#include "channel_columns_kept.cuh"
#include "channel_kept.cuh"
#include "channel_map_brief.cuh"
#include "channel_merge.cuh"

struct InstanceNorm {
    static constexpr bool kSetsAreChannels = false;
    static constexpr bool kSetsAreOneChannel = true;
};
