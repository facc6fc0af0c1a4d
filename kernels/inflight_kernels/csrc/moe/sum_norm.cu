// Sums of what experts compute, added to the residual stream, and RMSNorm of the stream.
#include "layer/norm_row.cuh"
#include "moe/sum.cuh"

// What is normed is a sum of experts' rows; see StoredRows.
template <typename T>
struct SummedExperts {
    struct Loaded {
        float values[VECTOR<T>];
    };
    ExpertRows<T> experts;
    Parts& parts;

    static constexpr bool SEVERAL = false;
    __device__ int first() const { return blockIdx.x; }
    __device__ void begin() const { experts.find(parts); }
    __device__ Loaded load(long long place, int column) const {
        Loaded sum = {};
        experts.add(parts, place, column, sum.values);
        return sum;
    }
    __device__ void unpack_to(const Loaded& loaded, float (&values)[VECTOR<T>]) const {
#pragma unroll
        for (int j = 0; j < VECTOR<T>; j++) values[j] = loaded.values[j];
    }
};

// total += sums of experts, out = the norm of total. One block per token; see norm_row.
template <typename T, typename R, int VECTORS>
__global__ void __launch_bounds__(512)
    sum_rms_norm(const T* rows, const int* positions, const float* weights, const T* shared,
                 int top_k, const float* weight, R* total, T* out, int hidden, float eps) {
    __shared__ Parts parts;
    const ExpertRows<T> experts = {rows, positions, weights, shared, hidden, top_k};
    norm_row<T, R, T, VECTORS, true, false>(SummedExperts<T>{experts, parts}, total, weight, total,
                                            out, nullptr, hidden, eps, 0);
}

// The same, quantised by rows.
template <typename Value, typename T, typename R, int VECTORS, bool SPREADS = false>
__global__ void __launch_bounds__(512)
    scaled_sum_rms_norm(const T* rows, const int* positions, const float* weights, const T* shared,
                        int top_k, const float* weight, R* total, Value* out, float* scales,
                        int hidden, float eps, int spread_bits) {
    __shared__ Parts parts;
    const ExpertRows<T> experts = {rows, positions, weights, shared, hidden, top_k};
    norm_row<T, R, Value, VECTORS, true, SPREADS>(SummedExperts<T>{experts, parts}, total, weight,
                                                  total, out, scales, hidden, eps, spread_bits);
}
