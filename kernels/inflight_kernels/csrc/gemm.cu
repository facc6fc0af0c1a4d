// A linear layer for few tokens: the weights flow through once, as fast as memory gives them.
//
// The product is turned around: 64 rows of the weight are the tensor core's M side, the tokens its
// N side, so that few tokens waste little. A block has one warp that keeps a ring of steps in
// shared memory full with bulk copies, across the ends of tiles, and a warpgroup that multiplies
// out of it, two halves of 64 rows. Blocks have equal shares of all steps of all tiles ("stream-K",
// arXiv:2301.03598). A tile that several share is added up by whoever of them is last.
#include "gemm.cuh"

constexpr int WARPS = 4;  // that multiply
constexpr int HALF = 64;  // rows of the weight in half a tile
constexpr int ROWS = 2 * HALF;
constexpr int DEPTH = 64;  // columns in a step

template <typename Out>
__device__ Out narrow(float value);
template <>
__device__ inline float narrow<float>(float value) { return value; }
template <>
__device__ inline __half narrow<__half>(float value) { return __float2half_rn(value); }
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// How the steps of all tiles, tile by tile, are shared among the blocks.
struct Shares {
    int steps;  // of a tile
    long long total;

    // First step of a block.
    __device__ long long begin(long long block) const { return block * total / gridDim.x; }
    // Block that has a step.
    __device__ int owner(long long step) const {
        return static_cast<int>(((step + 1) * gridDim.x - 1) / total);
    }
};

// Put this warp's part of a tile with those of the other blocks; a block has at most two. True for
// the last of them, which gets the sum of all in `acc`, added in the order of the blocks.
template <int TOKENS>
__device__ bool add_parts(float (&acc)[2][TOKENS / 2], const Shares& shares, int tile,
                          float* partials, int* counters, int m) {
    constexpr int PARTS = TOKENS / 8;
    constexpr int AT_ONCE = 64 / TOKENS;  // blocks whose parts are on their way together
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long begin = static_cast<long long>(tile) * shares.steps;
    const int from = shares.owner(begin), to = shares.owner(begin + shares.steps - 1);
    const auto part = [&](int block) {
        const bool is_first = shares.begin(block) / shares.steps == tile;
        const long long index = (2 * block + (is_first ? 0 : 1)) * WARPS + warp;
        return reinterpret_cast<float4*>(partials) + index * (2 * PARTS * 32) + lane;
    };
    float4* const mine = part(blockIdx.x);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < PARTS; j++)
            if (j * 8 < m)
                __stcg(mine + (h * PARTS + j) * 32,
                       make_float4(acc[h][4 * j], acc[h][4 * j + 1], acc[h][4 * j + 2],
                                   acc[h][4 * j + 3]));
    __threadfence();
    __syncwarp();
    int arrived = 0;
    if (lane == 0) {
        int* const counter = counters + from * WARPS + warp;
        arrived = atomicAdd(counter, 1);
        if (arrived == to - from) *counter = 0;  // as the next launch wants it
    }
    if (__shfl_sync(FULL_WARP, arrived, 0) != to - from) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) acc[0][i] = acc[1][i] = 0.0f;
    for (int block = from; block <= to; block += AT_ONCE) {
        float4 more[AT_ONCE][2][PARTS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const float4* const theirs = part(min(block + i, to));
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int j = 0; j < PARTS; j++)
                    more[i][h][j] = j * 8 < m && block + i <= to
                                        ? __ldcg(theirs + (h * PARTS + j) * 32)
                                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int j = 0; j < PARTS; j++) {
                    acc[h][4 * j] += more[i][h][j].x;
                    acc[h][4 * j + 1] += more[i][h][j].y;
                    acc[h][4 * j + 2] += more[i][h][j].z;
                    acc[h][4 * j + 3] += more[i][h][j].w;
                }
    }
    return true;
}

// out[m, n'] = epilogue(x[m, k] @ weight[n, k]^T), k a multiple of 8, m <= TOKENS.
// Epilogue: + bias; GATED, with a weight that is gate | up: silu(gate) * up, n' = n / 2; + residual
// (bias and residual may be null).
// Boxes of the maps: [TOKENS, DEPTH] of x, [HALF, DEPTH] of weight. `partials` has room for
// 2 * blocks * ROWS * TOKENS floats, and `counters`, WARPS * blocks, are 0 before and after.
// Dynamic shared memory: 1024 + STAGES * ((ROWS + TOKENS) * DEPTH * 2 + 16) bytes.
// `prefetch`: steps after the first STAGES whose weights go to L2 while the kernel before runs.
template <typename T, typename Out, int TOKENS, int STAGES, bool GATED>
__global__ void __launch_bounds__((WARPS + 1) * 32, 1)
    skinny_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                const T* bias, const T* residual, Out* out, float* partials, int* counters, int m,
                int n, int k, int prefetch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int STAGE = (ROWS + TOKENS) * DEPTH;
    constexpr int TILE = GATED ? HALF : ROWS;  // of the output
    constexpr int PARTS = TOKENS / 8;

    extern __shared__ char memory[];
    T* const ring = reinterpret_cast<T*>(memory + (-shared_address(memory) & 1023));
    Barrier* const full = reinterpret_cast<Barrier*>(ring + STAGES * STAGE);
    Barrier* const empty = full + STAGES;

    // At once: a small kernel fits beside, and the next of this kind takes over each multiprocessor
    // as it gets free, its weights on their way.
    launch_next();
    // Of a lane, so that the compiler sees that warps do not diverge.
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            init_barrier(full + s, 1);
            init_barrier(empty + s, WARPS);
        }
        publish_barriers();
    }
    __syncthreads();

    const int width = GATED ? n / 2 : n;
    Shares shares;
    shares.steps = (k + DEPTH - 1) / DEPTH;
    shares.total = static_cast<long long>((width + TILE - 1) / TILE) * shares.steps;
    const long long first = shares.begin(blockIdx.x), last = shares.begin(blockIdx.x + 1);
    const int first_tile = static_cast<int>(first / shares.steps);
    const int first_step = static_cast<int>(first % shares.steps);
    const int count = static_cast<int>(last - first);

    if (warp == WARPS) {
        if (lane != 0) return;
        prefetch_map(&weight);
        prefetch_map(&x);
        int tile = first_tile, step = first_step;
        const auto advance = [&] {
            if (++step == shares.steps) {
                step = 0;
                tile++;
            }
        };
        // Halves follow each other, or are gate and up.
        const int second_half = GATED ? width : HALF;
        const auto copy_weight = [&](int slot) {
            T* const to = ring + slot * STAGE;
            const int row = tile * TILE, column = step * DEPTH;
            arrive_expecting(full + slot, STAGE * sizeof(T));
            copy_box_once(to, &weight, row, column, full + slot);
            copy_box_once(to + HALF * DEPTH, &weight, row + second_half, column, full + slot);
        };
        const auto copy_x = [&](int slot, int at) {
            copy_box(ring + slot * STAGE + ROWS * DEPTH, &x, 0, at * DEPTH, full + slot);
        };
        // Weights are nobody's output: they may be fetched before the kernel before has ended.
        const int ahead = min(count, STAGES);
        for (int s = 0; s < ahead; s++, advance()) copy_weight(s);
        const int tile_now = tile, step_now = step;
        for (int s = ahead; s < min(count, STAGES + prefetch); s++, advance()) {
            prefetch_box(&weight, tile * TILE, step * DEPTH);
            prefetch_box(&weight, tile * TILE + second_half, step * DEPTH);
        }
        tile = tile_now;
        step = step_now;
        wait_for_previous();
        for (int s = 0; s < ahead; s++) copy_x(s, (first_step + s) % shares.steps);
        for (int s = ahead, slot = 0, parity = 0; s < count; s++, advance()) {
            wait_for(empty + slot, parity);
            copy_weight(slot);
            copy_x(slot, step);
            if (++slot == STAGES) {
                slot = 0;
                parity ^= 1;
            }
        }
        return;
    }

    wait_for_previous();
    const int g = lane / 4, q = lane % 4;
    int slot = 0, parity = 0, tile = first_tile;
    for (int done = 0, end = shares.steps - first_step; done < count; tile++, end += shares.steps) {
        float acc[2][TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) acc[0][i] = acc[1][i] = 0.0f;
        const int begin = done;
        for (; done < min(end, count); done++) {
            wait_for(full + slot, parity);
            const T* const stage = ring + slot * STAGE;
            const unsigned long long low = describe(stage);
            const unsigned long long high = describe(stage + HALF * DEPTH);
            const unsigned long long tokens = describe(stage + ROWS * DEPTH);
            pin(acc[0]);
            pin(acc[1]);
            begin_products();
#pragma unroll
            for (int d = 0; d < DEPTH / 16; d++) {
                multiply_add<T, TOKENS>(acc[0], low + 2 * d, tokens + 2 * d);
                multiply_add<T, TOKENS>(acc[1], high + 2 * d, tokens + 2 * d);
            }
            finish_products();
            pin(acc[0]);
            pin(acc[1]);
            if (lane == 0) arrive(empty + slot);
            if (++slot == STAGES) {
                slot = 0;
                parity ^= 1;
            }
        }

        // Warps go on by themselves from here to the next tile.
        bool complete = true;
        if (done - begin < shares.steps)
            complete = add_parts<TOKENS>(acc, shares, tile, partials, counters, m);

        const auto store = [&](float value, int token, int row) {
            const long long target = static_cast<long long>(token) * width + row;
            if (residual) value += static_cast<float>(residual[target]);
            out[target] = narrow<Out>(value);
        };
        const int row = tile * TILE + warp * 16 + g;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int here = row + e / 2 * 8, there = GATED ? here + width : here + HALF;
            float bias_here = 0.0f, bias_there = 0.0f;
            if (bias && here < width) bias_here = static_cast<float>(bias[here]);
            if (bias && (GATED ? here < width : there < width))
                bias_there = static_cast<float>(bias[there]);
#pragma unroll
            for (int j = 0; j < PARTS; j++) {
                const int token = j * 8 + q * 2 + e % 2;
                if (token >= m || !complete) continue;
                const float a = acc[0][4 * j + e] + bias_here, b = acc[1][4 * j + e] + bias_there;
                if (GATED) {
                    if (here < width) store(a / (1.0f + __expf(-a)) * b, token, here);
                } else {
                    if (here < width) store(a, token, here);
                    if (there < width) store(b, token, there);
                }
            }
        }
    }
#endif
}
