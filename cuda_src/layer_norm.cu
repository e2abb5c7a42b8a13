// Layer normalization (Ba, Kiros & Hinton, arXiv:1607.06450):
//
//   y[r, c] = (x[r, c] - mean[r]) * rstd[r] * weight[c] + bias[c]
//   mean[r] = sum_c x[r, c] / cols
//   rstd[r] = 1 / sqrt(sum_c (x[r, c] - mean[r])^2 / cols + eps)
//
// Arrays, launch and precision: row_norm.cuh.
#include "row_brief.cuh"
#include "row_segments.cuh"

struct LayerNorm {
    static constexpr bool kAdds = false;
    static constexpr bool kRowParameters = false;
    template <typename A>
    using Statistics = Centred<A>;

    template <typename A>
    static __device__ __forceinline__ A apply(A xhat, A weight, A bias, A) {
        return fma(xhat, weight, bias);
    }
};
