// Group normalization (Wu & He, arXiv:1803.08494); a group g has C / G channels:
//
//   y[n, c, s] = (x[n, c, s] - mean[n, g]) * rstd[n, g] * weight[c] + bias[c]
//   mean[n, g] = sum_(c in g, s) x[n, c, s] / (C / G S)
//   rstd[n, g] = 1 / sqrt(sum_(c in g, s) (x[n, c, s] - mean[n, g])^2 / (C / G S) + eps)
//
// Arrays: channel_args.cuh; launch and precision: channel_runs.cuh, channel_brief.cuh,
// channel_columns.cuh, channel_merge.cuh, channel_map.cuh, channel_kept.cuh.
#include "channel_brief.cuh"
#include "channel_kept.cuh"
#include "channel_map.cuh"
#include "channel_merge.cuh"

struct GroupNorm {
    static constexpr bool kSetsAreChannels = false;
    static constexpr bool kSetsAreOneChannel = false;
};
