// Backward of a residual addition and root mean square normalization of the sum, which is x here:
//
//   grad_x[r, c] = rstd[r] * (g[r, c] - xhat[r, c] * mean_c(g[r] * xhat[r]))
//                  + grad_residual_out[r, c]
//
// the gradient of either addend; all else as in rms_norm_backward.cu. The addition has nothing to
// add where the sum was not used but for the norm.
// Arrays, launch and precision: row_gradient.cuh.
#include "rms_norm_backward.cu"

using FusedAddRMSNormGradient = RMSNormGradient;
