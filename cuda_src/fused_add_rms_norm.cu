// Residual addition, then root mean square normalization of the stored sum:
//
//   residual_out[r, c] = x[r, c] + residual[r, c], rounded to T
//   y[r, c] = residual_out[r, c] * rstd[r] * weight[c]
//
// rstd is that of residual_out, so y is bit for bit what the two calls give.
// Arrays, launch and precision: row_norm.cuh.
#include "row_brief.cuh"
#include "row_segments.cuh"

struct FusedAddRMSNorm {
    static constexpr bool kAdds = true;
    static constexpr bool kRowParameters = false;
    template <typename A>
    using Statistics = MeanSquare<A>;

    template <typename A>
    static __device__ __forceinline__ A apply(A xhat, A weight, A, A) {
        return xhat * weight;
    }
};
