// Backward of root mean square normalization, given the rstd that the forward pass used:
//
//   xhat[r, c] = x[r, c] * rstd[r],  g[r, c] = grad_out[r, c] * weight[c]
//   grad_x[r, c] = rstd[r] * (g[r, c] - xhat[r, c] * mean_c(g[r] * xhat[r]))
//   grad_weight[c] = sum_r grad_out[r, c] * xhat[r, c]
//
// Arrays, launch and precision: row_gradient.cuh.
#include "row_gradient_segments.cuh"

struct RMSNormGradient {
    static constexpr bool kCentred = false;

    template <typename A>
    static __device__ __forceinline__ A of_xhat(A grad, A weight, A, A) {
        return grad * weight;
    }
    template <int SLOT, typename A>
    static __device__ __forceinline__ A term(A grad, A xhat, A, A, A) {
        return grad * xhat;
    }
};
