// RMSNorm with fused residual addition, in one pass over memory.
#pragma once

#include "eight_bit.cuh"

// What is normed: rows of values as they are stored. Others have the same members, where vectors of
// Loaded may be anything that takes few registers.
template <typename T>
struct StoredRows {
    using Loaded = uint4;
    static constexpr bool SEVERAL = true;  // rows of a block, if threads have several vectors
    const T* x;
    int num_rows;
    int at_once;  // of a block

    // Of this block. The last rows are first: they are still in the L2 cache, if the preceding
    // product has written them last.
    __device__ int first() const { return num_rows - 1 - blockIdx.x * at_once; }
    __device__ int last() const { return max(first() - at_once + 1, 0); }
    // By all threads of the block, after pdl_wait.
    __device__ void begin() const {}
    // A vector, `place` values from the first row's start, in `column` of its row.
    __device__ uint4 load(long long place, int) const { return load_vector(x + place); }
    __device__ void unpack_to(const uint4& loaded, float (&values)[VECTOR<T>]) const {
        unpack<T>(loaded, values);
    }
};

constexpr int MAX_PARTIAL_SUMS = 128;  // of 16 warps with 8 vectors a thread

// What each warp of a block has found of a row.
struct RowPartials {
    float sums[MAX_PARTIAL_SUMS];
    unsigned maxima[32];
};

// The sum over a row of what is given for each of a thread's vectors, in an order that does not
// depend on the number of threads: of each 32 adjacent vectors, then of these sums. With MAX,
// `largest` becomes the row's. Both for every thread; one barrier, and `partials` must not be
// reused before another one.
template <bool MAX, int VECTORS>
__device__ float reduce_row(const float (&values)[VECTORS], unsigned& largest,
                            RowPartials& partials) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    if (MAX) largest = warp_max(largest);
    if (MAX && lane == 0) partials.maxima[warp] = largest;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const float sum = warp_sum(values[i]);
        if (lane == 0) partials.sums[i * num_warps + warp] = sum;
    }
    __syncthreads();
    if (MAX) largest = warp_max(lane < num_warps ? partials.maxima[lane] : 0u);
    float sum = 0.0f;
#pragma unroll
    for (int from = 0; from < MAX_PARTIAL_SUMS; from += 32)
        if (from + lane < VECTORS * num_warps) sum += partials.sums[from + lane];
    return warp_sum(sum);
}

// Rows of `hidden` values, covered by blockDim.x * VECTORS 16-byte vectors of T. The residual and
// `total` are in R, which is T or float. A row is kept in registers between its sum of squares and
// its scaling. A block has one row, or several if there are many: then it reads the weights, twice
// as many bytes as a row has, only once, and the next row before it has finished one. If types are
// equal, `total` and `out` may alias `x` or `residual`: a thread writes only what it has read
// itself.
//
// ADD: there is a residual. Without one `total` is written only if it is x in another type. Out: T,
// or Fp8 or Int8 with a scale for each row. SPREADS: by spread_bits first (see spread_columns).
//
// What is quantised is a row times the weights: its norm has the same bytes, and another scale. So
// the largest magnitude is found together with the sum of squares.
template <typename T, typename R, typename Out, int VECTORS, bool ADD, bool SPREADS, class Rows>
__device__ __forceinline__ void norm_row(const Rows& x, const R* residual, const float* weight,
                                         R* total, Out* out, float* scales, int hidden, float eps,
                                         int spread_bits) {
    constexpr int N = VECTOR<T>, M = VECTOR<R>;
    constexpr int PARTS = N / M;  // vectors of R with the values of one of T
    static_assert(PARTS * M == N, "R has at least the size of T");
    constexpr bool SEVERAL = Rows::SEVERAL && VECTORS > 1 && !ADD;
    __shared__ RowPartials partials[SEVERAL ? 2 : 1];  // in turn: one barrier for each row
    constexpr bool QUANTIZES = !SAME<Out, T>;
    int own = x.first(), last = own;
    if constexpr (SEVERAL) last = x.last();

    pdl_launch_dependents();
    // No kernel writes weights, so they are loaded while the preceding one ends; those of a long row
    // would take too many registers.
    constexpr bool EARLY = VECTORS <= 4;
    float weights[EARLY ? VECTORS : 1][N];
#pragma unroll
    for (int i = 0; EARLY && i < VECTORS; i++) {
        const int column = (i * blockDim.x + threadIdx.x) * N;
        if (column < hidden) load_floats(weight + column, weights[i]);
    }
    // Others would take more registers, of which many rows need few.
    constexpr bool REHEARSES = VECTORS == 1;
    typename Rows::Loaded values[VECTORS];
    uint4 sums[VECTORS][PARTS];  // as they are stored
    const auto load = [&](long long row) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int column = (i * blockDim.x + threadIdx.x) * N;
            if (column < hidden) {
                values[i] = x.load(row + column, column);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    if (ADD) sums[i][part] = load_vector(residual + row + column + part * M);
            }
        }
    };
    bool real = !REHEARSES || !rehearses(), is_loaded = false;
    int turn = 0;
    if (!real) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            values[i] = {};
#pragma unroll
            for (int part = 0; part < PARTS; part++) sums[i][part] = {};
        }
    }
#pragma unroll 1
    for (;;) {
        const long long row = static_cast<long long>(own) * hidden;
        if (real && !is_loaded) {
            pdl_wait();
            x.begin();
            load(row);
        }

        // Multiplies values of a vector by the weights and a factor.
        const auto weigh = [&](int i, int column, float (&a)[N], float factor) {
            float (&w)[N] = weights[EARLY ? i : 0];
            if (!EARLY) load_floats(weight + column, w);
#pragma unroll
            for (int j = 0; j < N; j++) a[j] *= factor * w[j];
        };
        const auto unpack_sum = [&](int i, float (&a)[N]) {
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                unpack<R>(sums[i][part], *reinterpret_cast<float (*)[M]>(a + part * M));
        };
        float squares[VECTORS] = {};
        float spread[SPREADS ? VECTORS : 1][N];  // as they are quantised
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int column = (i * blockDim.x + threadIdx.x) * N;
            float (&a)[N] = spread[SPREADS ? i : 0];
            if (column < hidden) {
                x.unpack_to(values[i], a);
                if constexpr (ADD || PARTS > 1) {
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        float (&sum)[M] = *reinterpret_cast<float (*)[M]>(a + part * M);
                        if (ADD) {
                            float b[M];
                            unpack<R>(sums[i][part], b);
#pragma unroll
                            for (int j = 0; j < M; j++) sum[j] += b[j];
                        }
                        sums[i][part] = pack<R>(sum);
                        if (real) store_vector(total + row + column + part * M, sums[i][part]);
                        unpack<R>(sums[i][part], sum);  // the norm is of the rounded sum
                    }
                } else {
                    sums[i][0] = values[i];
                }
#pragma unroll
                for (int j = 0; j < N; j++) squares[i] += a[j] * a[j];
                if (QUANTIZES) weigh(i, column, a, 1.0f);
            } else if (SPREADS) {
#pragma unroll
                for (int j = 0; j < N; j++) a[j] = 0.0f;
            }
            if constexpr (SPREADS) spread_columns(a, spread_bits);
            if (!QUANTIZES || (!SPREADS && column >= hidden)) continue;
#pragma unroll
            for (int j = 0; j < N; j++) largest = max(largest, magnitude(a[j]));
        }
        if (SEVERAL && own > last) load(row - hidden);
        const float mean = reduce_row<QUANTIZES>(squares, largest, partials[turn]) / hidden;
        const float scale = rsqrtf(mean + eps);

        if constexpr (QUANTIZES) {
            const RowScale<Out> quantized(largest);
            if (real && threadIdx.x == 0) scales[own] = quantized.scale * scale;
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                const int column = (i * blockDim.x + threadIdx.x) * N;
                if (column >= hidden) continue;
                float (&a)[N] = spread[SPREADS ? i : 0];
                if (!SPREADS) {
                    unpack_sum(i, a);
                    weigh(i, column, a, 1.0f);
                }
                if (real) store_bytes<T>(out + row + column, quantized, a);
            }
        } else {
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                const int column = (i * blockDim.x + threadIdx.x) * N;
                if (column >= hidden) continue;
                float a[N];
                unpack_sum(i, a);
                weigh(i, column, a, scale);
                if (real) store_vector(out + row + column, pack<T>(a));
            }
        }
        if (real && own == last) return;
        if (SEVERAL) {
            own--;
            turn ^= 1;
        } else {
            __syncthreads();
        }
        is_loaded = SEVERAL;
        real = true;
    }
}
