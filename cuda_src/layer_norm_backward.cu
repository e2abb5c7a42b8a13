// Backward of layer normalization, given the mean and rstd that the forward pass used:
//
//   xhat[r, c] = (x[r, c] - mean[r]) * rstd[r],  g[r, c] = grad_out[r, c] * weight[c]
//   grad_x[r, c] = rstd[r] * (g[r, c] - mean_c(g[r]) - xhat[r, c] * mean_c(g[r] * xhat[r]))
//   grad_weight[c] = sum_r grad_out[r, c] * xhat[r, c]
//   grad_bias[c] = sum_r grad_out[r, c]
//
// Arrays, launch and precision: row_gradient.cuh.
#include "row_gradient_segments.cuh"

struct LayerNormGradient {
    static constexpr bool kCentred = true;

    template <typename A>
    static __device__ __forceinline__ A of_xhat(A grad, A weight, A, A) {
        return grad * weight;
    }
    template <int SLOT, typename A>
    static __device__ __forceinline__ A term(A grad, A xhat, A, A, A) {
        return SLOT == 0 ? grad * xhat : grad;
    }
};
