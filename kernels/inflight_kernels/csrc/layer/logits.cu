// Scale and cap of logits.
#include "common.cuh"

__device__ float scaled(float x, float scale, float cap) {
    x *= scale;
    return cap > 0.0f ? cap * tanhf(x / cap) : x;
}

// cap * tanh(scale * x / cap), or scale * x without a cap (0), in place; a vector per thread, of
// which the last one may be incomplete.
extern "C" __global__ void __launch_bounds__(256)
    scale_cap(float* x, long long count, float scale, float cap) {
    constexpr int N = VECTOR<float>;
    const long long first = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    pdl_wait();
    pdl_launch_dependents();
    if (first + N <= count) {
        float values[N];
        unpack<float>(load_vector(x + first), values);
#pragma unroll
        for (int j = 0; j < N; j++) values[j] = scaled(values[j], scale, cap);
        store_vector(x + first, pack<float>(values));
    } else {
        for (long long i = first; i < count; i++) x[i] = scaled(x[i], scale, cap);
    }
}
