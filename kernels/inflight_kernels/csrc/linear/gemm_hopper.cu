// A linear layer for many tokens, with Hopper's wgmma and TMA.
//
// A cluster of two blocks computes two adjacent tiles of TOKENS tokens x ROWS rows of the weight,
// with the same rows or the same tokens. Each block loads half of the shared operand and multicasts
// it to both. In a block, a producer warp keeps a ring of stages in shared memory full, across the
// ends of tiles, and two consumer warpgroups multiply from it, 64 tokens each. Of 8-bit values, two
// more warps load residuals and store results (gemm_results.cuh). Clusters iterate over tiles, a
// few tiles of tokens at a time, so that concurrent reads hit the L2 cache.
#include "linear/gemm_results.cuh"

namespace gemm {

constexpr int GROUPS = 2;                      // consumer warpgroups
constexpr int TOKENS = GROUPS * GROUP_TOKENS;  // of a tile
// Tiles along the tokens that are iterated over together, and of a gate in 8 bits, whose weights
// are then read from memory half as often. Measured on an H200 (benchmarks/notes.md).
constexpr int TILES_AT_ONCE = 8;
constexpr int GATE_TILES_AT_ONCE = 16;

// Registers per producer and consumer thread, of 65536 per multiprocessor.
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

// Position of a cluster's tile, in units of cluster tiles.
struct Place {
    int tokens, rows;
};

template <int AT_ONCE>
__device__ Place find_place(int tile, int token_tiles, int row_tiles) {
    const int together = AT_ONCE * row_tiles, first = tile / together * AT_ONCE;
    const int size = min(AT_ONCE, token_tiles - first), rest = tile % together;
    return {first + rest % size, rest / size};
}

// Transposes among four adjacent lanes: word j of lane i becomes word i of lane j.
__device__ inline void transpose(unsigned (&words)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned got = __shfl_xor_sync(FULL_WARP, upper ? words[i] : words[i + 2], 2);
        (upper ? words[i] : words[i + 2]) = got;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const unsigned got = __shfl_xor_sync(FULL_WARP, odd ? words[i] : words[i + 1], 1);
        (odd ? words[i] : words[i + 1]) = got;
    }
}

// Add the residual unless it is null, and store columns [column, column + 8 * PARTS) of this
// thread's tokens `token` and `token` + 8; `width` is a multiple of 8.
template <typename T, int PARTS, typename Out>
__device__ void store(float (&acc)[4 * PARTS], int token, int column, int m, int width,
                      const T* residual, Out* out) {
    const int q = threadIdx.x % 4;
    const auto place = [&](int r, int at) {
        return static_cast<long long>(token + 8 * r) * width + at;
    };
    const auto inside = [&](int r, int at) { return token + 8 * r < m && at < width; };

    // Lanes exchange their pairs of columns for vectors, in groups of four.
    constexpr int VECTORS = sizeof(Out) == 2 ? PARTS / 4 : 0, AT_ONCE = 4;
#pragma unroll
    for (int from = 0; from < VECTORS; from += AT_ONCE) {
        uint4 more[AT_ONCE][2];
        if (residual) {
#pragma unroll
            for (int v = 0; v < AT_ONCE; v++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int at = column + 32 * (from + v) + 8 * q;
                    more[v][r] = from + v < VECTORS && inside(r, at)
                                     ? load_vector(residual + place(r, at))
                                     : make_uint4(0, 0, 0, 0);
                }
        }
#pragma unroll
        for (int v = 0; v < AT_ONCE; v++) {
            if (from + v >= VECTORS) continue;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float* const values = acc + 16 * (from + v) + 2 * r;
                if (residual) {
                    unsigned words[4] = {more[v][r].x, more[v][r].y, more[v][r].z, more[v][r].w};
                    transpose(words);
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        add_pair<T>(values[4 * i], values[4 * i + 1], words[i]);
                }
                unsigned words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) words[i] = Word<T>::pack(values + 4 * i);
                transpose(words);
                const int at = column + 32 * (from + v) + 8 * q;
                if (inside(r, at))
                    store_vector(out + place(r, at),
                                 make_uint4(words[0], words[1], words[2], words[3]));
            }
        }
    }
#pragma unroll
    for (int j = 4 * VECTORS; j < PARTS; j++) {
        const int at = column + 8 * j + 2 * q;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (!inside(r, at)) continue;
            float* const values = acc + 4 * j + 2 * r;
            if (residual)
                add_pair<T>(values[0], values[1],
                            *reinterpret_cast<const unsigned*>(residual + place(r, at)));
            if constexpr (sizeof(Out) == 2)
                *reinterpret_cast<unsigned*>(out + place(r, at)) = Word<T>::pack(values);
            else
                *reinterpret_cast<float2*>(out + place(r, at)) = make_float2(values[0], values[1]);
        }
    }
}

template <typename T, int PARTS>
__device__ void add_bias(float* acc, const T* bias, int column, int width) {
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        const int at = column + 8 * j + 2 * (threadIdx.x % 4);
        if (at >= width) continue;
        const unsigned word = __ldg(reinterpret_cast<const unsigned*>(bias + at));
        add_pair<T>(acc[4 * j], acc[4 * j + 1], word);
        add_pair<T>(acc[4 * j + 2], acc[4 * j + 3], word);
    }
}

// Multiply sums by the scales of this thread's two tokens and of their rows. Columns past the end
// are not stored: their loads need no branches, which would make each wait for the one before.
template <int PARTS>
__device__ void apply_scales(float* acc, const float (&token_scale)[2], const float* row_scales,
                             int column, int width) {
    const int first = column + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        const int at = min(first + 8 * j, width - 2);
        const float2 rows = __ldg(reinterpret_cast<const float2*>(row_scales + at));
        acc[4 * j] *= token_scale[0] * rows.x;
        acc[4 * j + 1] *= token_scale[0] * rows.y;
        acc[4 * j + 2] *= token_scale[1] * rows.x;
        acc[4 * j + 3] *= token_scale[1] * rows.y;
    }
}

// As multiply_steps, of 8-bit values, from the first step on: sums that tensor cores accumulate are
// added to `sums` before they lose precision.
template <typename In, int N, int STAGE, int STAGES, class Release>
__device__ __forceinline__ void multiply_promoted(float (&sums)[N / 2], unsigned long long a,
                                                  unsigned long long b, Barrier* full, int& slot,
                                                  int& parity, int steps, const Release& release) {
    Sum<In> acc[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] = 0;
    fence_operand(acc);
#pragma unroll
    for (int i = 0; i < N / 2; i++) sums[i] = 0.0f;
    for (int step = 0; step < steps; step += PROMOTED_STAGES) {
        multiply_steps<In, N, STAGE, STAGES>(acc, a, b, full, slot, parity, step,
                                             min(step + PROMOTED_STAGES, steps), release);
#pragma unroll
        for (int i = 0; i < N / 2; i++) sums[i] += static_cast<float>(acc[i]);
    }
}

// Where results go to: by the warpgroups that have them.
template <typename T, typename Out>
struct Direct {
    using Stored = T;
    const T* residual;  // or null
    Out* out;
};

// By way of Results.
template <typename T>
struct Staged {
    using Stored = T;
    const TensorMap& residual;
    bool has_residual;
    const TensorMap& out;
};

// The same, quantised: a row of a tile has a scale of its own, of which codes [m, tiles] are.
struct Quantized {
    using Stored = Fp8;
    const TensorMap& out;
    unsigned char* codes;
};

// The codes of the scales (eight_bit.cuh) of this thread's two rows, of which four lanes have all
// columns.
template <int N>
__device__ void find_codes(const float (&sums)[N], unsigned (&codes)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        unsigned largest = 0;
#pragma unroll
        for (int i = 2 * r; i < N; i += 4)
            largest = max(largest, max(magnitude(sums[i]), magnitude(sums[i + 1])));
        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
        codes[r] = coarse_code(max(largest, __shfl_xor_sync(FULL_WARP, largest, 2)));
    }
}

// See gemm. In: type of x and weight. The scales are null unless SCALED. Target: Direct, Staged or
// Quantized.
template <typename In, typename T, class Target, int ROWS, int STAGES, bool GATED,
          bool SHARE_WEIGHT>
__device__ __forceinline__ void mainloop(const TensorMap& x, const TensorMap& weight,
                                         const float* token_scales, const float* row_scales,
                                         const T* bias, const Target& target, int m, int n, int k) {
    constexpr bool SCALED = sizeof(In) == 1;
    constexpr int DEPTH = STAGE_DEPTH<In>;
    constexpr int STAGE = (TOKENS + ROWS) * DEPTH;
    constexpr int HALF = ROWS / 2;                // rows per box
    constexpr int COLUMNS = GATED ? HALF : ROWS;  // of out, in a tile
    constexpr int PARTS = ROWS / 8;

    extern __shared__ char memory[];
    In* const ring = reinterpret_cast<In*>(memory + (-shared_address(memory) & 1023));
    constexpr bool QUANTIZED = SAME<Target, Quantized>;
    constexpr bool STAGED = QUANTIZED || SAME<Target, Staged<T>>;
    using Staging = Results<typename Target::Stored, COLUMNS>;
    char* const staged = reinterpret_cast<char*>(ring + STAGES * STAGE);
    Barrier* const full =
        reinterpret_cast<Barrier*>(staged + (STAGED ? GROUPS * Staging::BYTES : 0));
    Barrier* const empty = full + STAGES;
    const auto results_of = [&](int group) { return Staging(staged, empty + STAGES, group); };

    pdl_launch_dependents();
    const int rank = rank_in_cluster();
    // Read from a lane, so that the compiler knows that warps do not diverge.
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            init_barrier(full + s, 1);
            init_barrier(empty + s, 2 * GROUPS * 4);
        }
        if constexpr (STAGED)
            for (int group = 0; group < GROUPS; group++) results_of(group).init();
        fence_barrier_init();
    }
    cluster_sync();

    const int width = GATED ? n / 2 : n, steps = (k + DEPTH - 1) / DEPTH;
    constexpr int CLUSTER_TOKENS = TOKENS * (SHARE_WEIGHT ? 2 : 1);
    constexpr int CLUSTER_COLUMNS = COLUMNS * (SHARE_WEIGHT ? 1 : 2);
    const int token_tiles = (m + CLUSTER_TOKENS - 1) / CLUSTER_TOKENS;
    const int row_tiles = (width + CLUSTER_COLUMNS - 1) / CLUSTER_COLUMNS;
    const int tiles = token_tiles * row_tiles;
    constexpr int AT_ONCE = SCALED && GATED ? GATE_TILES_AT_ONCE : TILES_AT_ONCE;
    const auto find = [&](int tile) { return find_place<AT_ONCE>(tile, token_tiles, row_tiles); };
    const int first_tile = blockIdx.x / 2, clusters = gridDim.x / 2;
    // Of this block's part of a cluster's tile, in tokens and in columns of the results.
    const auto token_of = [&](const Place& place) {
        return (SHARE_WEIGHT ? 2 * place.tokens + rank : place.tokens) * TOKENS;
    };
    const auto column_of = [&](const Place& place) {
        return (SHARE_WEIGHT ? place.rows : 2 * place.rows + rank) * COLUMNS;
    };

    if (warp >= GROUPS * 4) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if constexpr (STAGED) {
            const int group = warp - GROUPS * 4 - 1;
            if (group >= 0 && group < GROUPS && lane == 0) {
                const Staging results = results_of(group);
                pdl_wait();
                int parity = 0;
                for (int tile = first_tile; tile < tiles; tile += clusters, parity ^= 1) {
                    const Place place = find(tile);
                    const int token = token_of(place) + group * GROUP_TOKENS;
                    if constexpr (QUANTIZED)
                        arrive(results.ready);
                    else
                        results.prepare(target.residual, target.has_residual, token,
                                        column_of(place));
                    results.store(target.out, token, column_of(place), parity);
                }
                Staging::finish();
            }
        }
        if (warp == GROUPS * 4 && lane == 0) {
            prefetch_tensor_map(&weight);
            prefetch_tensor_map(&x);
            const auto copy_weight = [&](int slot, const Place& place, int step) {
                In* const to = ring + slot * STAGE + TOKENS * DEPTH;
                const int next = GATED ? width : HALF;  // from one box to the next
                if (SHARE_WEIGHT) {
                    tma_load_multicast(to + rank * HALF * DEPTH, &weight,
                                       place.rows * COLUMNS + rank * next, step * DEPTH,
                                       full + slot);
                } else {
                    const int row = column_of(place);
                    tma_load(to, &weight, row, step * DEPTH, full + slot);
                    tma_load(to + HALF * DEPTH, &weight, row + next, step * DEPTH, full + slot);
                }
            };
            const auto copy_x = [&](int slot, const Place& place, int step) {
                In* const to = ring + slot * STAGE;
                if (SHARE_WEIGHT)
                    tma_load(to, &x, token_of(place), step * DEPTH, full + slot);
                else
                    tma_load_multicast(to + rank * (TOKENS / 2) * DEPTH, &x,
                                       place.tokens * TOKENS + rank * (TOKENS / 2), step * DEPTH,
                                       full + slot);
            };
            // No kernel writes weights: they may be fetched before the preceding kernel has ended.
            const Place first = find(first_tile);
            const int ahead = min(STAGES, steps);
            for (int s = 0; s < ahead; s++) {
                arrive_expect_tx(full + s, STAGE * sizeof(In));
                copy_weight(s, first, s);
            }
            pdl_wait();
            for (int s = 0; s < ahead; s++) copy_x(s, first, s);
            int slot = ahead % STAGES, parity = ahead / STAGES, step = ahead;
            for (int tile = first_tile; tile < tiles; tile += clusters, step = 0) {
                const Place place = find(tile);
                for (; step < steps; step++) {
                    barrier_wait(empty + slot, parity ^ 1);
                    arrive_expect_tx(full + slot, STAGE * sizeof(In));
                    copy_weight(slot, place, step);
                    copy_x(slot, place, step);
                    if (++slot == STAGES) {
                        slot = 0;
                        parity ^= 1;
                    }
                }
            }
            // A block must not exit before the other one has arrived at its barriers.
            for (int s = 0; s < STAGES; s++) {
                barrier_wait(empty + slot, parity ^ 1);
                if (++slot == STAGES) {
                    slot = 0;
                    parity ^= 1;
                }
            }
        }
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        pdl_wait();
        const int group = warp / 4;
        const unsigned long long tokens = smem_descriptor(ring + group * 64 * DEPTH);
        const unsigned long long rows = smem_descriptor(ring + TOKENS * DEPTH);
        const auto release = [&](int slot) {
            if (lane < 2) arrive_at(empty + slot, lane);
        };
        int slot = 0, parity = 0, results_parity = 0;
        for (int tile = first_tile; tile < tiles; tile += clusters, results_parity ^= 1) {
            const Place place = find(tile);
            const int token = token_of(place) + warp * 16 + lane / 4, column = column_of(place);
            float token_scale[2] = {};
            if constexpr (SCALED) {
#pragma unroll
                for (int i = 0; i < 2; i++)
                    token_scale[i] = load_l2(token_scales + min(token + 8 * i, m - 1));
                // 128 bytes each, of the rows that are needed in the end.
                if (lane < (COLUMNS + 31) / 32) {
                    const int row = min(column + 32 * lane, width - 1);
                    prefetch_l2(row_scales + row);
                    if (GATED) prefetch_l2(row_scales + width + row);
                }
            }
            float sums[ROWS / 2];
            if constexpr (SCALED)
                multiply_promoted<In, ROWS, STAGE, STAGES>(sums, tokens, rows, full, slot, parity,
                                                           steps, release);
            else
                multiply_steps<In, ROWS, STAGE, STAGES>(sums, tokens, rows, full, slot, parity, 0,
                                                        steps, release);

            if constexpr (SCALED) {
                constexpr int EACH = GATED ? PARTS / 2 : PARTS;
                apply_scales<EACH>(sums, token_scale, row_scales, column, width);
                if constexpr (GATED)
                    apply_scales<EACH>(sums + ROWS / 4, token_scale, row_scales + width, column,
                                       width);
            }
            const auto finish = [&](float (&results)[COLUMNS / 2]) {
                if constexpr (QUANTIZED) {
                    unsigned codes[2];
                    find_codes(results, codes);
                    const float inverses[2] = {inverse_coarse_scale(codes[0]),
                                               inverse_coarse_scale(codes[1])};
                    results_of(group).write_bytes(results, inverses, results_parity);
                    // Last: the fence between results and their copy would wait for these.
                    const int parts = (width + COLUMNS - 1) / COLUMNS;
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        if (lane % 4 == 0 && token + 8 * i < m && column < width)
                            target.codes[static_cast<long long>(token + 8 * i) * parts +
                                         column / COLUMNS] = codes[i];
                } else if constexpr (STAGED)
                    results_of(group).write(results, target.has_residual, results_parity);
                else
                    store<T, COLUMNS / 8>(results, token, column, m, width, target.residual,
                                          target.out);
            };
            if constexpr (GATED) {
                if (bias) {
                    add_bias<T, PARTS / 2>(sums, bias, column, width);
                    add_bias<T, PARTS / 2>(sums + ROWS / 4, bias + width, column, width);
                }
                float product[ROWS / 4];
#pragma unroll
                for (int i = 0; i < ROWS / 4; i++)
                    product[i] = silu_mul(sums[i], sums[i + ROWS / 4]);
                finish(product);
            } else {
                if (bias) add_bias<T, PARTS>(sums, bias, column, width);
                finish(sums);
            }
        }
    }
}

// out[m, n'] = epilogue(x[m, k] @ weight[n, k]^T), n' and k multiples of 8.
// Epilogue: + bias; if GATED, with a weight of gate | up: silu(gate) * up, n' = n / 2; + residual.
// bias and residual may be null; out may alias the residual. SHARE_WEIGHT: the blocks of a cluster
// have the same rows, otherwise the same tokens. Boxes of maps, of 128 bytes a row: TOKENS rows of
// x, half as many if shared, and ROWS / 2 of weight.
// Threads: GROUPS + 1 warpgroups. Dynamic shared memory:
// 1024 + STAGES * ((TOKENS + ROWS) * 128 + 16) bytes.
template <typename T, typename Out, int ROWS, int STAGES, bool GATED, bool SHARE_WEIGHT>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128 * (GROUPS + 1), 1)
    gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
         const T* bias, const T* residual, Out* out, int m, int n, int k) {
    const Direct<T, Out> target = {residual, out};
    mainloop<T, T, Direct<T, Out>, ROWS, STAGES, GATED, SHARE_WEIGHT>(x, weight, nullptr, nullptr,
                                                                      bias, target, m, n, k);
}

// The same of 8-bit values In, with scales of x's rows [m] and of the weight's [n]; k is a multiple
// of 16. Results go to memory while the next tile is multiplied. Boxes of maps of residual and out:
// those of Results; without a residual its map is not used. Dynamic shared memory: also the results
// of a tile and two barriers for each warpgroup.
template <typename In, typename T, int ROWS, int STAGES, bool GATED, bool SHARE_WEIGHT>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128 * (GROUPS + 1), 1)
    scaled_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                const float* token_scales, const float* row_scales, const T* bias,
                const __grid_constant__ TensorMap residual, int has_residual,
                const __grid_constant__ TensorMap out, int m, int n, int k) {
    const Staged<T> target = {residual, has_residual != 0, out};
    mainloop<In, T, Staged<T>, ROWS, STAGES, GATED, SHARE_WEIGHT>(
        x, weight, token_scales, row_scales, bias, target, m, n, k);
}

// The same of e4m3 and a weight of gate | up, with results in e4m3. Of each row, every ROWS / 2
// columns have a scale: see Quantized. settle_rows (quantization.cu) makes them one. The box of
// out: that of Results<Fp8>, not swizzled; columns past the end do not count.
template <typename T, int ROWS, int STAGES, bool SHARE_WEIGHT>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128 * (GROUPS + 1), 1)
    quantizing_gate(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                    const float* token_scales, const float* row_scales, const T* bias,
                    const __grid_constant__ TensorMap out, unsigned char* codes, int m, int n,
                    int k) {
    const Quantized target = {out, codes};
    mainloop<Fp8, T, Quantized, ROWS, STAGES, true, SHARE_WEIGHT>(
        x, weight, token_scales, row_scales, bias, target, m, n, k);
}

}  // namespace gemm
