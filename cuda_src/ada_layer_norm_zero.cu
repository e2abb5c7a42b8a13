// Adaptive layer normalization with a gate (adaLN-Zero; Peebles & Xie, arXiv:2212.09748):
//
//   y[r, c] = gate[r, c] * (scale[r, c] * (x[r, c] - mean[r]) * rstd[r] + shift[r, c])
//
// scale, shift and gate are one row for all, one for each, or anything that strides can say.
// Arrays, launch and precision: row_norm.cuh.
#include "row_segments.cuh"

struct AdaLayerNormZero {
    static constexpr bool kAdds = false;
    static constexpr bool kRowParameters = true;
    template <typename A>
    using Statistics = Centred<A>;

    template <typename A>
    static __device__ __forceinline__ A apply(A xhat, A scale, A shift, A gate) {
        return gate * fma(xhat, scale, shift);
    }
};
