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

// out[m, n] = x[m, k] @ weight[n, k]^T + bias + residual, k a multiple of 64, m <= FEW; rows of x
// are `stride` values apart. bias and residual may be null; out may alias the residual. A tile has
// ROWS rows of the weight; block b computes tiles b, b + blocks and so on. A stage of the ring has
// `boxes` boxes of ROWS rows by 128 bytes; a copy of the map has as many. stages: of the ring, a
// multiple of CONSUMERS, so that a stage's slot is always the same warp's: it waits for no phase of
// a barrier but the next one. Dynamic shared memory: stages * (boxes * ROWS * 128 + 16), m * (k +
// 8) * 2 and CONSUMERS * FEW * ROWS * 4 bytes.
template <typename T, typename Out, int ROWS>
__global__ void __launch_bounds__((CONSUMERS + 1) * 32, 1)
    few_gemm(const T* x, int stride, const __grid_constant__ TensorMap weight, const T* bias,
             const T* residual, Out* out, int m, int n, int k, int stages, int boxes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int BOX = ROWS * 128;  // bytes
    const int stage_bytes = boxes * BOX, pitch = k * sizeof(T) + 16;

    extern __shared__ __align__(1024) char ring[];
    char* const inputs = ring + stages * stage_bytes;
    float* const sums = reinterpret_cast<float*>(inputs + m * pitch);
    Barrier* const full = reinterpret_cast<Barrier*>(sums + CONSUMERS * FEW * ROWS);
    Barrier* const empty = full + stages;

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
            fence_barrier_init();
        }
        __syncthreads();
        if (lane != 0) return;
        // No kernel writes weights: they may be fetched before the preceding kernel has ended.
        int slot = 0, parity = 1;
        for (int tile = first_tile; tile < tiles; tile += next_tile)
            for (int step = 0; step < steps; step++) {
                barrier_wait(empty + slot, parity);
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
    const auto sync = [] { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * 32) : "memory"); };
    pdl_wait();
    few.begin(first_tile, 0);
    const int vectors = k / VECTOR<T>;
    for (int i = threadIdx.x; i < m * vectors; i += CONSUMERS * 32) {
        const int token = i / vectors, column = i % vectors * VECTOR<T>;
        const T* const from = x + static_cast<long long>(token) * stride + column;
        store_vector(reinterpret_cast<T*>(inputs + token * pitch) + column,
                     load_l2(reinterpret_cast<const uint4*>(from)));
    }
    sync();
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
            sync();  // the sums of the tile before have been read
            few.begin(tile, 0);
        }
        if (lane / 4 < m) {
            float* const to = sums + (warp * FEW + lane / 4) * ROWS + lane % 4 * 2;
#pragma unroll
            for (int g = 0; g < ROWS / 8; g++)
                *reinterpret_cast<float2*>(to + 8 * g) = make_float2(acc[g][0], acc[g][1]);
        }
        sync();
        few.finish(tile, 0);
    }
#endif
}
