// RMSNorm of x + residual, and that sum, in one pass over memory.
#include "common.cuh"

// One block per row of `hidden` values; blockDim.x * VECTORS vectors of 16 bytes cover it. A row
// stays in registers between its sum of squares and its scaling. `total` and `out` may be `x` or
// `residual`: a thread writes only what it has read itself.
template <typename T, int VECTORS, bool ADD>
__global__ void __launch_bounds__(512)
    rms_norm(const T* x, const T* residual, const T* weight, T* total, T* out, int hidden,
             float eps) {
    constexpr int N = VECTOR<T>;
    __shared__ float partial[32];
    const long long row = static_cast<long long>(blockIdx.x) * hidden;

    launch_next();
    // No kernel writes weights, so they are on their way while the one before ends.
    uint4 weights[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (i * blockDim.x + threadIdx.x) * N;
        if (column < hidden) weights[i] = load_vector(weight + column);
    }
    wait_for_previous();

    uint4 values[VECTORS], addends[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (i * blockDim.x + threadIdx.x) * N;
        if (column < hidden) {
            values[i] = load_vector(x + row + column);
            if (ADD) addends[i] = load_vector(residual + row + column);
        }
    }

    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (i * blockDim.x + threadIdx.x) * N;
        if (column < hidden) {
            float a[N];
            unpack<T>(values[i], a);
            if (ADD) {
                float b[N];
                unpack<T>(addends[i], b);
#pragma unroll
                for (int j = 0; j < N; j++) a[j] += b[j];
                values[i] = pack<T>(a);
                store_vector(total + row + column, values[i]);
                unpack<T>(values[i], a);  // the norm is of the sum as it is stored
            }
#pragma unroll
            for (int j = 0; j < N; j++) squares += a[j] * a[j];
        }
    }
    const float scale = rsqrtf(block_sum(squares, partial) / hidden + eps);

#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (i * blockDim.x + threadIdx.x) * N;
        if (column < hidden) {
            float a[N], w[N];
            unpack<T>(values[i], a);
            unpack<T>(weights[i], w);
#pragma unroll
            for (int j = 0; j < N; j++) a[j] *= scale * w[j];
            store_vector(out + row + column, pack<T>(a));
        }
    }
}
