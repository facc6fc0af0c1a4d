// A linear layer for up to 8 tokens of 16 bits, which streams the weights once.
//
// In a block, a producer warp keeps a ring of stages in shared memory full with TMA copies, across
// the ends of tiles. The first stages arrive before the preceding kernel has ended and x is there:
// what counts is how soon they are multiplied then. So a stage is multiplied by one warp alone,
// with mma.sync, and all CONSUMERS multiply at once, without padding to the 64 rows of wgmma. Tiles
// have as few as 8 rows of the weight, so that blocks have even shares. Each warp adds up its
// stages of a tile; the sums of all are added at the end, in one order.
#include "attention/attention_ptx.cuh"
#include "linear/skinny_few.cuh"

constexpr int CONSUMERS = 8;
constexpr int VECTORS = 3;  // of a row whose norm is computed, of each thread at most

// x of a product: rows of 16 bits, `stride` values apart; or their norm, if it has a weight.
template <typename T>
struct FewRows {
    const T* rows;
    int stride;
    const float* norm;
    float eps;
    // Rows that are added before the norm, k values apart, and where the first block writes the
    // sums, in other memory; null if they are not summed.
    const float* residual;
    float* total;
};

// Barrier of the consumers.
__device__ inline void sync_few() {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * 32) : "memory");
}

// Rows of x -> `to`, `pitch` bytes apart, by one thread.
template <typename T>
__device__ void copy_few(const FewRows<T>& x, char* to, int pitch, Barrier* there, int m, int k) {
    const int bytes = k * static_cast<int>(sizeof(T));
    arrive_expect_tx(there, m * bytes);
    for (int token = 0; token < m; token++)
        copy_bytes(to + token * pitch, x.rows + static_cast<long long>(token) * x.stride, bytes,
                   there);
}

// Rows of the norm of x -> shared memory by the consumers, but for a factor of each row, of which
// each warp leaves its share of the squares.
template <typename T>
struct FewNorms {
    static constexpr int N = VECTOR<T>;

    float weights[VECTORS][N];

    __device__ static int column_of(int i) { return (i * CONSUMERS * 32 + threadIdx.x) * N; }

    // Before the wait: no kernel writes weights.
    __device__ FewNorms(const FewRows<T>& x, int k) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            if (column_of(i) < k) load_floats(x.norm + column_of(i), weights[i]);
    }

    __device__ void load(const FewRows<T>& x, char* to, int pitch, float* squares_of, int m,
                         int k) const {
        for (int token = 0; token < m; token++) {
            const T* const row = x.rows + static_cast<long long>(token) * x.stride;
            const int start = token * k;
            uint4 raw[VECTORS] = {}, more[VECTORS][N / 4] = {};
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                if (column_of(i) >= k) continue;
                raw[i] = load_l2(reinterpret_cast<const uint4*>(row + column_of(i)));
#pragma unroll
                for (int part = 0; x.residual && part < N / 4; part++)
                    more[i][part] = load_l2(reinterpret_cast<const uint4*>(
                        x.residual + start + column_of(i) + 4 * part));
            }
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                if (column_of(i) >= k) continue;
                float a[N];
                unpack<T>(raw[i], a);
#pragma unroll
                for (int part = 0; x.residual && part < N / 4; part++) {
                    float (&sum)[4] = *reinterpret_cast<float (*)[4]>(a + 4 * part);
                    float added[4];
                    unpack<float>(more[i][part], added);
#pragma unroll
                    for (int j = 0; j < 4; j++) sum[j] += added[j];
                    if (blockIdx.x == 0)
                        store_vector(x.total + start + column_of(i) + 4 * part, pack<float>(sum));
                }
#pragma unroll
                for (int j = 0; j < N; j++) {
                    squares += a[j] * a[j];
                    a[j] *= weights[i][j];
                }
                store_vector(reinterpret_cast<T*>(to + token * pitch) + column_of(i), pack<T>(a));
            }
            squares = warp_sum(squares);
            if (threadIdx.x % 32 == 0) squares_of[token * CONSUMERS + threadIdx.x / 32] = squares;
        }
    }

    // Of a row, once all warps have left their shares.
    __device__ static float factor(const FewRows<T>& x, const float* squares_of, int token, int k) {
        float squares = 0.0f;
#pragma unroll
        for (int warp = 0; warp < CONSUMERS; warp++)
            squares += squares_of[token * CONSUMERS + warp];
        return rsqrtf(squares / k + x.eps);
    }
};

// See few_gemm. NORMS: whether x is a norm.
template <bool NORMS, typename T, typename Out, int ROWS>
__device__ __forceinline__ void multiply_few(const FewRows<T>& x, const TensorMap& weight,
                                             const T* bias, const T* residual, Out* out, int m,
                                             int n, int k, int stages, int boxes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int BOX = ROWS * 128;  // bytes
    const int stage_bytes = boxes * BOX, pitch = k * sizeof(T) + 16;

    extern __shared__ __align__(1024) char ring[];
    char* const inputs = ring + stages * stage_bytes;
    float* const squares = reinterpret_cast<float*>(inputs + m * pitch);
    float* const sums = squares + FEW * CONSUMERS;
    Barrier* const full = reinterpret_cast<Barrier*>(sums + CONSUMERS * FEW * ROWS);
    Barrier* const empty = full + stages;
    Barrier* const x_there = empty + stages;

    // As in skinny_gemm.cu.
    pdl_launch_dependents();
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    const int tiles = (n + ROWS - 1) / ROWS, first_tile = blockIdx.x, next_tile = gridDim.x;
    const int all_boxes = k / STAGE_DEPTH<T>, steps = (all_boxes + boxes - 1) / boxes;

    if (warp == CONSUMERS) {
        if (lane == 0) {
            prefetch_tensor_map(&weight);
            for (int s = 0; s < stages; s++) {
                init_barrier(full + s, 1);
                init_barrier(empty + s, 1);
            }
            init_barrier(x_there, 1);
            fence_barrier_init();
        }
        __syncthreads();
        if (lane != 0) return;
        // No kernel writes weights: they may be fetched before the preceding kernel has ended.
        int slot = 0, parity = 1, issued = 0;
        const int at_once = early_stages(stage_bytes);
        for (int tile = first_tile; tile < tiles; tile += next_tile)
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                barrier_wait(empty + slot, parity);
                if (issued >= at_once && issued < stages) barrier_wait(full + issued - at_once, 0);
                issued++;
                arrive_expect_tx(full + slot, stage_bytes);
                tma_load_3d_evict_first(ring + slot * stage_bytes, &weight, step * boxes,
                                        tile * ROWS, full + slot);
                if (++slot == stages) {
                    slot = 0;
                    parity ^= 1;
                }
            }
        return;
    }
    __syncthreads();

    FewTokens<T, Out, ROWS, false, false, false, CONSUMERS, CONSUMERS * 32> few{
        nullptr, bias, residual, out, m, n, sums};
    float factor = 1.0f;  // of the token lane / 4
    if constexpr (NORMS) {
        const FewNorms<T> norms(x, k);
        pdl_wait();
        norms.load(x, inputs, pitch, squares, m, k);
        few.begin(first_tile, 0);
        sync_few();
        factor = norms.factor(x, squares, min(lane / 4, m - 1), k);
    } else {
        pdl_wait();
        if (threadIdx.x == 0) copy_few(x, inputs, pitch, x_there, m, k);
        __syncwarp();
        few.begin(first_tile, 0);
        barrier_wait(x_there, 0);
    }
    // Of this lane's row of ldmatrix: of the weight, in both halves of a swizzled row, and of x; in
    // the place of tokens that there are not the last one.
    const int row = lane % 8;
    const int places[2] = {row * 128 + (lane / 8 ^ row) * 16,
                           row * 128 + (4 + lane / 8 ^ row) * 16};
    const unsigned tokens = shared_address(inputs + min(row, m - 1) * pitch + lane / 8 * 16);
    int slot = warp, parity = 0, step = warp;
    for (int tile = first_tile; tile < tiles; tile += next_tile, step -= steps) {
        float acc[ROWS / 8][4] = {};
        for (; step < steps; step += CONSUMERS) {
            barrier_wait(full + slot, parity);
            const unsigned rows = shared_address(ring + slot * stage_bytes);
            const int count = min(boxes, all_boxes - step * boxes);
            for (int box = 0; box < count; box++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    unsigned a[4];
                    ptx::load_matrices(a, tokens + (step * boxes + box) * 128 + half * 64);
                    const unsigned first[4] = {a[0], 0, a[1], 0}, second[4] = {a[2], 0, a[3], 0};
#pragma unroll
                    for (int g = 0; g < ROWS / 8; g++) {
                        unsigned b[4];
                        ptx::load_matrices(b, rows + box * BOX + g * ATOM * 128 + places[half]);
                        ptx::mma<T>(acc[g], first, b[0], b[1]);
                        ptx::mma<T>(acc[g], second, b[2], b[3]);
                    }
                }
            }
            __syncwarp();
            if (lane == 0) arrive(empty + slot);
            if ((slot += CONSUMERS) >= stages) {
                slot -= stages;
                parity ^= 1;
            }
        }
        if (tile != first_tile) {
            sync_few();  // the sums of the tile before have been read
            few.begin(tile, 0);
        }
        if (lane / 4 < m) {
            float* const to = sums + (warp * FEW + lane / 4) * ROWS + lane % 4 * 2;
#pragma unroll
            for (int g = 0; g < ROWS / 8; g++)
                *reinterpret_cast<float2*>(to + 8 * g) =
                    make_float2(acc[g][0] * factor, acc[g][1] * factor);
        }
        sync_few();
        few.finish(tile, 0);
    }
#endif
}

// out[m, n] = x[m, k] @ weight[n, k]^T + bias + residual, k a multiple of 64, m <= FEW; rows of x
// are `stride` values apart. bias and residual may be null; out may alias the residual. A tile has
// ROWS rows of the weight; block b computes tiles b, b + blocks and so on. A stage of the ring has
// `boxes` boxes of ROWS rows by 128 bytes; a copy of the map has as many. stages: of the ring, a
// multiple of CONSUMERS, so that a stage's slot is always the same warp's: it waits for no phase of
// a barrier but the next one. Dynamic shared memory: stages * (boxes * ROWS * 128 + 16), m * (k +
// 8) * 2, (FEW * CONSUMERS + CONSUMERS * FEW * ROWS) * 4, and 8 bytes.
template <typename T, typename Out, int ROWS>
__global__ void __launch_bounds__((CONSUMERS + 1) * 32, 1)
    few_gemm(const T* x, int stride, const __grid_constant__ TensorMap weight, const T* bias,
             const T* residual, Out* out, int m, int n, int k, int stages, int boxes) {
    const FewRows<T> rows = {x, stride};
    multiply_few<false, T, Out, ROWS>(rows, weight, bias, residual, out, m, n, k, stages, boxes);
}

// The same of the norm of x + residual, [m, k] each, k up to CONSUMERS * 32 * VECTORS vectors of 16
// bytes; that sum -> total. residual and total: both null for the norm of x, otherwise of different
// memory. What is rounded to T is the norm times the root of the mean of squares.
template <typename T, int ROWS>
__global__ void __launch_bounds__((CONSUMERS + 1) * 32, 1)
    norm_few_gemm(const T* x, int stride, const float* residual, float* total, const float* norm,
                  float eps, const __grid_constant__ TensorMap weight, const T* bias, T* out, int m,
                  int n, int k, int stages, int boxes) {
    const FewRows<T> rows = {x, stride, norm, eps, residual, total};
    multiply_few<true, T, T, ROWS>(rows, weight, bias, nullptr, out, m, n, k, stages, boxes);
}
