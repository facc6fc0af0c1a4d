// Activations of an MLP: the gates of SwiGLU and GeGLU, and activations without a gate.
#include "common.cuh"

struct Silu {
    __device__ float operator()(float x) const { return __fdividef(x, 1.0f + __expf(-x)); }
};

// 0.5 * x * (1 + tanh(z)) = x / (1 + exp(-2 * z)), with z = sqrt(2 / pi) * (x + 0.044715 * x^3).
struct GeluTanh {
    __device__ float operator()(float x) const {
        const float twice = 1.5957691216f * (x + 0.044715f * x * x * x);
        return __fdividef(x, 1.0f + __expf(-twice));
    }
};

struct Relu2 {
    __device__ float operator()(float x) const {
        const float positive = fmaxf(x, 0.0f);
        return positive * positive;
    }
};

// A row of x is gate | up, `width` values each; one thread per vector of 16 bytes of `out`.
template <typename T, typename Activation>
__device__ void activate_mul(const T* x, T* out, unsigned num_vectors, unsigned vectors_per_row,
                             Activation activation) {
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
    for (int j = 0; j < N; j++) g[j] = activation(g[j]) * u[j];
    store_vector(out + static_cast<long long>(index) * N, pack<T>(g));
}

template <typename T>
__global__ void __launch_bounds__(256)
    silu_mul(const T* x, T* out, unsigned num_vectors, unsigned vectors_per_row) {
    activate_mul(x, out, num_vectors, vectors_per_row, Silu{});
}

template <typename T>
__global__ void __launch_bounds__(256)
    gelu_tanh_mul(const T* x, T* out, unsigned num_vectors, unsigned vectors_per_row) {
    activate_mul(x, out, num_vectors, vectors_per_row, GeluTanh{});
}

// One thread per vector of 16 bytes; `out` may be x.
template <typename T, typename Activation>
__device__ void activate(const T* x, T* out, unsigned num_vectors, Activation activation) {
    constexpr int N = VECTOR<T>;
    const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    pdl_wait();
    pdl_launch_dependents();
    if (index >= num_vectors) return;

    float values[N];
    unpack<T>(load_vector(x + index * N), values);
#pragma unroll
    for (int j = 0; j < N; j++) values[j] = activation(values[j]);
    store_vector(out + index * N, pack<T>(values));
}

template <typename T>
__global__ void __launch_bounds__(256) gelu_tanh(const T* x, T* out, unsigned num_vectors) {
    activate(x, out, num_vectors, GeluTanh{});
}

template <typename T>
__global__ void __launch_bounds__(256) relu2(const T* x, T* out, unsigned num_vectors) {
    activate(x, out, num_vectors, Relu2{});
}
