// Backward of a residual addition and layer normalization of the sum, which is x here:
//
//   grad_x[r, c] = rstd[r] * (g[r, c] - mean_c(g[r]) - xhat[r, c] * mean_c(g[r] * xhat[r]))
//                  + grad_residual_out[r, c]
//
// the gradient of either addend; all else as in layer_norm_backward.cu. The addition has nothing to
// add where the sum was not used but for the norm.
// Arrays, launch and precision: row_gradient.cuh.
#include "layer_norm_backward.cu"

using FusedAddLayerNormGradient = LayerNormGradient;
