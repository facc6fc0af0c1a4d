// As route.cu, of few tokens: the blocks of a cluster tell each other what they chose, and each
// plans on its own, so that none waits for memory of the GPU.
#include "cluster.cuh"
#include "moe/choice.cuh"
#include "moe/plan.cuh"

constexpr int BLOCKS = 8, BLOCK_TOKENS = 8, MAX_EXPERTS = 512;

// Up to BLOCKS * BLOCK_TOKENS tokens, by one cluster; a warp has one of them. `positions` are
// complete. Threads: one for each expert, and 32 * BLOCK_TOKENS at least. Dynamic shared memory:
// num_experts rounded up to 32 floats for each of these warps with groups.
template <int PER_LANE>
__global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(MAX_EXPERTS)
    route_few(const float* logits, int stride, int parts, int rows, const float* bias,
              const float* select_bias, int shared_gate, int num_shared, int num_experts, int top_k,
              int flags, int num_groups, int top_groups, float scale, int num_tokens, int* experts,
              float* weights, int* positions, Tile* tiles, int* num_tiles, int tile) {
    const RouterParams router = {bias,        select_bias, num_experts, top_k,      parts,
                                 rows,        stride,      flags,       num_groups, top_groups,
                                 shared_gate, num_shared,  scale};
    extern __shared__ float ranks[];
    __shared__ unsigned masks[MAX_EXPERTS];  // of the block's tokens, by expert
    __shared__ int row_of[MAX_EXPERTS], tile_of[MAX_EXPERTS], before_of[MAX_EXPERTS];
    const int all_experts = router.all_experts(), all_top_k = router.all_top_k();
    const int padded = router.padded_experts(), rank = blockIdx.x;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int each = (num_tokens + BLOCKS - 1) / BLOCKS, token = rank * each + warp;
    const bool has_token = warp < each && token < num_tokens;
    if (threadIdx.x < padded) masks[threadIdx.x] = 0;
    pdl_wait();
    // After the wait: what this kernel writes is history for all kernels after the next one.
    pdl_launch_dependents();
    __syncthreads();
    int expert = 0;
    if (has_token) {
        expert = choose_for<PER_LANE>(logits, router, token, ranks + warp * padded, weights);
        if (lane < all_top_k) atomicOr(masks + expert, 1u << warp);
    }
    cluster_sync_release();
    int total = 0;  // rows of this thread's expert
    if (threadIdx.x < padded) {
        int before = 0;
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            const int count = __popc(load_from(masks + threadIdx.x, block));
            if (block < rank) before += count;
            total += count;
        }
        row_of[threadIdx.x] = total;
        tile_of[threadIdx.x] = (total + tile - 1) / tile;
        before_of[threadIdx.x] = before;
    }
    __syncthreads();
    if (warp == 0) {
        const int count = first_rows(row_of, tile_of, padded);
        if (rank == 0 && lane == 0) *num_tiles = count;
    }
    __syncthreads();
    if (has_token && lane < all_top_k) {
        const int pair = token * all_top_k + lane;
        experts[pair] = expert;
        positions[pair] = row_of[expert] + before_of[expert] +
                          __popc(masks[expert] & ((1u << warp) - 1));
    }
    if (rank == 0 && threadIdx.x < padded)
        for (int i = 0; i * tile < total; i++)
            tiles[tile_of[threadIdx.x] + i] =
                tile_at(threadIdx.x, row_of[threadIdx.x], total, i, tile);
    cluster_sync_release();  // others read `masks`
}
