// The experts of each token, and the plan of the experts' products.
//
// Rows of the products are sorted by expert, then by token. Ranks are counted in bit masks of
// tokens, so that nothing depends on the order in which blocks run.
#include "moe/choice.cuh"
#include "moe/tile.cuh"

typedef unsigned long long Mask;  // of the tokens of a block

// Plan from the number of rows of each expert in each block of tokens: by one block of threads. If
// there is one block of tokens, these numbers are those of bits in `masks`. `shared` has an int for
// each thread, and two for each expert: the first of these become the first row of each expert.
__device__ inline int* make_plan(const Plan& plan, const Mask* masks, int num_experts,
                                 int num_blocks, int* shared) {
    const int padded = (num_experts + 31) / 32 * 32, slices = blockDim.x / padded;
    const int expert = threadIdx.x % padded, slice = threadIdx.x / padded;
    const bool active = slice < slices && expert < num_experts;
    const int each = (num_blocks + slices - 1) / slices;
    const int first = min(slice * each, num_blocks), last = min(first + each, num_blocks);
    int* const partial = shared;  // [slices][padded]
    int* const row_of = shared + blockDim.x;
    int* const tile_of = row_of + padded;

    int sum = 0;
    if (active && num_blocks == 1) {
        sum = slice == 0 ? __popcll(masks[expert]) : 0;
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
    if (slice == 0) row_of[expert] = active ? total : 0;
    __syncthreads();
    if (threadIdx.x < 32) {
        int rows_before = 0, tiles_before = 0;
        for (int e = threadIdx.x; e < padded; e += 32) {
            const int own_rows = row_of[e], own_tiles = (own_rows + plan.tile - 1) / plan.tile;
            int rows = own_rows, tiles = own_tiles;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int more_rows = __shfl_up_sync(FULL_WARP, rows, distance);
                const int more_tiles = __shfl_up_sync(FULL_WARP, tiles, distance);
                if (threadIdx.x >= distance) {
                    rows += more_rows;
                    tiles += more_tiles;
                }
            }
            row_of[e] = rows_before + rows - own_rows;
            tile_of[e] = tiles_before + tiles - own_tiles;
            rows_before += __shfl_sync(FULL_WARP, rows, 31);
            tiles_before += __shfl_sync(FULL_WARP, tiles, 31);
        }
        if (threadIdx.x == 0) *plan.num_tiles = tiles_before;
    }
    __syncthreads();
    if (!active) return row_of;
    if (num_blocks > 1) {
        int row = row_of[expert] + before;
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
        plan.tiles[tile_of[expert] + i] = {expert, row_of[expert] + i * plan.tile,
                                           min(plan.tile, total - i * plan.tile), 0};
    return row_of;
}

// Choose the experts of each token and plan their products; see ops/moe.py. A block has up to
// `block_tokens` tokens, 64 at most, a warp for one or more, and at least as many threads as
// experts. The block that ends last makes the plan; `arrived` is 0 before and after. Dynamic shared
// memory: ints, 4 * padded + blockDim.x + block_tokens * top_k, and padded floats for each warp
// with groups, where padded is num_experts rounded up to 32.
template <int PER_LANE>
__global__ void __launch_bounds__(1024)
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
    const int padded = (all_experts + 31) / 32 * 32;
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
        const float* const own = logits + static_cast<long long>(first + t) * stride;
        const auto logit = [own](int column) { return load_l2(own + column); };
        float weight, shared;
        const int expert =
            choose_all_of<PER_LANE>(logit, router, ranks + warp * padded, weight, shared);
        float* const to = weights + static_cast<long long>(first + t) * (all_top_k + 1);
        if (lane < all_top_k) {
            atomicOr(masks + expert, 1ull << t);
            chosen[t * all_top_k + lane] = expert;
            to[lane] = weight;
        }
        if (lane == 0) to[all_top_k] = shared;
    }
    __syncthreads();
    const int* start_of = nullptr;
    if (gridDim.x == 1) start_of = make_plan(plan, masks, all_experts, 1, scratch);
    for (int i = threadIdx.x; i < count * all_top_k; i += blockDim.x) {
        const int expert = chosen[i];
        const int rank = __popcll(masks[expert] & ((1ull << i / all_top_k) - 1));
        experts[first * all_top_k + i] = expert;
        positions[first * all_top_k + i] = start_of ? start_of[expert] + rank : rank;
    }
    if (gridDim.x == 1) return;
    for (int e = threadIdx.x; e < all_experts; e += blockDim.x)
        starts[blockIdx.x * all_experts + e] = __popcll(masks[e]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) *arrived = 0;
    make_plan(plan, masks, all_experts, gridDim.x, scratch);
}
