// Processing of a unit of latent attention by a block with mma.sync: copying tiles of keys, both
// products with them, and the running sums. Units and shares are defined in attention_units.cuh.
//
// All heads share one key, and its value is the first part of the key: a tile is copied once and
// read for both products. What limits the kernel is shared memory, so no warp reads what another
// one reads, as far as possible:
//
//   scores   a warp has a quarter of the columns of keys, and of 16 rows half of the tile's keys,
//            of more rows half of the rows; the quarters are added in shared memory
//   softmax  all threads share the scores, each row's in one warp
//   sums     a warp has all rows of an eighth of the columns of values
#pragma once

#include "attention/attention_work.cuh"
#include "latent/latent_row.cuh"

namespace attention {

// Tile shape of a block of threads. STAGES tiles of keys are in shared memory. PAIRED: clusters of
// two blocks, which merge a unit of two pieces by way of each other's shared memory.
template <typename Element_, int ROWS_, int STAGES_, bool PAIRED_ = false>
struct LatentShape {
    using Element = Element_;
    static constexpr int ROWS = ROWS_;
    static constexpr int STAGES = STAGES_;
    static constexpr bool PAIRED = PAIRED_;
    static constexpr int HEADS = 1;  // KV heads per unit
    static constexpr int KEYS = 32;
    static constexpr int KEY_DIM = latent::KEY;
    static constexpr int HEAD_DIM = latent::RANK;  // of values and results

    static constexpr int WARPS = 8;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int COPY_KEYS = KEYS / WARPS;  // copied by a warp
    static constexpr bool CROSSES_UNITS = true;

    // Scores of a warp.
    static constexpr int DEPTHS = 4;
    static constexpr int DEPTH = KEY_DIM / DEPTHS;
    static constexpr int ROW_PARTS = ROWS == 16 ? 1 : 2;
    static constexpr int KEY_PARTS = WARPS / DEPTHS / ROW_PARTS;
    static constexpr int SCORE_ROWS = ROWS / ROW_PARTS;
    static constexpr int SCORE_KEYS = KEYS / KEY_PARTS;
    // Queries are kept in registers if they fit.
    static constexpr bool QUERIES_IN_REGISTERS = SCORE_ROWS == 16;

    static constexpr int LANES = THREADS / ROWS;      // threads of a row's softmax
    static constexpr int COLUMNS = HEAD_DIM / WARPS;  // of sums, of a warp

    // 8 elements of padding put the 8 rows of an ldmatrix into different banks.
    static constexpr int PITCH = KEY_DIM + 8;
    static constexpr int TILE = KEYS * PITCH;
    static constexpr int WEIGHT_PITCH = KEYS + 8;

    static_assert(ROWS % 16 == 0 && LANES <= 32 && KEYS % LANES == 0, "a row is in one warp");
    static_assert(DEPTH % 16 == 0 && COLUMNS % 16 == 0, "fragments cover 16 columns at a time");
    static_assert(COPY_KEYS == 4, "8 lanes copy a key");

    // The part of a tile that this warp copies: its keys from here on.
    __device__ __forceinline__ static int first_key() { return threadIdx.x / 32 * COPY_KEYS; }
    __device__ __forceinline__ static int kv_head(const Unit& unit) { return 0; }

    // Rows of q, and this warp's part of them.
    struct QueryRow {
        using Element = Element_;
        static constexpr int HEAD_DIM = KEY_DIM;
        __device__ __forceinline__ static int kv_head(const Unit& unit) { return 0; }
    };
    struct Slice {
        using Element = Element_;
        static constexpr bool QUANTIZED = false;
        static constexpr int HEAD_DIM = DEPTH;
    };
};

// A unit that other blocks process too.
struct Split {
    Unit unit;
    int launch;    // how often this plan's blocks have arrived before
    bool is_last;  // whether this block was the last one to arrive
};

// Layout of shared memory.
template <class S>
struct LatentMemory {
    using T = typename S::Element;
    static constexpr int TILE_BYTES = S::STAGES * S::TILE * 2;
    static constexpr int SCORE_BYTES = S::DEPTHS * S::ROWS * S::KEYS * 4;
    static constexpr int WEIGHT_BYTES = S::ROWS * S::WEIGHT_PITCH * 2;
    static constexpr int QUERY_BYTES = S::QUERIES_IN_REGISTERS ? 0 : S::ROWS * S::PITCH * 2;
    static constexpr int SPLIT_BYTES = 128;
    // Half of the other block's sums, and the states of its rows and of the own ones.
    static constexpr int EXCHANGE_BYTES =
        S::PAIRED ? S::ROWS * S::HEAD_DIM / 2 * 4 + 2 * S::ROWS * 8 : 0;
    static_assert(2 * sizeof(Split) <= SPLIT_BYTES, "a share has two split units at most");
    static_assert(S::THREADS * 24 <= SCORE_BYTES, "merging uses the memory of scores");

    T* tiles;         // [STAGES, KEYS, PITCH]
    T* queries;       // [ROWS, PITCH], unless they are in registers
    float* scores;    // [DEPTHS, ROWS, KEYS]
    T* weights;       // [ROWS, WEIGHT_PITCH]
    float* rescales;  // [ROWS]: factors of earlier sums
    float* inverses;  // [ROWS]: of the totals of a whole unit
    Split* splits;    // [2]
    float4* others;   // [ROWS * HEAD_DIM / 8], from the other block of a pair
    float2* states;   // [2, ROWS]: maxima and totals, of the own rows and of the other block's

    __device__ __forceinline__ explicit LatentMemory(unsigned char* memory) {
        const auto take = [&](int bytes) {
            unsigned char* const taken = memory;
            memory += bytes;
            return taken;
        };
        tiles = reinterpret_cast<T*>(take(TILE_BYTES));
        queries = reinterpret_cast<T*>(take(QUERY_BYTES));
        scores = reinterpret_cast<float*>(take(SCORE_BYTES));
        weights = reinterpret_cast<T*>(take(WEIGHT_BYTES));
        rescales = reinterpret_cast<float*>(take(S::ROWS * 4));
        inverses = reinterpret_cast<float*>(take(S::ROWS * 4));
        splits = reinterpret_cast<Split*>(take(SPLIT_BYTES));
        others = reinterpret_cast<float4*>(take(EXCHANGE_BYTES));
        states = reinterpret_cast<float2*>(others + S::ROWS * S::HEAD_DIM / 8);
    }
};

// ---------------------------------------------------------------- loading

// Copies this warp's part of a tile of keys, restricted to the keys [begin, end). Rows past the
// sequence become zero: their weight is 0, but the cache may contain NaN there.
template <class S>
struct CopyLatents {
    using T = typename S::Element;
    __device__ __forceinline__ static void load(T* tiles, const Arguments<T>& args, int kv_head,
                                                int kv_end, int stage, int tile, int page,
                                                int begin, int end) {
        const int row = threadIdx.x % 32 / 8, chunk = threadIdx.x % 8;
        const int first_key = tile * S::KEYS + S::first_key();
        const int in_block = (first_key & ((1 << args.block_shift) - 1)) + row;
        const T* const from =
            args.k_cache + page * args.block_stride + in_block * S::KEY_DIM + chunk * 8;
        const unsigned to = ptx::shared_address(tiles + stage * S::TILE +
                                                (S::first_key() + row) * S::PITCH + chunk * 8);
        const int key = first_key + row;
        const bool copied = key >= begin && key < end, valid = key < kv_end;
#pragma unroll
        for (int i = 0; i < S::KEY_DIM / 64; ++i) {
            // With few rows no other unit has the same keys.
            if constexpr (S::ROWS == 16)
                ptx::copy_once_async_if(copied, to + i * 128, from + i * 64, valid);
            else
                ptx::copy_async_if(copied, to + i * 128, from + i * 64, valid);
        }
    }
};

// Copies the unit's queries; rows past the chunk become zero.
template <class S>
__device__ __forceinline__ void copy_latent_queries(typename S::Element* queries,
                                                    const Arguments<typename S::Element>& args,
                                                    const Unit& unit) {
    constexpr int CHUNKS = S::KEY_DIM / 8;
#pragma unroll 2
    for (int index = threadIdx.x; index < S::ROWS * CHUNKS; index += S::THREADS) {
        const int row = index / CHUNKS, chunk = index % CHUNKS;
        const bool valid = row < unit.num_rows;
        ptx::copy_async(ptx::shared_address(queries + row * S::PITCH + chunk * 8),
                        query_row<typename S::QueryRow>(args, unit, valid ? row : 0) + chunk * 8,
                        valid);
    }
}

// ---------------------------------------------------------------- scores

// A warp's queries, if they are in registers.
template <class S>
using LatentRows = HeadRow<typename S::Slice>[2];

// The same queries in vectors, on their way to shared memory. Rows that do not exist are zero.
template <class S>
struct QueryVectors {
    static constexpr int CHUNKS = S::KEY_DIM / 8;
    static constexpr int COUNT = (S::ROWS * CHUNKS + S::THREADS - 1) / S::THREADS;
    uint4 vectors[COUNT];

    __device__ __forceinline__ void load(const Arguments<typename S::Element>& args,
                                         const Unit& unit) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int index = i * S::THREADS + threadIdx.x;
            const int row = index / CHUNKS, chunk = index % CHUNKS;
            vectors[i] = make_uint4(0, 0, 0, 0);
            if (row < unit.num_rows)
                vectors[i] = load_l2(reinterpret_cast<const uint4*>(
                    query_row<typename S::QueryRow>(args, unit, row) + chunk * 8));
        }
    }
    // Into the memory of a tile.
    __device__ __forceinline__ void store(typename S::Element* queries) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int index = i * S::THREADS + threadIdx.x;
            const int row = index / CHUNKS, chunk = index % CHUNKS;
            if (row < S::ROWS) store_vector(queries + row * S::PITCH + chunk * 8, vectors[i]);
        }
    }
};

template <class S>
__device__ __forceinline__ int first_latent_row() {
    return S::ROW_PARTS == 1 ? 0 : threadIdx.x / 32 / S::DEPTHS * S::SCORE_ROWS;
}

// From queries in shared memory.
template <class S>
__device__ __forceinline__ void take_latent_rows(LatentRows<S>& rows,
                                                 const typename S::Element* queries) {
    const int lane = threadIdx.x % 32, depth = threadIdx.x / 32 % S::DEPTHS;
    const unsigned base =
        ptx::shared_address(queries + (first_latent_row<S>() + lane % 16) * S::PITCH +
                            depth * S::DEPTH + lane / 16 * 8);
#pragma unroll
    for (int step = 0; step < S::DEPTH / 16; ++step) {
        unsigned a[4];
        ptx::load_matrices(a, base + step * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i % 2].words[step][i / 2] = a[i];
    }
}

template <class S>
__device__ __forceinline__ void load_latent_rows(LatentRows<S>& rows,
                                                 const Arguments<typename S::Element>& args,
                                                 const Unit& unit) {
    const int depth = threadIdx.x / 32 % S::DEPTHS;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_latent_row<S>() + half * 8 + threadIdx.x % 32 / 4;
        if (row < unit.num_rows)
            rows[half].load(query_row<typename S::QueryRow>(args, unit, row) + depth * S::DEPTH);
        else
            rows[half].clear();
    }
}

// Place of a score in [ROWS, KEYS]. Of four adjacent rows each has other banks, when fragments are
// written, and so have two of them when they are read in vectors of 16 bytes.
template <class S>
__device__ __forceinline__ int place_of_score(int row, int key) {
    static_assert(S::KEYS == 32, "a row is in all banks");
    return row * S::KEYS + (key ^ ((row & 1) << 4 | (row & 2) << 2));
}

// scores [DEPTHS, ROWS, KEYS] = queries @ keys^T, each quarter of the columns apart.
template <class S>
__device__ __forceinline__ void multiply_keys(const LatentMemory<S>& memory,
                                              const LatentRows<S>& rows,
                                              const typename S::Element* keys) {
    using T = typename S::Element;
    constexpr int FRAGMENTS = S::SCORE_ROWS / 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int depth = warp % S::DEPTHS, part = warp / S::DEPTHS;
    const int first_row = S::ROW_PARTS == 1 ? 0 : part * S::SCORE_ROWS;
    const int first_key = S::KEY_PARTS == 1 ? 0 : part * S::SCORE_KEYS;
    // Matrices in the order keys 0-7 | columns 0-7, 0-7 | 8-15, 8-15 | 0-7, 8-15 | 8-15.
    const unsigned base =
        ptx::shared_address(keys + (first_key + lane / 16 * 8 + lane % 8) * S::PITCH +
                            depth * S::DEPTH + lane / 8 % 2 * 8);
    const unsigned query_base = ptx::shared_address(
        memory.queries + (first_row + lane % 16) * S::PITCH + depth * S::DEPTH + lane / 16 * 8);
    float sums[FRAGMENTS][S::SCORE_KEYS / 8][4] = {};
#pragma unroll
    for (int step = 0; step < S::DEPTH / 16; ++step) {
        unsigned a[FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
            if constexpr (S::QUERIES_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[f][i] = rows[i % 2].words[step][i / 2];
            } else {
                ptx::load_matrices(a[f], query_base + (f * 16 * S::PITCH + step * 16) * 2);
            }
        }
#pragma unroll
        for (int n = 0; n < S::SCORE_KEYS / 16; ++n) {
            unsigned b[4];
            ptx::load_matrices(b, base + (n * 16 * S::PITCH + step * 16) * 2);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f) {
                ptx::mma<T>(sums[f][2 * n], a[f], b[0], b[1]);
                ptx::mma<T>(sums[f][2 * n + 1], a[f], b[2], b[3]);
            }
        }
    }
    float* const scores = memory.scores + depth * S::ROWS * S::KEYS;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int n = 0; n < S::SCORE_KEYS / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2*>(
                    scores + place_of_score<S>(first_row + f * 16 + half * 8 + lane / 4,
                                               first_key + n * 8 + lane % 4 * 2)) =
                    make_float2(sums[f][n][2 * half], sums[f][n][2 * half + 1]);
}

// ---------------------------------------------------------------- softmax

// Running maximum and total of a thread's row; the total is of its own keys.
struct LatentState {
    float max, total;

    __device__ __forceinline__ void clear() {
        max = -CUDART_INF_F;
        total = 0.0f;
    }
};

// Online softmax: writes weights relative to the running maxima, and what earlier sums must be
// multiplied by. With `masks`, keys past a row's own are hidden; rows that do not exist are treated
// like the last valid one.
template <class S>
__device__ __forceinline__ void weigh_keys(const LatentMemory<S>& memory, LatentState& state,
                                           const Arguments<typename S::Element>& args,
                                           const Unit& unit, int first_key, bool masks) {
    using T = typename S::Element;
    constexpr int COUNT = S::KEYS / S::LANES;  // keys of a thread,
    constexpr int N = COUNT < 4 ? COUNT : 4;   // in vectors of so many,
    constexpr int STEP = S::LANES * N;         // so far apart
    const int row = threadIdx.x / S::LANES, lane = threadIdx.x % S::LANES;
    float scores[COUNT] = {};
#pragma unroll
    for (int depth = 0; depth < S::DEPTHS; ++depth)
#pragma unroll
        for (int i = 0; i < COUNT; i += N) {
            const float* const from = memory.scores + depth * S::ROWS * S::KEYS +
                                      place_of_score<S>(row, i / N * STEP + lane * N);
            if constexpr (N == 4) {
                const float4 part = *reinterpret_cast<const float4*>(from);
                scores[i] += part.x;
                scores[i + 1] += part.y;
                scores[i + 2] += part.z;
                scores[i + 3] += part.w;
            } else {
                const float2 part = *reinterpret_cast<const float2*>(from);
                scores[i] += part.x;
                scores[i + 1] += part.y;
            }
        }
    if (masks) {
        const int packed = unit.item.first_row + min(row, unit.num_rows - 1);
        const int last = unit.item.kv_len - unit.item.query_len + args.token_of(packed);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (first_key + i / N * STEP + lane * N + i % N > last) scores[i] = -CUDART_INF_F;
    }
    float largest = scores[0];
#pragma unroll
    for (int i = 1; i < COUNT; ++i) largest = fmaxf(largest, scores[i]);
    const float before = state.max;
    const float now = fmaxf(before, warp_max<S::LANES>(largest) * args.scale);
    // For a row without keys so far, -inf - -inf would be NaN.
    const float origin = now == -CUDART_INF_F ? 0.0f : now;
    const float rescale = ptx::exp2(before - origin);
    state.max = now;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        scores[i] = ptx::exp2(fmaf(scores[i], args.scale, -origin));
        total += scores[i];
    }
    state.total = fmaf(state.total, rescale, total);
    T* const weights = memory.weights + row * S::WEIGHT_PITCH + lane * N;
#pragma unroll
    for (int i = 0; i < COUNT; i += 2)
        *reinterpret_cast<unsigned*>(weights + i / N * STEP + i % N) =
            ptx::pack<T>(scores[i], scores[i + 1]);
    if (lane == 0) memory.rescales[row] = rescale;
}

// ---------------------------------------------------------------- sums

// Of all rows and this warp's columns, in fragments of 16 x 8.
template <class S>
using LatentSums = float[S::ROWS / 16][S::COLUMNS / 8][4];

// sums = sums * rescales + weights @ values.
template <class S>
__device__ __forceinline__ void add_values(LatentSums<S>& sums, const LatentMemory<S>& memory,
                                           const typename S::Element* values) {
    using T = typename S::Element;
    constexpr int FRAGMENTS = S::ROWS / 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float rescale = memory.rescales[f * 16 + half * 8 + lane / 4];
#pragma unroll
            for (int n = 0; n < S::COLUMNS / 8; ++n) {
                sums[f][n][2 * half] *= rescale;
                sums[f][n][2 * half + 1] *= rescale;
            }
        }
    const unsigned weights =
        ptx::shared_address(memory.weights + lane % 16 * S::WEIGHT_PITCH + lane / 16 * 8);
    // Matrices in the order keys 0-7 | columns 0-7, 8-15 | 0-7, 0-7 | 8-15, 8-15 | 8-15.
    const unsigned base =
        ptx::shared_address(values + lane % 16 * S::PITCH + warp * S::COLUMNS + lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < S::KEYS / 16; ++k) {
        unsigned a[FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
            ptx::load_matrices(a[f], weights + (f * 16 * S::WEIGHT_PITCH + k * 16) * 2);
#pragma unroll
        for (int column = 0; column < S::COLUMNS / 16; ++column) {
            unsigned b[4];
            ptx::load_matrices_transposed(b, base + (k * 16 * S::PITCH + column * 16) * 2);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f) {
                ptx::mma<T>(sums[f][2 * column], a[f], b[0], b[1]);
                ptx::mma<T>(sums[f][2 * column + 1], a[f], b[2], b[3]);
            }
        }
    }
}

// ---------------------------------------------------------------- results

// Calls write(row, column, sums of two columns) for each row of a unit.
template <class S, class Write>
__device__ __forceinline__ void for_sums(const LatentSums<S>& sums, int num_rows,
                                         const Write& write) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int f = 0; f < S::ROWS / 16; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = f * 16 + half * 8 + lane / 4;
            if (row >= num_rows) continue;
#pragma unroll
            for (int n = 0; n < S::COLUMNS / 8; ++n)
                write(row, warp * S::COLUMNS + n * 8 + lane % 4 * 2,
                      make_float2(sums[f][n][2 * half], sums[f][n][2 * half + 1]));
        }
}

// A slot has the sums in the order of threads' fragments, so that each warp writes and reads
// adjacent vectors: of a row, two columns and those 8 further. Where place `index` of QUARTERS for
// each row is in the unit.
struct SlotPlace {
    int row, column;
};

template <class S>
__device__ __forceinline__ SlotPlace slot_place(int index) {
    constexpr int PAIRS = S::COLUMNS / 16;
    const int thread = index % S::THREADS, fragment = index / S::THREADS;
    const int lane = thread % 32, warp = thread / 32;
    const int eight_rows = fragment / PAIRS, pair = fragment % PAIRS;
    return {eight_rows * 8 + lane / 4, warp * S::COLUMNS + pair * 16 + lane % 4 * 2};
}

// Writes the rows of a unit, to `out` or, if the unit is split, to a slot.
template <class S>
__device__ __forceinline__ void leave_sums(const Arguments<typename S::Element>& args,
                                           const Unit& unit, const LatentSums<S>& sums,
                                           const LatentState& state, const LatentMemory<S>& memory,
                                           const Slots<S>& slots) {
    using T = typename S::Element;
    const int row = threadIdx.x / S::LANES;
    const float total = warp_sum<S::LANES>(state.total);
    if (unit.whole()) {
        // Zero for a row without keys.
        if (threadIdx.x % S::LANES == 0) memory.inverses[row] = total > 0.0f ? 1.0f / total : 0.0f;
        __syncthreads();
        for_sums<S>(sums, unit.num_rows, [&](int row, int column, float2 pair) {
            const float inverse = memory.inverses[row];
            *reinterpret_cast<unsigned*>(out_row<S>(args, unit, query_of<S>(args, unit, row)) +
                                         column) = ptx::pack<T>(pair.x * inverse, pair.y * inverse);
        });
        return;
    }
    const int slot = Slots<S>::own(unit);
    if (threadIdx.x % S::LANES == 0 && row < unit.num_rows)
        *slots.state(slot, row) = make_float2(state.max, total);
    // Step by step, as addresses that are all computed before take registers from the loop.
    float* place = slots.row(slot, 0) + 4 * threadIdx.x;
#pragma unroll
    for (int f = 0; f < S::ROWS / 16; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < S::COLUMNS / 8; n += 2) {
                *reinterpret_cast<float4*>(place) =
                    make_float4(sums[f][n][2 * half], sums[f][n][2 * half + 1],
                                sums[f][n + 1][2 * half], sums[f][n + 1][2 * half + 1]);
                place += 4 * S::THREADS;
            }
}

}  // namespace attention
