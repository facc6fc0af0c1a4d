// Rows of tokens for their experts, and sums of what the experts compute.
#include "eight_bit.cuh"
#include "moe/sum.cuh"

// The rows of a token's experts. With more than one block of `block_tokens` tokens, `positions` are
// ranks among the rows of the same expert and block, to which `starts` are added here.
struct Places {
    const int* experts;
    const int* starts;
    int* positions;
    int num_experts, top_k, block_tokens, num_tokens;

    // By all threads of the block of a token, before a barrier.
    __device__ void find(int token, int (&places)[MAX_TOP_K]) const {
        if (threadIdx.x >= top_k) return;
        const int pair = token * top_k + threadIdx.x;
        int place = load_l2(positions + pair);
        if (num_tokens > block_tokens) {
            place += load_l2(starts + token / block_tokens * num_experts + load_l2(experts + pair));
            positions[pair] = place;
        }
        places[threadIdx.x] = place;
    }
};

// Copies each token's row, of vectors of 16 bytes, to the rows of its experts. One block of threads
// per token.
__global__ void __launch_bounds__(256)
    gather_rows(const uint4* x, int stride, const int* experts, const int* starts, int* positions,
                uint4* out, int vectors, int num_experts, int top_k, int block_tokens,
                int num_tokens) {
    __shared__ int places[MAX_TOP_K];
    pdl_wait();
    // After the wait: the plan is history for the products.
    pdl_launch_dependents();
    const int token = blockIdx.x;
    Places{experts, starts, positions, num_experts, top_k, block_tokens, num_tokens}.find(token,
                                                                                         places);
    __syncthreads();
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        const uint4 values = x[static_cast<long long>(token) * stride + i];
        for (int r = 0; r < top_k; r++)
            out[static_cast<long long>(places[r]) * vectors + i] = values;
    }
}

// The same, quantised by rows.
template <typename Value, typename T>
__global__ void __launch_bounds__(256)
    quantize_gathered_rows(const uint4* x, int stride, const int* experts, const int* starts,
                           int* positions, Value* out, float* scales, int vectors, int num_experts,
                           int top_k, int block_tokens, int num_tokens) {
    constexpr int N = VECTOR<T>;
    __shared__ int places[MAX_TOP_K];
    __shared__ unsigned maxima[32];
    pdl_wait();
    pdl_launch_dependents();
    const int token = blockIdx.x;
    const uint4* const row = x + static_cast<long long>(token) * stride;
    Places{experts, starts, positions, num_experts, top_k, block_tokens, num_tokens}.find(token,
                                                                                         places);
    unsigned largest = 0;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        float values[N];
        unpack<T>(row[i], values);
#pragma unroll
        for (int j = 0; j < N; j++) largest = max(largest, magnitude(values[j]));
    }
    const RowScale<Value> scale(block_max(largest, maxima));  // its barrier is for the places, too
    if (threadIdx.x < top_k) scales[places[threadIdx.x]] = scale.scale;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        float values[N];
        unpack<T>(row[i], values);
        for (int r = 0; r < top_k; r++)
            store_bytes<T>(out + (static_cast<long long>(places[r]) * vectors + i) * N, scale,
                           values);
    }
}

// total = (ADD: total) + sums of experts. One block of threads per token.
template <typename T, bool ADD>
__global__ void __launch_bounds__(256)
    sum_of_experts(const T* rows, const int* positions, const float* weights, const T* shared,
                   T* total, int width, int top_k) {
    constexpr int N = VECTOR<T>;
    __shared__ Parts parts;
    const ExpertRows<T> experts = {rows, positions, weights, shared, width, top_k};
    pdl_launch_dependents();
    pdl_wait();
    experts.find(parts);
    const long long row = static_cast<long long>(blockIdx.x) * width;
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
        float sum[N] = {};
        if (ADD) unpack<T>(load_vector(total + row + column), sum);
        experts.add(parts, row + column, column, sum);
        store_vector(total + row + column, pack<T>(sum));
    }
}
