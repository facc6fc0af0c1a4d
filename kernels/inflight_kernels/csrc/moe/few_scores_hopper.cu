// The input of a mixture of experts for few tokens: the norm of the residual stream, and the scores
// of all experts.
#include "linear/hopper_linear.cuh"

// Rows of the router that a block multiplies with.
constexpr int ROUTER_ROWS = 4;

// out[t] = norm of x[t] + residual[t], total[t] = that sum, logits[t, e] = that norm @ router[e]^T
// of a router [rows, hidden]. Unlike out, what the router multiplies is not rounded to T.
//
// Block (b, t) computes ROUTER_ROWS logits of token t, the last ones of each token the other
// results: all of them read the row, and `total` must not alias `residual`. A thread has
// VECTORS vectors of 16 bytes of a row. ADD: as of rms_norm (norm.cu); without it there is no
// residual, and no total. Value: T, or Fp8 or Int8; then also bytes[t], with scales[t].
template <typename Value, typename T, typename R, int VECTORS, bool ADD>
__global__ void __launch_bounds__(256)
    score_experts(const T* x, const R* residual, const float* norm, R* total, T* out, Value* bytes,
                  float* scales, const T* router, float* logits, int hidden, float eps, int rows) {
    constexpr int N = VECTOR<T>, M = VECTOR<R>, PARTS = N / M, WARPS = 256 / 32;
    static_assert(PARTS * M == N, "R has at least the size of T");
    __shared__ float partial[32];
    __shared__ unsigned maxima[32];
    __shared__ float products[WARPS][ROUTER_ROWS + 1];
    const int token = blockIdx.y, first = blockIdx.x * ROUTER_ROWS;
    const bool writes = blockIdx.x == gridDim.x - 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long start = static_cast<long long>(token) * hidden;
    const auto column_of = [&](int i) {
        return (i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
    };

    // No kernel writes weights: they are loaded while the preceding one ends.
    uint4 weights[VECTORS][ROUTER_ROWS];
    float norms[VECTORS][N];
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
#pragma unroll
        for (int r = 0; r < ROUTER_ROWS; r++) {
            const bool exists = first + r < rows && column_of(i) < hidden;
            const T* const row = router + static_cast<long long>(first + r) * hidden;
            weights[i][r] = exists ? load_vector(row + column_of(i)) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (column_of(i) < hidden) load_floats(norm + column_of(i), norms[i]);
    pdl_wait();
    // After the wait: the logits are history for the kernel after the next one.
    pdl_launch_dependents();

    float values[VECTORS][N] = {}, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = column_of(i);
        if (column >= hidden) continue;
        unpack<T>(load_vector(x + start + column), values[i]);
        if constexpr (ADD) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const long long place = start + column + part * M;
                float more[M];
                unpack<R>(load_vector(residual + place), more);
                float (&sum)[M] = *reinterpret_cast<float (*)[M]>(values[i] + part * M);
#pragma unroll
                for (int j = 0; j < M; j++) sum[j] += more[j];
                if (writes) store_vector(total + place, pack<R>(sum));
            }
        }
#pragma unroll
        for (int j = 0; j < N; j++) squares += values[i][j] * values[i][j];
    }
    if (writes) {
        const float scale = rsqrtf(block_sum(squares, partial) / hidden + eps);
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (column_of(i) >= hidden) continue;
#pragma unroll
            for (int j = 0; j < N; j++) values[i][j] *= scale * norms[i][j];
            const uint4 rounded = pack<T>(values[i]);
            store_vector(out + start + column_of(i), rounded);
            unpack<T>(rounded, values[i]);
#pragma unroll
            for (int j = 0; j < N; j++) largest = max(largest, magnitude(values[i][j]));
        }
        if constexpr (!SAME<Value, T>) {
            const RowScale<Value> quantized(block_max(largest, maxima));
            if (threadIdx.x == 0) scales[token] = quantized.scale;
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                if (column_of(i) < hidden)
                    store_bytes<T>(bytes + start + column_of(i), quantized, values[i]);
        }
        return;
    }
    // Products with the norm but for its scale, which is the same for a row: one reduction for
    // both.
    float sums[ROUTER_ROWS + 1] = {};
    sums[ROUTER_ROWS] = squares;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (column_of(i) >= hidden) continue;
#pragma unroll
        for (int j = 0; j < N; j++) values[i][j] *= norms[i][j];
#pragma unroll
        for (int r = 0; r < ROUTER_ROWS; r++) {
            float w[N];
            unpack<T>(weights[i][r], w);
#pragma unroll
            for (int j = 0; j < N; j++) sums[r] += values[i][j] * w[j];
        }
    }
#pragma unroll
    for (int r = 0; r <= ROUTER_ROWS; r++) {
        sums[r] = warp_sum(sums[r]);
        if (lane == 0) products[warp][r] = sums[r];
    }
    __syncthreads();
    if (threadIdx.x < ROUTER_ROWS && first + threadIdx.x < rows) {
        float sum = 0.0f, all = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            sum += products[w][threadIdx.x];
            all += products[w][ROUTER_ROWS];
        }
        logits[static_cast<long long>(token) * rows + first + threadIdx.x] =
            sum * rsqrtf(all / hidden + eps);
    }
}
