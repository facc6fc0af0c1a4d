// The experts of each token, and the plan of the experts' products.
//
// Rows of the products are sorted by expert, then by token. Ranks are counted in bit masks of
// tokens, so that nothing depends on the order in which blocks run.
#include "moe/choice.cuh"
#include "moe/plan.cuh"

typedef unsigned long long Mask;  // of the tokens of a block

// Plan from the number of rows of each expert in each block of tokens: by one block of threads.
// `shared` has an int for each thread, and two for each expert.
__device__ inline void make_plan(const Plan& plan, int num_experts, int num_blocks, int* shared) {
    const int padded = (num_experts + 31) / 32 * 32, slices = blockDim.x / padded;
    const int expert = threadIdx.x % padded, slice = threadIdx.x / padded;
    const bool active = slice < slices && expert < num_experts;
    const int each = (num_blocks + slices - 1) / slices;
    const int first = min(slice * each, num_blocks), last = min(first + each, num_blocks);
    // Of few blocks the numbers stay in registers: stores between loads would be waited for.
    constexpr int MAX_KEPT = 8;
    const bool keeps = each <= MAX_KEPT;
    int kept[MAX_KEPT];
    int* const partial = shared;  // [slices][padded]
    int* const row_of = shared + blockDim.x;
    int* const tile_of = row_of + padded;

    int sum = 0;
    if (active && keeps) {
#pragma unroll
        for (int i = 0; i < MAX_KEPT; i++)
            kept[i] =
                first + i < last ? load_l2(plan.starts + (first + i) * num_experts + expert) : 0;
#pragma unroll
        for (int i = 0; i < MAX_KEPT; i++) sum += kept[i];
    } else if (active) {
#pragma unroll 4
        for (int b = first; b < last; b++) sum += load_l2(plan.starts + b * num_experts + expert);
    }
    if (slice < slices) partial[slice * padded + expert] = sum;
    __syncthreads();
    int before = 0, total = 0;  // rows of this expert in the slices before, and in all
    if (active) {
        for (int s = 0; s < slices; s++) {
            const int rows = partial[s * padded + expert];
            if (s < slice) before += rows;
            total += rows;
        }
    }
    if (slice == 0) {
        row_of[expert] = total;
        tile_of[expert] = (total + plan.tile - 1) / plan.tile;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const int num_tiles = first_rows(row_of, tile_of, padded);
        if (threadIdx.x == 0) *plan.num_tiles = num_tiles;
    }
    __syncthreads();
    if (!active) return;
    int row = row_of[expert] + before;
    if (keeps) {
#pragma unroll
        for (int i = 0; i < MAX_KEPT; i++) {
            if (first + i < last) plan.starts[(first + i) * num_experts + expert] = row;
            row += kept[i];
        }
    } else {
#pragma unroll 1
        for (int b = first; b < last; b++) {
            int* const place = plan.starts + b * num_experts + expert;
            const int rows = load_l2(place);
            *place = row;
            row += rows;
        }
    }
#pragma unroll 1
    for (int i = slice; i * plan.tile < total; i += slices)
        plan.tiles[tile_of[expert] + i] = tile_at(expert, row_of[expert], total, i, plan.tile);
}

// Choose the experts of each token and plan their products; see ops/moe/routing.py. A block has up
// to `block_tokens` tokens, 64 at most, a warp for one or more, and at least as many threads as
// experts. The block that ends last makes the plan; `arrived` is 0 before and after. Dynamic shared
// memory: ints, 4 * padded + blockDim.x + block_tokens * top_k, and padded floats for each warp
// with groups, where padded is num_experts rounded up to 32.
template <int PER_LANE>
__global__ void __launch_bounds__(1024, 1)
    route(const float* logits, int stride, int parts, int rows, const float* bias,
          const float* select_bias, int shared_gate, int num_shared, int num_experts, int top_k,
          int flags, int num_groups, int top_groups, float scale, int num_tokens, int* experts,
          float* weights, int* positions, int* starts, Tile* tiles, int* num_tiles, int tile,
          int block_tokens, unsigned* arrived) {
    const RouterParams router = {bias,        select_bias, num_experts, top_k,      parts,
                                 rows,        stride,      flags,       num_groups, top_groups,
                                 shared_gate, num_shared,  scale};
    const int all_experts = router.all_experts(), all_top_k = router.all_top_k();
    const Plan plan = {tiles, num_tiles, starts, tile};
    extern __shared__ __align__(8) int memory[];
    const int padded = router.padded_experts();
    Mask* const masks = reinterpret_cast<Mask*>(memory);  // of tokens, by expert
    int* const chosen = memory + 2 * padded;
    int* const scratch = chosen + block_tokens * all_top_k;
    float* const ranks = reinterpret_cast<float*>(scratch + blockDim.x + 2 * padded);
    __shared__ bool is_last;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    const int first = blockIdx.x * block_tokens, count = min(block_tokens, num_tokens - first);
    for (int e = threadIdx.x; e < padded; e += blockDim.x) masks[e] = 0;
    pdl_wait();
    // After the wait: what this kernel writes is history for all kernels after the next one.
    pdl_launch_dependents();
    __syncthreads();
    for (int t = warp; t < count; t += num_warps) {
        const int expert = choose_for<PER_LANE>(logits, router, first + t, ranks + warp * padded,
                                                weights);
        if (lane < all_top_k) {
            atomicOr(masks + expert, 1ull << t);
            chosen[t * all_top_k + lane] = expert;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * all_top_k; i += blockDim.x) {
        const int expert = chosen[i];
        experts[first * all_top_k + i] = expert;
        positions[first * all_top_k + i] =
            __popcll(masks[expert] & ((1ull << i / all_top_k) - 1));
    }
    for (int e = threadIdx.x; e < all_experts; e += blockDim.x)
        starts[blockIdx.x * all_experts + e] = __popcll(masks[e]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) *arrived = 0;
    make_plan(plan, all_experts, gridDim.x, scratch);
}
