// A linear layer for few tokens: streams the weights once, at memory bandwidth.
//
// In a block, a producer warp keeps a ring of stages in shared memory full with TMA copies, across
// the ends of tiles, and a consumer warpgroup multiplies from it: 64 tokens (padded) by the rows of
// a tile. The number of rows is chosen to keep all multiprocessors busy. If that would be few rows,
// a cluster of two blocks computes a tile, half of its columns each, and the blocks exchange
// partial sums through each other's shared memory.
#include "linear/skinny_few.cuh"
#include "linear/skinny_input.cuh"

template <typename Out>
__device__ void store_pair(Out* to, float a, float b) {
    if constexpr (sizeof(Out) == 2) {
        const float both[2] = {a, b};
        *reinterpret_cast<unsigned*>(to) = Word<Out>::pack(both);
    } else {
        *reinterpret_cast<float2*>(to) = make_float2(a, b);
    }
}

// See skinny_gemm. In: type of the weight, and of x unless it is QUANTIZED here; row_scales is null
// unless it has 8 bits. PAIR: by pairs of blocks.
template <typename In, typename T, typename Out, int ROWS, bool GATED, bool PAIR,
          bool QUANTIZED = false, bool OF_SUMS = false, bool SPREADS = false>
__device__ void mainloop(const Input<T>& x, const TensorMap& weight, const float* row_scales,
                         const T* bias, const T* residual, Out* out, int m, int n, int k,
                         int stages, int spread_bits = 0) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr bool SCALED = sizeof(In) == 1, COPIES_BOTH = SCALED && !QUANTIZED;
    constexpr int DEPTH = STAGE_DEPTH<In>;
    constexpr int HALF = ROWS / 2, COLUMNS = GATED ? HALF : ROWS;  // of out, in a tile
    constexpr int SUMS = PAIR ? ROWS / 4 : ROWS / 2;               // per thread, after the exchange
    // Of few tokens a stage has one atom, which is multiplied as if it were repeated up to 64
    // tokens. Quantised here, they are not in the ring.
    const bool is_few = QUANTIZED || m <= FEW;
    const int stage_values = (ROWS + (QUANTIZED ? 0 : is_few ? ATOM : TOKENS)) * DEPTH;

    extern __shared__ char memory[];
    In* const ring = reinterpret_cast<In*>(memory + (-shared_address(memory) & 1023));
    In* const quantized = ring + stages * stage_values;  // x of all steps, if it is
    float4* const sent = reinterpret_cast<float4*>(
        quantized + (QUANTIZED ? quantized_steps<PAIR>(k) * MAX_QUANTIZED * DEPTH : 0));
    Barrier* const full = reinterpret_cast<Barrier*>(sent + ROWS * (PAIR ? 8 : 2));
    Barrier* const empty = full + stages;
    // Of the weights in the ring's first stages, if they are there before x has been requested.
    Barrier* const early = SCALED ? full : empty + stages;
    float2* const partial = reinterpret_cast<float2*>(empty + stages);

    // Immediately: a small kernel fits alongside, and the next one of this kind takes over each
    // multiprocessor as it becomes free, with its weights in flight.
    pdl_launch_dependents();
    // Read from a lane, so that the compiler knows that warps do not diverge.
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    const int rank = PAIR ? blockIdx.x % 2 : 0;
    const int width = GATED ? n / 2 : n, tiles = (width + COLUMNS - 1) / COLUMNS;
    const int first_tile = PAIR ? blockIdx.x / 2 : blockIdx.x, next_tile = PAIR ? tiles : gridDim.x;
    const int steps = (k + DEPTH - 1) / DEPTH;
    const int first = PAIR ? rank * steps / 2 : 0, last = PAIR ? (rank + 1) * steps / 2 : steps;
    const int box = QUANTIZED ? 0 : (m + 7) / 8 * 8;  // tokens that are copied

    constexpr int WEIGHT_BYTES = ROWS * DEPTH * sizeof(In);  // of a stage
    const int x_bytes = box * DEPTH * sizeof(In);

    // State of the producer thread: stages of all of its tiles, and the next one.
    const int count = (tiles - first_tile + next_tile - 1) / next_tile * (last - first);
    const int ahead = min(count, stages);
    // In 8 bits products of x in the ring are slower if consumers request x (benchmarks/notes.md),
    // and the producer would be late with it, as it waits for weights.
    const int at_once = COPIES_BOTH ? ahead : min(ahead, early_stages(WEIGHT_BYTES));
    int tile = first_tile, step = first;
    const auto copy_weight = [&](int slot, Barrier* barrier, int further_bytes) {
        In* const to = ring + slot * stage_values;
        const int row = tile * COLUMNS;
        arrive_expect_tx(barrier, WEIGHT_BYTES + further_bytes);
        tma_load_evict_first(to, &weight, row, step * DEPTH, barrier);
        // The halves are adjacent, or gate and up.
        tma_load_evict_first(to + HALF * DEPTH, &weight, row + (GATED ? width : HALF), step * DEPTH,
                             barrier);
        if (++step == last) {
            step = first;
            tile += next_tile;
        }
    };
    const auto copy_x = [&](int slot, int at) {
        tma_load(ring + slot * stage_values + ROWS * DEPTH, x.map, 0, at * DEPTH, full + slot);
    };
    if (warp == WARPS && lane == 0) {
        prefetch_tensor_map(&weight);
        if (!QUANTIZED) prefetch_tensor_map(x.map);
        for (int s = 0; s < stages; s++) {
            init_barrier(full + s, 1);
            init_barrier(empty + s, WARPS);
            if (!SCALED) init_barrier(early + s, 1);
        }
        fence_barrier_init();
        // No kernel writes weights: they may be fetched before the preceding kernel has ended.
        for (int s = 0; s < at_once; s++) copy_weight(s, early + s, COPIES_BOTH ? x_bytes : 0);
    } else if (!is_few && warp < WARPS) {
        // Padding tokens are multiplied as well: zeros, which take the least power.
        const int vectors = (TOKENS - box) * DEPTH / VECTOR<In>;
        for (int s = 0; s < stages; s++)
            for (int i = threadIdx.x; i < vectors; i += WARPS * 32)
                store_vector(ring + s * stage_values + (ROWS + box) * DEPTH + i * VECTOR<In>,
                             make_uint4(0, 0, 0, 0));
        fence_async_proxy();
    }
    if (PAIR)
        cluster_sync_release();  // a block must have started before anything is sent to it
    else
        __syncthreads();

    if (warp == WARPS) {
        if (lane != 0) return;
        for (int s = at_once; s < ahead; s++) {
            barrier_wait(early + s - at_once, 0);
            copy_weight(s, early + s, 0);
        }
        if (!QUANTIZED) pdl_wait();
        for (int s = 0; COPIES_BOTH && s < ahead; s++) copy_x(s, first + s % (last - first));
        for (int s = ahead, slot = 0, parity = 0; s < count; s++) {
            barrier_wait(empty + slot, parity);
            const int at = step;
            copy_weight(slot, full + slot, x_bytes);
            if (!QUANTIZED) copy_x(slot, at);
            if (++slot == stages) {
                slot = 0;
                parity ^= 1;
            }
        }
        return;
    }

    const int thread = warp < WARPS ? threadIdx.x : threadIdx.x - 32;  // without the producer
    if (QUANTIZED && x.norm && thread * 32 < k) prefetch_l2(x.norm + thread * 32);
    pdl_wait();
    if constexpr (!SCALED) {
        // By a thread of each warp: the producer may still be waiting for weights.
        for (int s = warp; lane == 0 && s < ahead; s += WARPS) {
            arrive_expect_tx(full + s, x_bytes);
            copy_x(s, first + s % (last - first));
        }
        __syncwarp();
    }
    const unsigned long long rows = smem_descriptor(ring);
    const unsigned long long tokens =
        smem_descriptor(QUANTIZED ? quantized : ring + ROWS * DEPTH, is_few ? 0 : ATOM * 128);
    const int stage_units = stage_values * static_cast<int>(sizeof(In)) / 16;  // of descriptors
    // Of this thread's two tokens.
    float token_scale[2] = {};
    if constexpr (QUANTIZED) {
        token_scale[0] = quantize_input<PAIR ? 4 : 2, OF_SUMS, SPREADS>(
            x, quantized, partial, m, k, first, last, thread, warp * 16 + lane / 4, spread_bits);
        if (warp > WARPS) return;
    } else if constexpr (SCALED) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            token_scale[i] = load_l2(x.scales + min(warp * 16 + lane / 4 + 8 * i, m - 1));
    }
    // Whether results, and the residual, may be read and written by two.
    const auto is_aligned = [](const void* address, int size) {
        return reinterpret_cast<size_t>(address) % (2 * size) == 0;
    };
    const bool in_pairs =
        width % 2 == 0 && is_aligned(out, sizeof(Out)) && is_aligned(residual, sizeof(T));
    FewTokens<T, Out, ROWS, GATED, PAIR, SCALED> few{
        row_scales, bias, residual, out, m, width, reinterpret_cast<float*>(sent)};
    int slot = 0, parity = 0;
    bool is_early = !SCALED;
    for (; tile < tiles; tile += next_tile) {
        if (is_few) few.begin(tile, rank);
        Sum<In> acc[ROWS / 2];
        float whole[ROWS / 2], promoted[SCALED ? ROWS / 2 : 1] = {};
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) acc[i] = 0;
        fence_operand(acc);
        // Scales of this thread's columns, loaded while the product is computed.
        float scales[SCALED ? ROWS / 4 : 1];
        if (SCALED && !is_few) {
#pragma unroll
            for (int i = 0; i < ROWS / 4; i++) {
                const int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
                const int column = tile * COLUMNS + (GATED ? row % HALF : row);
                scales[i] = __ldg(row_scales + min(column, width - 1) + (row / COLUMNS) * width);
            }
        }
        constexpr int OUTS = GATED ? SUMS / 2 : SUMS;
        constexpr int PER_EIGHT = PAIR ? 2 : 4;  // per thread, in 8 columns
        const auto token_of = [&](int i) {
            return warp * 16 + lane / 4 + (PAIR ? rank : i % 4 / 2) * 8;
        };
        const auto column_of = [&](int i) {
            return tile * COLUMNS + i / PER_EIGHT * 8 + lane % 4 * 2 + i % 2;
        };
        // Of this thread's results; loaded while the product is computed if registers allow it.
        constexpr bool EARLY = PAIR && !GATED;
        __align__(4) T added[OUTS];
        const auto load_residual = [&] {
#pragma unroll
            for (int i = 0; i < OUTS; i += 2) {
                const T* const row =
                    residual + static_cast<long long>(min(token_of(i), m - 1)) * width;
                if (in_pairs) {
                    reinterpret_cast<unsigned&>(added[i]) =
                        *reinterpret_cast<const unsigned*>(row + min(column_of(i), width - 2));
                } else {
                    added[i] = row[min(column_of(i), width - 1)];
                    added[i + 1] = row[min(column_of(i) + 1, width - 1)];
                }
            }
        };
        if (EARLY && !is_few && residual) load_residual();
        // The product of a range of columns -> acc. A stage is released while the next one is being
        // multiplied, so that there is no bubble.
        const auto multiply = [&](int first_step, int last_step) {
            int before = slot;
            const auto release = [&] {
                if (lane == 0) arrive(empty + before);
            };
            for (step = first_step; step < last_step; step++) {
                if (is_early) barrier_wait(early + slot, 0);
                barrier_wait(full + slot, parity);
                const int offset = slot * stage_units;
                const int token_offset =
                    QUANTIZED ? (step - first) * (MAX_QUANTIZED * DEPTH / 16) : offset;
                wgmma_fence();
#pragma unroll
                for (int d = 0; d < 4; d++)
                    wgmma<In, ROWS>(acc, tokens + token_offset + 2 * d, rows + offset + 2 * d,
                                    !SCALED || step != first_step || d != 0);
                wgmma_commit();
                if (step != first_step) {
                    wgmma_wait<1>();
                    release();
                }
                before = slot;
                if (++slot == stages) {
                    slot = 0;
                    parity ^= 1;
                    is_early = false;
                }
            }
            wgmma_wait<0>();
            fence_operand(acc);
            if (first_step < last_step) release();
        };
        if constexpr (SCALED) {
            for (int from = first; from < last; from += PROMOTED_STAGES) {
                multiply(from, min(from + PROMOTED_STAGES, last));
#pragma unroll
                for (int i = 0; i < ROWS / 2; i++) promoted[i] += static_cast<float>(acc[i]);
            }
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) whole[i] = promoted[i] * token_scale[i % 4 / 2];
        } else {
            multiply(first, last);
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) whole[i] = acc[i];
        }
        if (is_few) {
            if (!PAIR) sync_consumers();  // the sums of the tile before have been read
            few.put(whole, rank);
            if (PAIR)
                cluster_sync_release();
            else
                sync_consumers();
            few.finish(tile, rank);
            continue;
        }
        if constexpr (SCALED) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) whole[i] *= scales[i / 4 * 2 + i % 2];
        }

        // A thread has two tokens. In a pair, each block keeps one and sends the other.
        float sums[SUMS];
        if constexpr (PAIR) {
#pragma unroll
            for (int i = 0; i < SUMS; i += 4) {
                const int at = 2 * i;
                const bool keeps = rank == 0;
                sums[i] = keeps ? whole[at] : whole[at + 2];
                sums[i + 1] = keeps ? whole[at + 1] : whole[at + 3];
                sums[i + 2] = keeps ? whole[at + 4] : whole[at + 6];
                sums[i + 3] = keeps ? whole[at + 5] : whole[at + 7];
                send(sent + i / 4 * WARPS * 32 + threadIdx.x, 1 - rank,
                     make_float4(keeps ? whole[at + 2] : whole[at], keeps ? whole[at + 3] : whole[at + 1],
                                 keeps ? whole[at + 6] : whole[at + 4],
                                 keeps ? whole[at + 7] : whole[at + 5]));
            }
            cluster_sync_release();
#pragma unroll
            for (int i = 0; i < SUMS; i += 4) {
                const float4 more = sent[i / 4 * WARPS * 32 + threadIdx.x];
                sums[i] += more.x;
                sums[i + 1] += more.y;
                sums[i + 2] += more.z;
                sums[i + 3] += more.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums[i] = whole[i];
        }

        // Loads of columns past the end are those of the last ones: with branches, each load would
        // wait for the one before.
        if (bias) {
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                sums[i] += static_cast<float>(
                    bias[min(column_of(i % OUTS), width - 1) + i / OUTS * width]);
        }
        if constexpr (GATED) {
#pragma unroll
            for (int i = 0; i < OUTS; i++) sums[i] = silu_mul(sums[i], sums[OUTS + i]);
        }
        // All loads before stores: the compiler cannot tell the residual from out.
        if (residual) {
            if (!EARLY) load_residual();
#pragma unroll
            for (int i = 0; i < OUTS; i++) sums[i] += static_cast<float>(added[i]);
        }
#pragma unroll
        for (int i = 0; i < OUTS; i += 2) {
            const int token = token_of(i), column = column_of(i);
            if (token >= m || column >= width) continue;
            Out* const to = out + static_cast<long long>(token) * width + column;
            if (in_pairs) {
                store_pair(to, sums[i], sums[i + 1]);
            } else {
                to[0] = narrow<Out>(sums[i]);
                if (column + 1 < width) to[1] = narrow<Out>(sums[i + 1]);
            }
        }
    }
#endif
}

// out[m, n'] = epilogue(x[m, k] @ weight[n, k]^T), k a multiple of 8, m <= TOKENS.
// Epilogue: + bias; if GATED, with a weight of gate | up: silu(gate) * up, n' = n / 2; + residual
// (bias and residual may be null; out may alias the residual). A tile has ROWS rows of the weight,
// half of them gate and half up if GATED; block b computes tiles b, b + blocks and so on.
// Boxes of the maps, of 128 bytes a row: m rows of x, rounded up to 8, and ROWS / 2 of weight.
// Dynamic shared memory: 1024 + ROWS * 32 + stages * ((ROWS + x) * 128 + 24) bytes, x being
// ATOM for up to FEW tokens, otherwise TOKENS. stages: of the ring, which the caller chooses.
template <typename T, typename Out, int ROWS, bool GATED>
__global__ void __launch_bounds__((WARPS + 1) * 32, 1)
    skinny_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                const T* bias, const T* residual, Out* out, int m, int n, int k, int stages) {
    const Input<T> input = {&x};
    mainloop<T, T, Out, ROWS, GATED, false>(input, weight, nullptr, bias, residual, out, m, n, k,
                                            stages);
}

// The same of 8-bit values In, with scales of x's rows [m] and of the weight's [n]; k is a multiple
// of 16.
template <typename In, typename T, int ROWS, bool GATED>
__global__ void __launch_bounds__((WARPS + 1) * 32, 1)
    scaled_skinny_gemm(const __grid_constant__ TensorMap x,
                       const __grid_constant__ TensorMap weight, const float* token_scales,
                       const float* row_scales, const T* bias, const T* residual, T* out, int m,
                       int n, int k, int stages) {
    const Input<T> input = {&x, token_scales};
    mainloop<In, T, T, ROWS, GATED, false>(input, weight, row_scales, bias, residual, out, m, n, k,
                                           stages);
}

// The same of up to MAX_QUANTIZED rows of x in T, or of their norm if there is its weight: each
// block quantises them by itself while its first stages of the weight are read, which saves the
// kernels before it. Threads: 32 * HELPERS more. Dynamic shared memory: 1024 + ROWS * 32 + stages *
// (ROWS * 128 + 16) bytes, 1024 for each 128 columns of x that a block multiplies, and 512.
// spread_bits: of x, before it is quantised, and of the weight; see spread_columns.
template <typename In, typename T, int ROWS, bool GATED, bool SPREADS = false>
__global__ void __launch_bounds__((WARPS + 1 + HELPERS) * 32, 1)
    quantizing_skinny_gemm(const T* x, int stride, const float* norm, float eps,
                           const __grid_constant__ TensorMap weight, const float* row_scales,
                           const T* bias, const T* residual, T* out, int m, int n, int k,
                           int stages, int spread_bits) {
    const Input<T> input = {nullptr, nullptr, x, stride, norm, eps};
    mainloop<In, T, T, ROWS, GATED, false, true, false, SPREADS>(
        input, weight, row_scales, bias, residual, out, m, n, k, stages, spread_bits);
}

// The same of the norm of x + residual, which the first block writes to total, [m, k] both.
template <typename In, typename T, int ROWS, bool SPREADS = false>
__global__ void __launch_bounds__((WARPS + 1 + HELPERS) * 32, 1)
    summing_skinny_gemm(const T* x, int stride, const float* residual, float* total,
                        const float* norm, float eps, const __grid_constant__ TensorMap weight,
                        const float* row_scales, const T* bias, T* out, int m, int n, int k,
                        int stages, int spread_bits) {
    const Input<T> input = {nullptr, nullptr, x, stride, norm, eps, residual, total};
    mainloop<In, T, T, ROWS, false, false, true, true, SPREADS>(
        input, weight, row_scales, bias, nullptr, out, m, n, k, stages, spread_bits);
}

// All with a cluster of two blocks per tile, and ROWS * 128 instead of ROWS * 32 bytes of shared
// memory. There is one cluster for each tile.
template <typename T, typename Out, int ROWS, bool GATED>
__global__ void CLUSTERS_OF_TWO __launch_bounds__((WARPS + 1) * 32, 1)
    skinny_gemm_pairs(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                      const T* bias, const T* residual, Out* out, int m, int n, int k, int stages) {
    const Input<T> input = {&x};
    mainloop<T, T, Out, ROWS, GATED, true>(input, weight, nullptr, bias, residual, out, m, n, k,
                                           stages);
}

template <typename In, typename T, int ROWS, bool GATED>
__global__ void CLUSTERS_OF_TWO __launch_bounds__((WARPS + 1) * 32, 1)
    scaled_skinny_gemm_pairs(const __grid_constant__ TensorMap x,
                             const __grid_constant__ TensorMap weight, const float* token_scales,
                             const float* row_scales, const T* bias, const T* residual, T* out,
                             int m, int n, int k, int stages) {
    const Input<T> input = {&x, token_scales};
    mainloop<In, T, T, ROWS, GATED, true>(input, weight, row_scales, bias, residual, out, m, n, k,
                                          stages);
}

template <typename In, typename T, int ROWS, bool GATED, bool SPREADS = false>
__global__ void CLUSTERS_OF_TWO __launch_bounds__((WARPS + 1 + HELPERS) * 32, 1)
    quantizing_skinny_gemm_pairs(const T* x, int stride, const float* norm, float eps,
                                 const __grid_constant__ TensorMap weight, const float* row_scales,
                                 const T* bias, const T* residual, T* out, int m, int n, int k,
                                 int stages, int spread_bits) {
    const Input<T> input = {nullptr, nullptr, x, stride, norm, eps};
    mainloop<In, T, T, ROWS, GATED, true, true, false, SPREADS>(
        input, weight, row_scales, bias, residual, out, m, n, k, stages, spread_bits);
}

template <typename In, typename T, int ROWS, bool SPREADS = false>
__global__ void CLUSTERS_OF_TWO __launch_bounds__((WARPS + 1 + HELPERS) * 32, 1)
    summing_skinny_gemm_pairs(const T* x, int stride, const float* residual, float* total,
                              const float* norm, float eps,
                              const __grid_constant__ TensorMap weight, const float* row_scales,
                              const T* bias, T* out, int m, int n, int k, int stages,
                              int spread_bits) {
    const Input<T> input = {nullptr, nullptr, x, stride, norm, eps, residual, total};
    mainloop<In, T, T, ROWS, false, true, true, true, SPREADS>(
        input, weight, row_scales, bias, nullptr, out, m, n, k, stages, spread_bits);
}
