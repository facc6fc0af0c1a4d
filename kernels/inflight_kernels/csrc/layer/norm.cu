// RMSNorm with fused residual addition; see norm_row.cuh.
#include "layer/norm_row.cuh"

template <typename T, typename R, int VECTORS, bool ADD>
__global__ void __launch_bounds__(512)
    rms_norm(const T* x, const R* residual, const float* weight, R* total, T* out, int num_rows,
             int at_once, int hidden, float eps) {
    const StoredRows<T> rows = {x, num_rows, at_once};
    norm_row<T, R, T, VECTORS, ADD, false>(rows, residual, weight, total, out, nullptr, hidden, eps,
                                           0);
}

// The same, quantised by rows.
template <typename Value, typename T, typename R, int VECTORS, bool ADD, bool SPREADS = false>
__global__ void __launch_bounds__(512)
    scaled_rms_norm(const T* x, const R* residual, const float* weight, R* total, Value* out,
                    float* scales, int num_rows, int at_once, int hidden, float eps,
                    int spread_bits) {
    const StoredRows<T> rows = {x, num_rows, at_once};
    norm_row<T, R, Value, VECTORS, ADD, SPREADS>(rows, residual, weight, total, out, scales, hidden,
                                                 eps, spread_bits);
}
