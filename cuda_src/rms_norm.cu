// Root mean square normalization (Zhang & Sennrich, arXiv:1910.07467):
//
//   y[r, c] = x[r, c] * rstd[r] * weight[c]
//   rstd[r] = 1 / sqrt(sum_c x[r, c]^2 / cols + eps)
//
// Arrays, launch and precision: row_norm.cuh.
#include "row_brief.cuh"
#include "row_segments.cuh"

struct RMSNorm {
    static constexpr bool kAdds = false;
    static constexpr bool kRowParameters = false;
    template <typename A>
    using Statistics = MeanSquare<A>;

    template <typename A>
    static __device__ __forceinline__ A apply(A xhat, A weight, A, A) {
        return xhat * weight;
    }
};
