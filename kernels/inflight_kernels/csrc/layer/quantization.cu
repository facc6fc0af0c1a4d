// Quantises activations by rows, for products of 8-bit values. Fp8: sm_89 and later.
#include "eight_bit.cuh"

// One block per row of `width` values, which is kept in registers: blockDim.x * VECTORS 16-byte
// vectors of T. Rows of x are `stride` values apart, those of `values` are contiguous. spread_bits:
// see spread_columns.
template <typename Value, typename T, int VECTORS, bool SPREADS = false>
__global__ void __launch_bounds__(512) quantize_rows(const T* x, Value* values, float* scales,
                                                     int width, int stride, int spread_bits) {
    constexpr int N = VECTOR<T>;
    __shared__ unsigned partial[32];
    // The last rows first, as in norm_row.cuh.
    const long long own = gridDim.x - 1 - blockIdx.x;
    const T* const row = x + own * stride;

    pdl_launch_dependents();
#pragma unroll 1
    for (bool real = !rehearses();; real = true) {
        if (real) pdl_wait();
        uint4 raw[VECTORS];
        float spread[SPREADS ? VECTORS : 1][N];  // as they are quantised
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int column = (i * blockDim.x + threadIdx.x) * N;
            if (!SPREADS && column >= width) continue;
            raw[i] = real && column < width ? load_vector(row + column) : make_uint4(0, 0, 0, 0);
            float (&a)[N] = spread[SPREADS ? i : 0];
            unpack<T>(raw[i], a);
            if constexpr (SPREADS) spread_columns(a, spread_bits);
#pragma unroll
            for (int j = 0; j < N; j++) largest = max(largest, magnitude(a[j]));
        }
        const RowScale<Value> scale(block_max(largest, partial));
        if (real && threadIdx.x == 0) scales[own] = scale.scale;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int column = (i * blockDim.x + threadIdx.x) * N;
            if (column >= width) continue;
            float (&a)[N] = spread[SPREADS ? i : 0];
            if (!SPREADS) unpack<T>(raw[i], a);
            if (real) store_bytes<T>(values + own * width + column, scale, a);
        }
        if (real) return;
        __syncthreads();
    }
}
