// Backward of adaptive layer normalization with a gate, given the mean and rstd that the forward
// pass used:
//
//   xhat[r, c] = (x[r, c] - mean[r]) * rstd[r]
//   gated[r, c] = grad_out[r, c] * gate[r, c],  g[r, c] = gated[r, c] * scale[r, c]
//   grad_x[r, c] = rstd[r] * (g[r, c] - mean_c(g[r]) - xhat[r, c] * mean_c(g[r] * xhat[r]))
//   grad_scale[r, c] = gated[r, c] * xhat[r, c]
//   grad_shift[r, c] = gated[r, c]
//   grad_gate[r, c] = grad_out[r, c] * (scale[r, c] * xhat[r, c] + shift[r, c])
//
// the last three summed over the rows that shared a row of the parameter.
// Arrays, launch and precision: row_gradient.cuh.
#include "row_gradient_segments.cuh"

struct AdaLayerNormZeroGradient {
    static constexpr bool kCentred = true;

    template <typename A>
    static __device__ __forceinline__ A of_xhat(A grad, A scale, A, A gate) {
        return grad * gate * scale;
    }
    template <int SLOT, typename A>
    static __device__ __forceinline__ A term(A grad, A xhat, A scale, A shift, A gate) {
        const A gated = grad * gate;
        return SLOT == 0 ? gated * xhat : SLOT == 1 ? gated : grad * fma(scale, xhat, shift);
    }
};
