// A linear layer for some tokens whose weight has 4, 6 or 8 bits a value and scales of groups, while
// x is bfloat16, with Hopper's wgmma; see grouped_hopper.cuh.
//
// A tile is TOKENS tokens by 64 * GROUPS rows of the weight, half of them gate and half up if gated.
// In a block, a producer warp keeps a ring of stages in shared memory full, and TEAMS teams of GROUPS
// warpgroups multiply from it, 64 rows each. Teams take turns with the stages: one converts codes
// while the tensor cores have those of another. A cluster of SPLIT blocks computes a tile, a part of
// the columns each, so that weights with few rows keep all multiprocessors busy. The first blocks'
// sums come first, and in a block those of the first team.
#include "linear/gemm_hopper.cuh"
#include "linear/grouped_hopper.cuh"

namespace grouped {

using namespace gemm;  // cluster operations

constexpr int X_BYTES = COLUMNS * 2;    // of a token in a stage
constexpr int GROUP_TILES = BOX_TILES;  // of 16 rows, of a consumer warpgroup

// Bytes of a stage: x, then the records, rounded up to atoms of the swizzle.
template <class R, int TOKENS, int GROUPS>
constexpr int STAGE_BYTES =
    (TOKENS * X_BYTES + GROUPS * GROUP_TILES * R::BYTES + 1023) / 1024 * 1024;

// Barrier of all threads of a cluster of SPLIT blocks; their writes are visible afterwards.
template <int SPLIT>
__device__ inline void sync_all() {
    if constexpr (SPLIT == 1)
        __syncthreads();
    else
        cluster_sync_release();
}

}  // namespace grouped

// out[m, n'] = epilogue(x[m, k] @ weight[n, k]^T), k a multiple of 8.
// Epilogue: + bias; if gated, with a weight of gate | up: silu(gate) * up, n' = n / 2, a multiple of
// 16; + residual (bias and residual may be null; out may alias the residual, and is float if
// `wide`).
// Cluster c computes the tokens of tile c % token_tiles and the rows of tile c / token_tiles. Boxes
// of the maps: TOKENS rows of 128 bytes of x, BOX_TILES records. `values` is null unless codes are
// indices.
// Threads: GROUPS * TEAMS warpgroups and a warp. Dynamic shared memory: 1024 + the larger of STAGES
// * STAGE_BYTES and TEAMS * TOKENS * (64 * GROUPS + 4) floats, + STAGES * 16 bytes.
template <class R, int TOKENS, int GROUPS, int TEAMS, int STAGES, int SPLIT>
__global__ void __cluster_dims__(SPLIT, 1, 1)
    __launch_bounds__(128 * GROUPS * TEAMS + 32, TOKENS <= 64 && TEAMS == 1 ? 2 : 1)
    grouped_product(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap records,
                    const grouped::Table* values, const __nv_bfloat16* bias,
                    const __nv_bfloat16* residual, void* out, int m, int n, int k,
                    int token_tiles, bool gated, bool wide) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace grouped;
    constexpr int STAGE = STAGE_BYTES<R, TOKENS, GROUPS>, TILES = GROUPS * GROUP_TILES;
    constexpr int HEIGHT = 64 * GROUPS, PITCH = HEIGHT + 4;
    constexpr int WARPS = GROUPS * TEAMS * 4;  // that multiply
    constexpr int SUM_BYTES = TEAMS * TOKENS * PITCH * 4;
    constexpr int MAIN_BYTES = STAGES * STAGE > SUM_BYTES ? STAGES * STAGE : SUM_BYTES;

    extern __shared__ char memory[];
    char* const ring = memory + (-shared_address(memory) & 1023);
    Barrier* const full = reinterpret_cast<Barrier*>(ring + (MAIN_BYTES + 15) / 16 * 16);
    Barrier* const empty = full + STAGES;

    pdl_launch_dependents();
    // Read from a lane, so that the compiler knows that warps do not diverge.
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    const int rank = SPLIT > 1 ? rank_in_cluster() : 0;
    const int tile = blockIdx.x / SPLIT;
    const int first_token = tile % token_tiles * TOKENS;
    const int width = gated ? n / 2 : n, columns = gated ? HEIGHT / 2 : HEIGHT;  // of out
    const int first = tile / token_tiles * columns;
    const int chunks = (k + COLUMNS - 1) / COLUMNS;
    const int from = rank * chunks / SPLIT, count = (rank + 1) * chunks / SPLIT - from;
    if (warp == WARPS && lane == 0) {
        prefetch_tensor_map(&x);
        prefetch_tensor_map(&records);
        for (int s = 0; s < STAGES; s++) {
            init_barrier(full + s, 1);
            init_barrier(empty + s, GROUPS * 4);
        }
        fence_barrier_init();
    }
    __syncthreads();

    float sums[TOKENS / 2];
    int own_count = 0;  // of the warp's stages
    if (warp >= WARPS) {
        static_assert(GROUPS % 2 == 0, "gate and up have groups of their own");
        const auto copy_weight = [&](int slot, int step) {
            arrive_expect_tx(full + slot, TOKENS * X_BYTES + TILES * R::BYTES);
            char* const target = ring + slot * STAGE + TOKENS * X_BYTES;
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const int half = gated ? group / (GROUPS / 2) : 0;
                const int row = half * width + first + (group - half * (GROUPS / 2)) * 64;
                copy_records(target + group * GROUP_TILES * R::BYTES, &records, row / ROWS,
                             from + step, full + slot);
            }
        };
        const auto copy_x = [&](int slot, int step) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                tma_load(ring + slot * STAGE + half * TOKENS * 128, &x, first_token,
                         (from + step) * COLUMNS + half * 64, full + slot);
        };
        if (lane == 0) {
            // No kernel writes weights: they may be fetched before the preceding kernel has ended.
            const int ahead = min(STAGES, count);
            for (int s = 0; s < ahead; s++) copy_weight(s, s);
            pdl_wait();
            for (int s = 0; s < ahead; s++) copy_x(s, s);
            for (int s = ahead, slot = 0, parity = 0; s < count; s++) {
                barrier_wait(empty + slot, parity);
                copy_weight(slot, s);
                copy_x(slot, s);
                if (++slot == STAGES) {
                    slot = 0;
                    parity ^= 1;
                }
            }
        }
        __syncwarp();
    } else {
        Table table = {};
        if constexpr (R::CODES == TABLE) table = *values;
        pdl_wait();
        const int team = warp / (GROUPS * 4);
        const unsigned record =
            shared_address(ring) + TOKENS * X_BYTES + warp % (GROUPS * 4) * R::BYTES;
        const auto release = [&](int slot) {
            if (lane == 0) arrive(empty + slot);
        };
        own_count = (count - team + TEAMS - 1) / TEAMS;
        int slot = team, parity = 0;
        multiply_records<R, TOKENS, TOKENS, STAGE, STAGES, TEAMS>(
            sums, record, smem_descriptor(ring), table, full, slot, parity, own_count, true,
            release);
    }
    // Sums [TEAMS, TOKENS, PITCH] take the place of the ring, whose stages have all been read.
    float* const own = reinterpret_cast<float*>(ring);
    __syncthreads();
    if (warp < WARPS) {
        float* const place = own + warp / (GROUPS * 4) * TOKENS * PITCH +
                             warp % (GROUPS * 4) * ROWS + lane / 4;
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++)
            place[(i / 4 * 8 + lane % 4 * 2 + i % 2) * PITCH + i % 4 / 2 * 8] =
                own_count > 0 ? sums[i] : 0.0f;
    }
    sync_all<SPLIT>();

    pdl_wait();
    // Each block of a cluster finishes some tokens: vectors of 4 columns.
    const int num_tokens = min(TOKENS, m - first_token), vectors = columns / 4;
    for (int i = threadIdx.x; i < (num_tokens - rank + SPLIT - 1) / SPLIT * vectors;
         i += 32 * WARPS + 32) {
        const int token = i / vectors * SPLIT + rank, column = i % vectors * 4;
        if (first + column >= width) continue;
        const auto sum_of = [&](int tile_row, int weight_row, float(&to)[4]) {
            const float* const place = own + token * PITCH + tile_row;
#pragma unroll
            for (int e = 0; e < 4; e++) to[e] = 0.0f;
#pragma unroll
            for (int r = 0; r < SPLIT * TEAMS; r++) {
                const float4* const from =
                    reinterpret_cast<const float4*>(place + r % TEAMS * TOKENS * PITCH);
                const float4 part = SPLIT == 1 ? *from : load_from(from, r / TEAMS);
                to[0] += part.x, to[1] += part.y, to[2] += part.z, to[3] += part.w;
            }
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (bias && first + column + e < width)
                    to[e] += static_cast<float>(bias[weight_row + e]);
        };
        float value[4];
        sum_of(column, first + column, value);
        if (gated) {
            float up[4];
            sum_of(columns + column, width + first + column, up);
#pragma unroll
            for (int e = 0; e < 4; e++) value[e] = silu_mul(value[e], up[e]);
        }
        const long long place =
            static_cast<long long>(first_token + token) * width + first + column;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (first + column + e >= width) continue;
            if (residual) value[e] += static_cast<float>(residual[place + e]);
            store_sum(out, place + e, value[e], wide);
        }
    }
    // A block's sums must not go before the others have read them.
    if (SPLIT > 1) sync_all<SPLIT>();
#endif
}
