// The gate of SwiGLU.
#include "common.cuh"

// A row of x is gate | up, `width` values each; one thread per vector of 16 bytes of `out`.
template <typename T>
__global__ void __launch_bounds__(256)
    silu_mul(const T* x, T* out, unsigned num_vectors, unsigned vectors_per_row) {
    constexpr int N = VECTOR<T>;
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    pdl_wait();
    pdl_launch_dependents();
    if (index >= num_vectors) return;

    const unsigned row = index / vectors_per_row;
    const unsigned column = index - row * vectors_per_row;
    const T* gate = x + (2LL * row * vectors_per_row + column) * N;
    const T* up = gate + static_cast<long long>(vectors_per_row) * N;
    const uint4 gates = load_vector(gate), ups = load_vector(up);
    float g[N], u[N];
    unpack<T>(gates, g);
    unpack<T>(ups, u);
#pragma unroll
    for (int j = 0; j < N; j++) g[j] = __fdividef(g[j], 1.0f + __expf(-g[j])) * u[j];
    store_vector(out + static_cast<long long>(index) * N, pack<T>(g));
}
