// Products of rows, sorted by expert, with the weight of their expert, with Hopper's wgmma and TMA.
//
// A tile is up to TOKENS rows of one expert by ROWS rows of its weight. The weight is on the side
// of wgmma that has 64 rows, so that an expert with few rows wastes no products. In a block, a
// producer warp keeps a ring of stages in shared memory full, across the ends of tiles, and GROUPS
// consumer warpgroups multiply from it, 64 rows of the weight each. Blocks iterate over the list of
// tiles: a skewed routing makes the list longer, not a block's share. Of few TOKENS a
// multiprocessor has room for two BLOCKS, of which one multiplies while the other starts or ends.
// In a PAIR, a cluster of two blocks has the same rows of x, of which each block loads half and
// multicasts it to both.
//
// A weight has values of x's type, or is in the records of grouped.cuh. Only the copies of the
// weight and the products of stages differ: `Values` and `Codes` have them.
#include "linear/gemm_hopper.cuh"
#include "linear/grouped_hopper.cuh"
#include "moe/gates.cuh"
#include "moe/tile.cuh"

namespace experts {

using namespace gemm;  // cluster operations

constexpr int GROUPS = 2, ROWS = 64 * GROUPS;
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;  // with one block

// Rows of x that are copied at once, by both blocks of a pair, and whose sums pass through shared
// memory at once; and columns of a consumer's sums there. Of a tile with fewer rows, only the chunks
// that have some are copied and multiplied.
template <int TOKENS>
constexpr int CHUNK = TOKENS < 64 ? TOKENS : 64;
template <int GATE>
constexpr int GROUP_COLUMNS = GATE == PLAIN ? 64 : 32;

template <int GATE>
__device__ float gate_of(float gate, float up) {
    return GATE == CLAMPED ? clamped_swiglu(gate, up) : silu_mul(gate, up);
}

// Store 8 x 8 matrices of 16 bits transposed. Lane l has, of each, row l / 4 and columns l % 4 * 2
// and the next; `row` is where lane l % 8 has a row of the result, of matrix l / 8.
__device__ inline void store_transposed(void* row, unsigned matrix) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(
                     shared_address(row)),
                 "r"(matrix)
                 : "memory");
}

__device__ inline void store_transposed(void* row, unsigned first, unsigned second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                     shared_address(row)),
                 "r"(first), "r"(second)
                 : "memory");
}

__device__ inline void sync_group(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

struct Operands {
    const float* row_scales;    // of x's rows, or null
    const float* weight_scales; // [num_experts * n], or null
    const void* bias;           // [num_experts * n], or null
    const Tile* tiles;
    const int* num_tiles;
    int n, k;      // of an expert's weight
    int first_row; // rows of x: -1 as in tiles, otherwise this one for all tiles
    int is_history;  // whether the plan is history, see pdl_launch_dependents
};

// A weight of all experts whose values have the type of x's, [num_experts * n, k].
template <typename In>
struct Values {
    using X = In;
    using Place = unsigned long long;  // descriptor of a warpgroup's rows in the first stage

    static constexpr int BOXES = 1;           // of 128 bytes of each row of x, in a stage
    static constexpr int BYTES = ROWS * 128;  // of a stage

    const TensorMap& map;

    __device__ __forceinline__ void prefetch() const { prefetch_tensor_map(&map); }

    // Of a stage, with so many rows left of the expert.
    static __device__ __forceinline__ int bytes(int) { return BYTES; }

    // The stage `step` of the rows at and behind `row` of all experts.
    __device__ __forceinline__ void copy(char* stage, int row, int, int step,
                                         Barrier* barrier) const {
        tma_load(stage, &map, row, step * STAGE_DEPTH<In>, barrier);
    }

    static __device__ __forceinline__ Place place(const char* ring, int warp) {
        return smem_descriptor(ring + warp / 4 * 64 * 128);
    }

    // The stages from `first` to before `last`. STAGE: bytes.
    template <int N, int TOKENS, int STAGE, int STAGES, class Release>
    __device__ __forceinline__ void multiply(Sum<In> (&acc)[TOKENS / 2], Place rows,
                                             unsigned long long tokens, Barrier* full, int& slot,
                                             int& parity, int first, int last,
                                             const Release& release) const {
        multiply_steps<In, N, STAGE / static_cast<int>(sizeof(In)), STAGES>(
            acc, rows, tokens, full, slot, parity, first, last, release);
    }
};

// A weight of all experts in records R, those of an expert's rows, a multiple of 16, behind those
// of the expert before.
template <class R>
struct Codes {
    using X = __nv_bfloat16;
    using Place = unsigned;  // address of a warp's record in the first stage

    static constexpr int BOXES = 2;
    // Up to where x is, in whole atoms of its swizzle.
    static constexpr int BYTES = (ROWS / grouped::ROWS * R::BYTES + 1023) / 1024 * 1024;

    const TensorMap& map;  // of boxes of a warpgroup's records
    grouped::Table table;

    __device__ __forceinline__ void prefetch() const { prefetch_tensor_map(&map); }

    // No box is copied in the place of rows past the expert's, whose sums are not stored.
    static __device__ __forceinline__ int boxes(int rows_left) {
        return (min(ROWS, rows_left) + 63) / 64;
    }

    static __device__ __forceinline__ int bytes(int rows_left) {
        return boxes(rows_left) * grouped::BOX_TILES * R::BYTES;
    }

    __device__ __forceinline__ void copy(char* stage, int row, int rows_left, int step,
                                         Barrier* barrier) const {
        const int count = boxes(rows_left);
        for (int i = 0; i < count; i++)
            grouped::copy_records(stage + i * grouped::BOX_TILES * R::BYTES, &map,
                                  row / grouped::ROWS + i * grouped::BOX_TILES, step, barrier);
    }

    static __device__ __forceinline__ Place place(const char* ring, int warp) {
        return shared_address(ring) + warp * R::BYTES;
    }

    template <int N, int TOKENS, int STAGE, int STAGES, class Release>
    __device__ __forceinline__ void multiply(float (&acc)[TOKENS / 2], Place record,
                                             unsigned long long tokens, Barrier* full, int& slot,
                                             int& parity, int first, int last,
                                             const Release& release) const {
        grouped::multiply_records<R, N, TOKENS, STAGE, STAGES, 1>(
            acc, record, tokens, table, full, slot, parity, last - first, true, release);
    }
};

// Weight: `Values` or `Codes`.
template <class Weight, typename T, int TOKENS, int STAGES, int BLOCKS, int GATE, bool PAIR>
__device__ __forceinline__ void mainloop(const TensorMap& x, const Weight& weight,
                                         const Operands& at, T* out) {
    using In = typename Weight::X;
    constexpr bool SCALED = sizeof(In) == 1;
    constexpr int BOXES = Weight::BOXES, DEPTH = BOXES * STAGE_DEPTH<In>;
    constexpr int STAGE = Weight::BYTES + BOXES * TOKENS * 128;  // bytes
    constexpr int COLUMNS = GROUP_COLUMNS<GATE>, STRIDE = COLUMNS + 8;
    constexpr int SHARES = PAIR ? 2 : 1, BOX = CHUNK<TOKENS> / SHARES;
    constexpr int CHUNKS = TOKENS / CHUNK<TOKENS>;  // of a full tile

    extern __shared__ __align__(1024) char ring[];
    T* const staging = reinterpret_cast<T*>(ring + STAGES * STAGE);
    Barrier* const full = reinterpret_cast<Barrier*>(staging + GROUPS * CHUNK<TOKENS> * STRIDE);
    Barrier* const empty = full + STAGES;

    const int rank = PAIR ? rank_in_cluster() : 0;
    // Read from a lane, so that the compiler knows that warps do not diverge.
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            init_barrier(full + s, 1);
            init_barrier(empty + s, SHARES * GROUPS * 4);
        }
        fence_barrier_init();
    }
    if (PAIR)
        cluster_sync();
    else
        __syncthreads();

    const int steps = (at.k + DEPTH - 1) / DEPTH;
    const int row_tiles = (at.n + SHARES * ROWS - 1) / (SHARES * ROWS);
    const int first_unit = blockIdx.x / SHARES, next_unit = gridDim.x / SHARES;

    if (warp >= GROUPS * 4) {
        if (BLOCKS == 1) warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (warp != GROUPS * 4 || lane != 0) return;
        weight.prefetch();
        prefetch_tensor_map(&x);
        if (!at.is_history) pdl_wait();
        const int units = load_l2(at.num_tiles) * row_tiles;
        const auto first_row = [&](int unit) { return (unit % row_tiles * SHARES + rank) * ROWS; };
        const auto copy_weight = [&](int slot, const Tile& tile, int unit, int step) {
            const int row = first_row(unit);
            weight.copy(ring + slot * STAGE, tile.expert * at.n + row, at.n - row, step,
                        full + slot);
        };
        const auto copy_x = [&](int slot, const Tile& tile, int step) {
            const int row = (at.first_row < 0 ? tile.first : at.first_row) + rank * BOX;
#pragma unroll
            for (int box = 0; box < BOXES; box++) {
                char* const target =
                    ring + slot * STAGE + Weight::BYTES + (box * TOKENS + rank * BOX) * 128;
                const int column = step * DEPTH + box * STAGE_DEPTH<In>;
                if constexpr (CHUNKS == 1) {
                    tma_load(target, &x, row, column, full + slot);
                } else {
                    for (int from = 0; from < tile.count; from += CHUNK<TOKENS>) {
                        if constexpr (PAIR)
                            tma_load_multicast(target + from * 128, &x, row + from, column,
                                               full + slot);
                        else
                            tma_load(target + from * 128, &x, row + from, column, full + slot);
                    }
                }
            }
        };
        const auto expect = [&](int slot, const Tile& tile, int unit) {
            const int chunks =
                CHUNKS == 1 ? 1 : (tile.count + CHUNK<TOKENS> - 1) / CHUNK<TOKENS>;
            arrive_expect_tx(full + slot, weight.bytes(at.n - first_row(unit)) +
                                              BOXES * chunks * CHUNK<TOKENS> * 128);
        };
        int slot = 0, parity = 0, step = 0;
        Tile tile = {};
        if (first_unit < units) {
            tile = load_l2(at.tiles + first_unit / row_tiles);
            // No kernel writes weights: they may be fetched before the preceding kernel has ended.
            const int ahead = min(STAGES, steps);
            for (int s = 0; s < ahead; s++) {
                expect(s, tile, first_unit);
                copy_weight(s, tile, first_unit, s);
            }
            if (at.is_history) pdl_wait();
            pdl_launch_dependents();
            for (int s = 0; s < ahead; s++) copy_x(s, tile, s);
            slot = ahead % STAGES;
            parity = ahead / STAGES;
            step = ahead;
        }
        for (int unit = first_unit; unit < units; unit += next_unit, step = 0) {
            Tile next = {};
            if (unit + next_unit < units) next = load_l2(at.tiles + (unit + next_unit) / row_tiles);
            for (; step < steps; step++) {
                barrier_wait(empty + slot, parity ^ 1);
                expect(slot, tile, unit);
                copy_weight(slot, tile, unit, step);
                copy_x(slot, tile, step);
                if (++slot == STAGES) {
                    slot = 0;
                    parity ^= 1;
                }
            }
            tile = next;
        }
        // A block must not exit before the other one has arrived at its barriers.
        for (int s = 0; PAIR && s < STAGES; s++) {
            barrier_wait(empty + slot, parity ^ 1);
            if (++slot == STAGES) {
                slot = 0;
                parity ^= 1;
            }
        }
        return;
    }

    if (BLOCKS == 1) warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    pdl_wait();
    const int group = warp / 4, g = lane / 4, q = lane % 4, thread = threadIdx.x % 128;
    const int units = load_l2(at.num_tiles) * row_tiles;
    const int width = GATE == PLAIN ? at.n : at.n / 2;  // of out
    const typename Weight::Place rows = Weight::place(ring, warp);
    const unsigned long long tokens = smem_descriptor(ring + Weight::BYTES);
    T* const staged = staging + group * CHUNK<TOKENS> * STRIDE;
    const auto release = [&](int slot) {
        if constexpr (PAIR) {
            if (lane < 2) arrive_at(empty + slot, lane);
        } else {
            if (lane == 0) arrive(empty + slot);
        }
    };
    const auto tile_of = [&](int unit) { return load_l2(at.tiles + unit / row_tiles); };
    int slot = 0, parity = 0;
    Tile tile = {}, next = {};
    if (first_unit < units) tile = tile_of(first_unit);
    for (int unit = first_unit; unit < units; unit += next_unit, tile = next) {
        // What a unit loads besides the ring, it loads before its products, which hide that: while
        // consumers wait, the ring fills up, and then no copy is under way.
        if (unit + next_unit < units) next = tile_of(unit + next_unit);
        const int tile_row = (unit % row_tiles * SHARES + rank) * ROWS;
        // Of this thread's two rows.
        const int row = tile_row + group * 64 + warp % 4 * 16 + g;
        float added[2] = {}, scale[2] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int place = tile.expert * at.n + min(row + 8 * i, at.n - 1);
            if (at.bias) added[i] = static_cast<float>(static_cast<const T*>(at.bias)[place]);
            if (SCALED) scale[i] = __ldg(at.weight_scales + place);
        }
        // Of the token 8j + 2q + i.
        const auto token_scale = [&](int j, int i) {
            const int token = min(8 * j + 2 * q + i, tile.count - 1);
            return load_l2(at.row_scales + (at.first_row < 0 ? tile.first + token : at.first_row));
        };
        constexpr int EARLY = SCALED && CHUNKS == 1 ? TOKENS / 8 : 1;
        float early[EARLY][2] = {};
        if constexpr (SCALED && CHUNKS == 1) {
#pragma unroll
            for (int j = 0; j < EARLY; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) early[j][i] = token_scale(j, i);
        }
        Sum<In> acc[TOKENS / 2];
        float promoted[SCALED ? TOKENS / 2 : 1] = {};
        float(*found)[TOKENS / 2];  // either of them
        // The last tile of an expert may have few rows.
        const auto multiply = [&](int first_step, int last_step) {
            constexpr int ONE = CHUNK<TOKENS>, TWO = TOKENS > 64 ? 128 : TOKENS,
                          THREE = TOKENS > 128 ? 192 : TOKENS;
            if (ONE < TWO && tile.count <= ONE)
                weight.template multiply<ONE, TOKENS, STAGE, STAGES>(acc, rows, tokens, full, slot, parity,
                                                               first_step, last_step, release);
            else if (TWO < THREE && tile.count <= TWO)
                weight.template multiply<TWO, TOKENS, STAGE, STAGES>(acc, rows, tokens, full, slot, parity,
                                                               first_step, last_step, release);
            else if (THREE < TOKENS && tile.count <= THREE)
                weight.template multiply<THREE, TOKENS, STAGE, STAGES>(acc, rows, tokens, full, slot, parity,
                                                               first_step, last_step, release);
            else
                weight.template multiply<TOKENS, TOKENS, STAGE, STAGES>(acc, rows, tokens, full, slot, parity,
                                                               first_step, last_step, release);
        };
        // Also where the first products overwrite them: the compiler makes products wait for each
        // other if some of their registers are set between them, as it would for a tile with few
        // rows.
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0;
        fence_operand(acc);
        if constexpr (SCALED) {
            for (int step = 0; step < steps; step += PROMOTED_STAGES) {
                multiply(step, min(step + PROMOTED_STAGES, steps));
#pragma unroll
                for (int i = 0; i < TOKENS / 2; i++) promoted[i] += static_cast<float>(acc[i]);
            }
            found = &promoted;
        } else {
            multiply(0, steps);
            found = &acc;
        }
        float(&sums)[TOKENS / 2] = *found;

        const int first_column = (GATE == PLAIN ? tile_row : tile_row / 2) + group * COLUMNS;
#pragma unroll
        for (int from = 0; from < TOKENS; from += CHUNK<TOKENS>) {
            if (from >= tile.count) continue;
#pragma unroll
            for (int j = from / 8; j < (from + CHUNK<TOKENS>) / 8; j++) {
                float* const v = sums + 4 * j;  // both tokens of one row, then of the other one
                if constexpr (SCALED) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const float factor = CHUNKS == 1 ? early[j % EARLY][i] : token_scale(j, i);
                        v[i] *= factor * scale[0];
                        v[2 + i] *= factor * scale[1];
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; i++) v[i] += added[i / 2];
                T* const place = staged + (8 * j - from + lane % 8) * STRIDE;
                if constexpr (GATE == PLAIN) {
                    store_transposed(place + warp % 4 * 16 + lane / 8 % 2 * 8, Word<T>::pack(v),
                                     Word<T>::pack(v + 2));
                } else {
                    const float gated[2] = {gate_of<GATE>(v[0], v[2]), gate_of<GATE>(v[1], v[3])};
                    store_transposed(place + warp % 4 * 8, Word<T>::pack(gated));
                }
            }
            sync_group(group);
            constexpr int VECTORS = COLUMNS / 8;
            for (int i = thread; i < CHUNK<TOKENS> * VECTORS; i += 128) {
                const int token = i / VECTORS, column = i % VECTORS * 8;
                if (from + token < tile.count && first_column + column < width)
                    store_vector(out + static_cast<long long>(tile.first + from + token) * width +
                                     first_column + column,
                                 load_vector(staged + token * STRIDE + column));
            }
            sync_group(group);
        }
    }
}

}  // namespace experts

// out[rows, n'] = epilogue(x[rows, k] @ weight[expert of the row, n, k]^T), k a multiple of 8.
// Epilogue: + bias; GATE as above, n' = n / 2 with one, a multiple of 8. Boxes of the maps, of 128
// bytes a row: CHUNK rows of x, half as many of a PAIR, and ROWS of all weights, [experts * n, k].
// Dynamic shared memory: STAGES * ((TOKENS + ROWS) * 128 + 16) and GROUPS * CHUNK *
// (GROUP_COLUMNS + 8) * 2 bytes.
template <typename In, typename T, int TOKENS, int STAGES, int BLOCKS, int GATE>
__global__ void __launch_bounds__(experts::THREADS, BLOCKS)
    experts_product(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                    const float* row_scales, const float* weight_scales, const T* bias,
                    const Tile* tiles, const int* num_tiles, T* out, int n, int k, int first_row,
                    int is_history) {
    const experts::Operands at = {row_scales, weight_scales, bias,      tiles,     num_tiles,
                                  n,          k,             first_row, is_history};
    const experts::Values<In> values = {weight};
    experts::mainloop<experts::Values<In>, T, TOKENS, STAGES, BLOCKS, GATE, false>(x, values, at,
                                                                                   out);
}

// The same with a cluster of two blocks per tile of x.
template <typename In, typename T, int TOKENS, int STAGES, int GATE>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(experts::THREADS, 1)
    experts_product_pairs(const __grid_constant__ TensorMap x,
                          const __grid_constant__ TensorMap weight, const float* row_scales,
                          const float* weight_scales, const T* bias, const Tile* tiles,
                          const int* num_tiles, T* out, int n, int k, int first_row,
                          int is_history) {
    const experts::Operands at = {row_scales, weight_scales, bias,      tiles,     num_tiles,
                                  n,          k,             first_row, is_history};
    const experts::Values<In> values = {weight};
    experts::mainloop<experts::Values<In>, T, TOKENS, STAGES, 1, GATE, true>(x, values, at, out);
}

// experts_product with a weight in records R [experts * n / 16, chunks of k, R::BYTES], n a
// multiple of 16, with a map of boxes of BOX_TILES records. x has 16 bits. Table: of codes that are
// indices; null for others. Dynamic shared memory: STAGES * (ROWS / 16 records, rounded up to 1024
// bytes, and TOKENS * 256 + 16) instead.
template <class R, typename T, int TOKENS, int STAGES, int GATE>
__global__ void __launch_bounds__(experts::THREADS, 1)
    experts_product_codes(const __grid_constant__ TensorMap x,
                          const __grid_constant__ TensorMap records, const grouped::Table* table,
                          const T* bias, const Tile* tiles, const int* num_tiles, T* out, int n,
                          int k, int first_row, int is_history) {
    const experts::Operands at = {nullptr, nullptr, bias,      tiles,     num_tiles,
                                  n,       k,       first_row, is_history};
    experts::Codes<R> codes = {records, {}};
    if constexpr (R::CODES == grouped::TABLE) codes.table = *table;
    experts::mainloop<experts::Codes<R>, T, TOKENS, STAGES, 1, GATE, false>(x, codes, at, out);
}
