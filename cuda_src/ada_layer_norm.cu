// Adaptive layer normalization (Perez et al., arXiv:1709.07871; Peebles & Xie, arXiv:2212.09748):
//
//   y[r, c] = scale[r, c] * (x[r, c] - mean[r]) * rstd[r] + shift[r, c]
//
// scale and shift are one row for all, one for each, or anything that strides can say.
// Arrays, launch and precision: row_norm.cuh.
#include "row_segments.cuh"

struct AdaLayerNorm {
    static constexpr bool kAdds = false;
    static constexpr bool kRowParameters = true;
    template <typename A>
    using Statistics = Centred<A>;

    template <typename A>
    static __device__ __forceinline__ A apply(A xhat, A scale, A shift, A) {
        return fma(xhat, scale, shift);
    }
};
