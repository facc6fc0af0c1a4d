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

#include "latent/latent_shape.cuh"

namespace attention {

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

}  // namespace attention
