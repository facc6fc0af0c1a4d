// Causal attention over a paged KV cache: decode rows, chunks of prompts and any mix of them.
//
// attention_units.cuh says what units, items and shares are.
//
// `plan` lays items end to end and cuts them into shares; `attend` works a share off. A unit cut by
// the end of a share leaves partial sums, and the last of its blocks to arrive merges them
// (FlashAttention, arXiv:2205.14135; splitting keys, Flash-Decoding; even shares, Stream-K,
// arXiv:2301.03598). The plan lives in device memory and the grid is fixed, so a CUDA graph replays
// with other lengths.
//
// A small step is a chain of latencies, so as many of them as can be lie under the kernel before:
// a step `settled` says that only q and the keys and values of this step's own tokens may still be
// on their way, and all else is read before that kernel has ended. `rope_attend` takes the qkv
// projection as it is, one token per chunk, and saves the kernel in between.

#include <cuda/std/utility>

#include "attention_ptx.cuh"
#include "attention_units.cuh"
#include "common.cuh"

namespace attention {

// How a block of threads is laid over a unit.
//   WARPS_M x WARPS_N warps; each has FRAGMENTS * 16 rows and KEYS / WARPS_N of the keys.
//   STAGES tiles of keys and values are in shared memory.
template <typename Element_, int HEAD_DIM_, int WARPS_M_, int WARPS_N_, int FRAGMENTS_, int KEYS_,
          int STAGES_>
struct Shape {
    using Element = Element_;
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int WARPS_M = WARPS_M_;
    static constexpr int WARPS_N = WARPS_N_;
    static constexpr int FRAGMENTS = FRAGMENTS_;
    static constexpr int KEYS = KEYS_;
    static constexpr int STAGES = STAGES_;

    static constexpr int WARPS = WARPS_M * WARPS_N;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int WARP_ROWS = 16 * FRAGMENTS;
    static constexpr int ROWS = WARPS_M * WARP_ROWS;
    static constexpr int WARP_KEYS = KEYS / WARPS_N;  // a warp multiplies
    static constexpr int COPY_KEYS = KEYS / WARPS;    // a warp copies
    // With one row of warps these are the same keys: no warp ever waits for another one's copies.
    static constexpr bool PRIVATE = WARPS_M == 1;
    // Queries stay in registers where they fit, and then go there at once.
    static constexpr bool QUERIES_IN_REGISTERS = FRAGMENTS == 1 && HEAD_DIM <= 128;

    static constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes, in a row
    // 8 elements of padding put the 8 rows of an ldmatrix into different banks, for each HEAD_DIM.
    static constexpr int PITCH = HEAD_DIM + 8;
    static constexpr int TILE = KEYS * PITCH;
    static constexpr int FLOAT_PITCH = HEAD_DIM + 8;

    static constexpr int QUERY_BYTES = QUERIES_IN_REGISTERS ? 0 : ROWS * PITCH * 2;
    static constexpr int TILE_BYTES = STAGES * 2 * TILE * 2;
    static constexpr int STATE_BYTES = WARPS_N * ROWS * 8;
    static constexpr int SHARED_BYTES = QUERY_BYTES + TILE_BYTES + STATE_BYTES;

    static_assert(HEAD_DIM % 32 == 0, "copies and fragments take 32 columns at a time");
    static_assert(WARP_KEYS % 16 == 0, "a fragment of probabilities has 16 keys");
    static_assert(COPY_KEYS <= 16, "16 consecutive keys are always in one block of the cache");
    static_assert(COPY_KEYS * CHUNKS % 32 == 0, "each lane copies the same number of chunks");
    // The sums of all warps go where tiles were.
    static constexpr int SUMS_BYTES = WARPS_N * ROWS * FLOAT_PITCH * 4;
    static_assert(SUMS_BYTES <= TILE_BYTES, "no room for the sums");
    // Or in one stage: then the others may have the next unit's already.
    static constexpr bool RUNS_ON = QUERIES_IN_REGISTERS && SUMS_BYTES <= TILE_BYTES / STAGES;
};

// ---------------------------------------------------------------- loading

// The row of q that is a row of a unit.
template <class S>
__device__ __forceinline__ const typename S::Element* query_row(
    const Arguments<typename S::Element>& args, const Unit& unit, int row) {
    const int packed = unit.item.first_row + row;
    const int token = args.token_of(packed);
    const int head = unit.head * args.group + packed - token * args.group;
    return args.q + (unit.item.query_start + token) * args.q_stride + head * S::HEAD_DIM;
}

// Copies the unit's queries; rows past the chunk become zero.
template <class S>
__device__ __forceinline__ void copy_queries(typename S::Element* shared,
                                             const Arguments<typename S::Element>& args,
                                             const Unit& unit) {
    const unsigned base = ptx::shared_address(shared);
#pragma unroll
    for (int index = threadIdx.x; index < S::ROWS * S::CHUNKS; index += S::THREADS) {
        const int row = index / S::CHUNKS;
        const int chunk = index % S::CHUNKS;
        const bool valid = row < unit.num_rows;
        ptx::copy_async(base + (row * S::PITCH + chunk * 8) * 2,
                        query_row<S>(args, unit, valid ? row : 0) + chunk * 8, valid);
    }
}

// The cache blocks of the keys that this warp copies, of 32 tiles in a row: each lane knows one.
template <class S>
struct Pages {
    int first;  // tile
    int block;

    __device__ __forceinline__ void find(const int* table, int block_shift, int kv_end, int tile) {
        const int key = (tile + threadIdx.x % 32) * S::KEYS + threadIdx.x / 32 * S::COPY_KEYS;
        first = tile;
        // The table ends with the sequence.
        block = key < kv_end ? load_l2(table + (key >> block_shift)) : 0;
    }
    __device__ __forceinline__ bool knows(int tile) const {
        return static_cast<unsigned>(tile - first) < 32;
    }
    __device__ __forceinline__ int of(int tile) const {
        return __shfl_sync(FULL_WARP, block, tile - first);
    }
};

// Copies this warp's part of a tile of keys and values, but only of the keys [begin, end). What
// lies past the sequence becomes zero: its weight is 0, but the cache may hold NaN there.
template <class S>
__device__ __forceinline__ void load_tile(typename S::Element* keys,
                                          const Arguments<typename S::Element>& args, int kv_head,
                                          int kv_end, int tile, int page, int begin, int end) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row_stride = args.num_kv_heads * S::HEAD_DIM;
    const int first_row = warp * S::COPY_KEYS;
    const int first_key = tile * S::KEYS + first_row;
    const long long origin = page * args.block_stride +
                             (first_key & ((1 << args.block_shift) - 1)) * row_stride +
                             kv_head * S::HEAD_DIM;
    const int lane_row = lane / S::CHUNKS;
    const int lane_chunk = lane % S::CHUNKS;
    const typename S::Element* from_keys =
        args.k_cache + origin + lane_row * row_stride + lane_chunk * 8;
    const typename S::Element* from_values =
        args.v_cache + origin + lane_row * row_stride + lane_chunk * 8;
    const unsigned target =
        ptx::shared_address(keys + (first_row + lane_row) * S::PITCH + lane_chunk * 8);
#pragma unroll
    for (int i = 0; i < S::COPY_KEYS * S::CHUNKS / 32; ++i) {
        // Rows and chunks from that of the lane on, the same for all lanes if it comes out even.
        const int index = i * 32 + (32 % S::CHUNKS == 0 ? 0 : lane);
        const int row = index / S::CHUNKS - (32 % S::CHUNKS == 0 ? 0 : lane_row);
        const int chunk = index % S::CHUNKS - (32 % S::CHUNKS == 0 ? 0 : lane_chunk);
        const int key = first_key + lane_row + row;
        const bool copied = key >= begin && key < end;
        const bool valid = key < kv_end;
        const unsigned place = target + (row * S::PITCH + chunk * 8) * 2;
        const long long source = static_cast<long long>(row) * row_stride + chunk * 8;
        ptx::copy_async_if(copied, place, from_keys + source, valid);
        ptx::copy_async_if(copied, place + S::TILE * 2, from_values + source, valid);
    }
}

// Fragment `step` (16 columns) of this warp's queries; `rows` is the first of 16.
template <class S>
__device__ __forceinline__ void load_query_fragment(unsigned (&fragment)[4],
                                                    const typename S::Element* queries, int rows,
                                                    int step) {
    const int lane = threadIdx.x % 32;
    const int row = rows + lane % 16;
    const int column = step * 16 + lane / 16 * 8;
    ptx::load_matrices(fragment, ptx::shared_address(queries + row * S::PITCH + column));
}

// ---------------------------------------------------------------- registers

template <class S>
struct State {
    float sums[S::FRAGMENTS][S::HEAD_DIM / 8][4];
    float max[S::FRAGMENTS][2];    // of the scores so far, in units of log 2
    float total[S::FRAGMENTS][2];  // of the weights so far, this lane's columns only
};

template <class S>
using Scores = float[S::FRAGMENTS][S::WARP_KEYS / 8][4];

// ---------------------------------------------------------------- queries and new keys

// What a lane has of a row of a head, as in a fragment: of each 16 columns, four in two words.
template <class S>
struct HeadRow {
    static constexpr int STEPS = S::HEAD_DIM / 16;
    unsigned words[STEPS][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) words[step][0] = words[step][1] = 0;
    }
    __device__ __forceinline__ void load(const typename S::Element* row) {
        load_from(reinterpret_cast<const unsigned*>(row) + threadIdx.x % 4,
                  cuda::std::make_integer_sequence<int, STEPS>());
    }

   private:
    template <int... STEP>
    __device__ __forceinline__ void load_from(const unsigned* first,
                                              cuda::std::integer_sequence<int, STEP...>) {
        ((words[STEP][0] = load_l2<STEP * 32>(first)), ...);
        ((words[STEP][1] = load_l2<STEP * 32 + 16>(first)), ...);
    }
};

// q and the cache as `rope_write_kv` has left them.
template <class S>
struct InPlace {
    using T = typename S::Element;
    static constexpr bool ROTATES = false;

    __device__ __forceinline__ void prepare(const Arguments<T>&, const Unit&, bool) {}
    __device__ __forceinline__ void load(const Arguments<T>&, const Unit&) {}
    __device__ __forceinline__ const T* key_row(const Arguments<T>&, const Unit&) const {
        return nullptr;
    }
    __device__ __forceinline__ void turn(const Unit&, HeadRow<S> (&)[2]) const {}
    __device__ __forceinline__ void place(const Arguments<T>&, const Unit&,
                                          const HeadRow<S> (&)[2], T*, T*) const {}
};

// What `rope_attend` knows more than `attend`; see rope.cu.
template <typename T>
struct Projection {
    T* k_cache;
    T* v_cache;
    const long long* slots;
    const long long* positions;
    const float* cos;
    const float* sin;
    const T* q_weight;
    const T* k_weight;
    float eps;
};

// The rows of a qkv projection, one token per chunk: q is normed and rotated on its way into
// registers. The token's key rides along as one more row of q, and goes from there into the tile
// and the cache that it is of.
template <class S, bool NORM>
struct Rotated {
    using T = typename S::Element;
    static constexpr bool ROTATES = true;
    static constexpr int HALF_STEPS = S::HEAD_DIM / 32;
    static_assert(S::PRIVATE && S::QUERIES_IN_REGISTERS, "a warp puts a key where it reads it");

    const Projection<T>& projection;
    bool has_key;  // this warp has the token's key in one of its tiles
    long long slot;
    float2 cos[HALF_STEPS][2], sin[HALF_STEPS][2];
    HeadRow<S> weights[2];  // of `rows`
    uint4 value;

    __device__ __forceinline__ explicit Rotated(const Projection<T>& all) : projection(all) {}

    // What the projection does not write.
    __device__ __forceinline__ void prepare(const Arguments<T>& args, const Unit& unit,
                                            bool has_new) {
        has_key = has_new;
        const int token = unit.item.query_start;
        slot = load_l2(projection.slots + token);
        const long long place =
            load_l2(projection.positions + token) * S::HEAD_DIM + threadIdx.x % 4 * 2;
        load_angles(reinterpret_cast<const float2*>(projection.cos + place),
                    reinterpret_cast<const float2*>(projection.sin + place),
                    cuda::std::make_integer_sequence<int, HALF_STEPS>());
        if constexpr (NORM) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                weights[half].load(half * 8 + threadIdx.x % 32 / 4 < unit.num_rows
                                       ? projection.q_weight
                                       : projection.k_weight);
        }
    }

    __device__ __forceinline__ const T* key_row(const Arguments<T>& args, const Unit& unit) const {
        return !has_key ? nullptr
                        : args.q + unit.item.query_start * args.q_stride +
                              (args.num_heads + unit.head) * S::HEAD_DIM;
    }

    __device__ __forceinline__ void load(const Arguments<T>& args, const Unit& unit) {
        const int lane = threadIdx.x % 32;
        if (has_key && lane < S::CHUNKS)
            value = load_l2(reinterpret_cast<const uint4*>(key_row(args, unit) +
                                                           args.num_kv_heads * S::HEAD_DIM) +
                            lane);
    }

    __device__ __forceinline__ void turn(const Unit& unit, HeadRow<S> (&rows)[2]) const {
        turn(rows[0], weights[0]);
        if (unit.num_rows >= 8) turn(rows[1], weights[1]);
    }

    // Into the tile, where this warp alone reads it, and into the cache.
    __device__ __forceinline__ void place(const Arguments<T>& args, const Unit& unit,
                                          const HeadRow<S> (&rows)[2], T* keys,
                                          T* values) const {
        if (!has_key) return;
        const int lane = threadIdx.x % 32;
        const int row = (unit.item.kv_len - 1) % S::KEYS * S::PITCH;
        if (lane / 4 == unit.num_rows % 8) {
            unsigned* const words = reinterpret_cast<unsigned*>(keys + row) + lane % 4;
            const bool low = unit.num_rows < 8;  // the key is among the first 8 rows
#pragma unroll
            for (int step = 0; step < HeadRow<S>::STEPS; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const unsigned first = rows[0].words[step][half];
                    const unsigned second = rows[1].words[step][half];
                    words[step * 8 + half * 4] = low ? first : second;
                }
        }
        if (lane < S::CHUNKS) reinterpret_cast<uint4*>(values + row)[lane] = value;
        __syncwarp();
        if (slot < 0 || lane >= S::CHUNKS) return;
        const int offset = static_cast<int>(slot) & ((1 << args.block_shift) - 1);
        const long long to = (static_cast<int>(slot) >> args.block_shift) * args.block_stride +
                             (offset * args.num_kv_heads + unit.head) * S::HEAD_DIM;
        reinterpret_cast<uint4*>(projection.k_cache + to)[lane] =
            reinterpret_cast<const uint4*>(keys + row)[lane];
        reinterpret_cast<uint4*>(projection.v_cache + to)[lane] = value;
    }

   private:
    template <int... STEP>
    __device__ __forceinline__ void load_angles(const float2* cosines, const float2* sines,
                                                cuda::std::integer_sequence<int, STEP...>) {
        constexpr int SECOND = S::HEAD_DIM / 2 * 4;
        ((cos[STEP][0] = load_l2<STEP * 64>(cosines)), ...);
        ((cos[STEP][1] = load_l2<STEP * 64 + 32>(cosines)), ...);
        ((sin[STEP][0] = load_l2<SECOND + STEP * 64>(sines)), ...);
        ((sin[STEP][1] = load_l2<SECOND + STEP * 64 + 32>(sines)), ...);
    }

    __device__ __forceinline__ void turn(HeadRow<S>& row, const HeadRow<S>& weight) const {
        float scale = 1.0f;
        if (NORM) {
            float squares = 0.0f;
#pragma unroll
            for (int step = 0; step < HeadRow<S>::STEPS; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 x = ptx::unpack<T>(row.words[step][half]);
                    squares += x.x * x.x + x.y * x.y;
                }
            scale = rsqrtf(sum_of_quad(squares) / S::HEAD_DIM + projection.eps);
        }
#pragma unroll
        for (int step = 0; step < HALF_STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned& low = row.words[step][half];
                unsigned& high = row.words[step + HALF_STEPS][half];
                float2 a = ptx::unpack<T>(low), b = ptx::unpack<T>(high);
                if (NORM) {
                    const float2 w = ptx::unpack<T>(weight.words[step][half]);
                    const float2 v = ptx::unpack<T>(weight.words[step + HALF_STEPS][half]);
                    a = make_float2(a.x * (scale * w.x), a.y * (scale * w.y));
                    b = make_float2(b.x * (scale * v.x), b.y * (scale * v.y));
                }
                const float2 c = cos[step][half], s = sin[step][half];
                low = ptx::pack<T>(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
                high = ptx::pack<T>(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y);
            }
    }
};

// The queries of this warp and, where there is one, `key` as the row behind them; other rows that
// do not exist are zero.
template <class S>
__device__ __forceinline__ void load_queries(HeadRow<S> (&rows)[2],
                                             const Arguments<typename S::Element>& args,
                                             const Unit& unit, const typename S::Element* key,
                                             int warp_m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = warp_m * S::WARP_ROWS + half * 8 + threadIdx.x % 32 / 4;
        const typename S::Element* from = row < unit.num_rows    ? query_row<S>(args, unit, row)
                                          : row == unit.num_rows ? key
                                                                 : nullptr;
        if (from != nullptr)
            rows[half].load(from);
        else
            rows[half].clear();
    }
}

// ---------------------------------------------------------------- arithmetic

// scores = queries @ keys^T.
template <class S>
__device__ __forceinline__ void mma_qk(Scores<S>& scores, const HeadRow<S> (&rows)[2],
                                       const typename S::Element* queries,
                                       const typename S::Element* keys, int warp_m, int warp_n) {
    const int lane = threadIdx.x % 32;
    // Matrices in the order keys 0-7 | columns 0-7, 0-7 | 8-15, 8-15 | 0-7, 8-15 | 8-15.
    const int key = warp_n * S::WARP_KEYS + lane / 16 * 8 + lane % 8;
    const unsigned base = ptx::shared_address(keys + key * S::PITCH + lane / 8 % 2 * 8);
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
        for (int n = 0; n < S::WARP_KEYS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[f][n][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < S::HEAD_DIM / 16; ++step) {
        unsigned a[S::FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; ++f) {
            if (!S::QUERIES_IN_REGISTERS) {
                load_query_fragment<S>(a[f], queries, warp_m * S::WARP_ROWS + f * 16, step);
                continue;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) a[f][i] = rows[i % 2].words[step][i / 2];
        }
#pragma unroll
        for (int n = 0; n < S::WARP_KEYS / 16; ++n) {
            unsigned b[4];
            ptx::load_matrices(b, base + (n * 16 * S::PITCH + step * 16) * 2);
#pragma unroll
            for (int f = 0; f < S::FRAGMENTS; ++f) {
                ptx::mma<typename S::Element>(scores[f][2 * n], a[f], b[0], b[1]);
                ptx::mma<typename S::Element>(scores[f][2 * n + 1], a[f], b[2], b[3]);
            }
        }
    }
}

template <class S>
__device__ __forceinline__ void cap_scores(Scores<S>& scores, float scale, float soft_cap) {
    const SoftCap cap(scale, soft_cap);
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
        for (int n = 0; n < S::WARP_KEYS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[f][n][e] = cap(scores[f][n][e]);
}

// Scores that a row does not see become -inf. A row sees the keys up to its own position; rows that
// do not exist follow the last one that does. Few tiles need this, so no register is kept for it.
template <class S>
__device__ __forceinline__ void mask_scores(Scores<S>& scores,
                                            const Arguments<typename S::Element>& args,
                                            const Unit& unit, int warp_m, int first_key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_m * S::WARP_ROWS + f * 16 + half * 8 + lane / 4;
            const int packed = unit.item.first_row + min(row, unit.num_rows - 1);
            const int last = unit.item.kv_len - unit.item.query_len + args.token_of(packed);
#pragma unroll
            for (int n = 0; n < S::WARP_KEYS / 8; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    const int key = first_key + n * 8 + lane % 4 * 2 + e % 2;
                    if (key > last || key <= last - args.window) scores[f][n][e] = -CUDART_INF_F;
                }
        }
}

// Scores become weights relative to the largest score so far; what was summed before is rescaled.
template <class S>
__device__ __forceinline__ void softmax_step(State<S>& state, Scores<S>& scores, float scale) {
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = scores[f][0][2 * half];
#pragma unroll
            for (int n = 0; n < S::WARP_KEYS / 8; ++n)
                largest = fmaxf(largest, fmaxf(scores[f][n][2 * half], scores[f][n][2 * half + 1]));
            const float before = state.max[f][half];
            const float now = fmaxf(before, max_of_quad(largest) * scale);
            // A row that has seen no key yet: -inf - -inf would be NaN.
            const float origin = now == -CUDART_INF_F ? 0.0f : now;
            const float rescale = ptx::exp2(before - origin);
            state.max[f][half] = now;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < S::WARP_KEYS / 8; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    scores[f][n][e] = ptx::exp2(fmaf(scores[f][n][e], scale, -origin));
                    total += scores[f][n][e];
                }
            state.total[f][half] = fmaf(state.total[f][half], rescale, total);
#pragma unroll
            for (int n = 0; n < S::HEAD_DIM / 8; ++n) {
                state.sums[f][n][2 * half] *= rescale;
                state.sums[f][n][2 * half + 1] *= rescale;
            }
        }
}

// sums += weights @ values. Two 8-column fragments of scores, side by side, are just the fragment
// of a 16-column left operand.
template <class S>
__device__ __forceinline__ void mma_pv(State<S>& state, const Scores<S>& weights,
                                       const typename S::Element* values, int warp_n) {
    using T = typename S::Element;
    const int lane = threadIdx.x % 32;
    // Matrices in the order keys 0-7 | columns 0-7, 8-15 | 0-7, 0-7 | 8-15, 8-15 | 8-15.
    const int key = warp_n * S::WARP_KEYS + lane % 16;
    const unsigned base = ptx::shared_address(values + key * S::PITCH + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < S::WARP_KEYS / 16; ++n) {
        unsigned a[S::FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; ++f) {
            a[f][0] = ptx::pack<T>(weights[f][2 * n][0], weights[f][2 * n][1]);
            a[f][1] = ptx::pack<T>(weights[f][2 * n][2], weights[f][2 * n][3]);
            a[f][2] = ptx::pack<T>(weights[f][2 * n + 1][0], weights[f][2 * n + 1][1]);
            a[f][3] = ptx::pack<T>(weights[f][2 * n + 1][2], weights[f][2 * n + 1][3]);
        }
#pragma unroll
        for (int column = 0; column < S::HEAD_DIM / 16; ++column) {
            unsigned b[4];
            ptx::load_matrices_transposed(b, base + (n * 16 * S::PITCH + column * 16) * 2);
#pragma unroll
            for (int f = 0; f < S::FRAGMENTS; ++f) {
                ptx::mma<T>(state.sums[f][2 * column], a[f], b[0], b[1]);
                ptx::mma<T>(state.sums[f][2 * column + 1], a[f], b[2], b[3]);
            }
        }
    }
}

// ---------------------------------------------------------------- results

// Each warp's sums, and the maximum and total of each row, to shared memory.
template <class S>
__device__ __forceinline__ void store_state(float* sums, float2* states, const State<S>& state,
                                            int num_rows, int warp_m, int warp_n) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int unit_row = warp_m * S::WARP_ROWS + f * 16 + half * 8 + lane / 4;
            const int row = warp_n * S::ROWS + unit_row;
            const float total = sum_of_quad(state.total[f][half]);
            if (unit_row >= num_rows) continue;
            if (lane % 4 == 0) states[row] = make_float2(state.max[f][half], total);
#pragma unroll
            for (int n = 0; n < S::HEAD_DIM / 8; ++n)
                *reinterpret_cast<float2*>(sums + row * S::FLOAT_PITCH + n * 8 + lane % 4 * 2) =
                    make_float2(state.sums[f][n][2 * half], state.sums[f][n][2 * half + 1]);
        }
}

// Adds up the warps' sums and writes the rows, to `out` or, if the unit is cut, to a slot; merges
// the slots if this is the last block of the unit to come here.
template <class S>
__device__ __forceinline__ void finish_unit(const Arguments<typename S::Element>& args,
                                            const Unit& unit, const Share& share, const float* sums,
                                            const float2* states, const Slots<S>& slots,
                                            int* arrivals) {
    constexpr int QUARTERS = S::HEAD_DIM / 4;
    const bool whole = unit.whole();
    const int own_slot = Slots<S>::own(unit);
#pragma unroll 1
    for (int index = threadIdx.x; index < unit.num_rows * QUARTERS; index += S::THREADS) {
        const int row = index / QUARTERS;
        const int column = index % QUARTERS * 4;
        float largest = -CUDART_INF_F;
#pragma unroll
        for (int n = 0; n < S::WARPS_N; ++n) largest = fmaxf(largest, states[n * S::ROWS + row].x);
        Merged merged(largest);
#pragma unroll
        for (int n = 0; n < S::WARPS_N; ++n) {
            const int place = n * S::ROWS + row;
            merged.add(states[place],
                       *reinterpret_cast<const float4*>(sums + place * S::FLOAT_PITCH + column));
        }
        if (whole) {
            write_out<S>(args, unit, row, column, merged);
        } else {
            *reinterpret_cast<float4*>(slots.row(own_slot, row) + column) = merged.sums;
            if (column == 0) *slots.state(own_slot, row) = make_float2(merged.max, merged.total);
        }
    }
    if (whole) return;

    const Blocks blocks(unit, share);
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        int* const arrived = arrivals + blocks.first;
        is_last = ptx::count_arrival(arrived) == blocks.last - blocks.first;
        if (is_last) *arrived = 0;  // for the next launch with this plan
    }
    __syncthreads();
    if (is_last)
        merge_slots<S, S::THREADS>(args, unit, slots, blocks, 0, unit.num_rows, threadIdx.x);
}

// ---------------------------------------------------------------- a share

// Where a block is in its share.
template <class S>
struct Walk {
    const Item* items;
    Unit unit;
    int k;     // of the unit's item
    int left;  // tiles of the share behind those of the unit

    __device__ __forceinline__ void begin(const Arguments<typename S::Element>& args,
                                          const Item* all, const Share& share) {
        items = all;
        k = share.item;
        unit.item = share.first;
        const int inside = share.begin - unit.item.first_tile;
        unit.head = inside / unit.item.kv_tiles;
        unit.from = inside - unit.head * unit.item.kv_tiles;
        left = share.end - share.begin;
        enter(args);
    }
    __device__ __forceinline__ void next(const Arguments<typename S::Element>& args) {
        unit.from = 0;
        if (++unit.head == args.num_kv_heads) {
            unit.head = 0;
            unit.item = load_l2(items + ++k);
        }
        enter(args);
    }

   private:
    __device__ __forceinline__ void enter(const Arguments<typename S::Element>& args) {
        unit.to = min(unit.item.kv_tiles, unit.from + left);
        left -= unit.to - unit.from;
        unit.num_rows = min(S::ROWS, unit.item.query_len * args.group - unit.item.first_row);
    }
};

constexpr int ALL_KEYS = 1 << 30;

// Has tiles copied, one after the other, ahead of those who multiply. Where it RUNS_ON it does not
// stop at the end of a unit, so that its neighbour's keys come while its sums are written.
template <class S, class Source>
struct Feed {
    using T = typename S::Element;
    static constexpr bool RUNS_ON = S::RUNS_ON && !Source::ROTATES;

    Walk<S> walk;
    int tile, end;  // the next one to copy, and the end of the unit
    int kv_end;     // of the cache, for this unit
    Pages<S> pages;

    // Looks at the first tile of a unit.
    __device__ __forceinline__ void begin(const Arguments<T>& args, const Walk<S>& at) {
        walk = at;
        enter();
        find(args);
    }
    __device__ __forceinline__ bool has_more() const { return tile < end; }
    __device__ __forceinline__ void load(T* tiles, const Arguments<T>& args, int stage, int which,
                                         int from, int upto) const {
        load_tile<S>(tiles + 2 * stage * S::TILE, args, walk.unit.head, kv_end, which,
                     pages.of(which), from, upto);
    }
    __device__ __forceinline__ void next(const Arguments<T>& args) {
        const int k = walk.k;
        if (++tile == end && RUNS_ON && walk.left > 0) {
            walk.next(args);
            enter();
        }
        if (has_more() && (walk.k != k || !pages.knows(tile))) find(args);
    }

   private:
    __device__ __forceinline__ void enter() {
        const Item& item = walk.unit.item;
        tile = item.kv_begin + walk.unit.from;
        end = item.kv_begin + walk.unit.to;
        kv_end = Source::ROTATES ? item.kv_len - item.query_len : item.kv_len;
    }
    __device__ __forceinline__ void find(const Arguments<T>& args) {
        pages.find(args.block_tables +
                       static_cast<long long>(walk.unit.item.sequence) * args.table_stride,
                   args.block_shift, kv_end, tile);
    }
};

// Work on a share. A unit's tiles come in turns: each starts a copy and multiplies the tile that was
// started STAGES - 1 turns before; where nothing is on its way yet, turns before the first tile only
// copy.
//
// Of the first unit, what is settled is read before the kernels in front have ended: all keys, but
// for those of this step's tokens.
template <class S, class Source>
__device__ __forceinline__ void work_off(const Arguments<typename S::Element>& args, Source source,
                                         const Item* items, const Share* shares, int* arrivals,
                                         float* slots, bool settled) {
    using T = typename S::Element;
    constexpr bool RUNS_ON = Feed<S, Source>::RUNS_ON;
    extern __shared__ __align__(16) unsigned char memory[];
    T* queries = reinterpret_cast<T*>(memory);
    T* tiles = reinterpret_cast<T*>(memory + S::QUERY_BYTES);
    float2* states = reinterpret_cast<float2*>(memory + S::QUERY_BYTES + S::TILE_BYTES);
    const int warp = threadIdx.x / 32;
    const int warp_m = warp % S::WARPS_M;
    const int warp_n = warp / S::WARPS_M;

    if (!settled) wait_for_previous();
    const Share share = load_l2(shares + blockIdx.x);
    if (share.begin == share.end) {
        // A kernel without a block that waits would let the next one believe that all is done.
        wait_for_previous();
        return;
    }
    Walk<S> walk;
    walk.begin(args, items, share);
    Feed<S, Source> feed;
    HeadRow<S> rows[2];
    State<S> state;
    Unit done;           // the unit before, whose sums are in `state`
    int stage = 0;       // of the tile whose turn it is
    int ready = 0;       // keys below it have been read of the next `num_begun` tiles
    int num_begun = 0;
    bool is_first = true, is_over = false;

    // Adds up the sums of the warps. They go where the last tile was: in other stages, tiles of the
    // next unit may be arriving.
    const auto finish = [&] {
        const int last = stage == 0 ? S::STAGES - 1 : stage - 1;
        float* const sums = reinterpret_cast<float*>(tiles + (RUNS_ON ? 2 * last * S::TILE : 0));
        __syncthreads();  // all warps are done with the tile
        store_state<S>(sums, states, state, done.num_rows, warp_m, warp_n);
        __syncthreads();
        finish_unit<S>(args, done, share, sums, states, Slots<S>(slots), arrivals);
        __syncthreads();  // all sums are read
    };

    while (true) {
        if (!RUNS_ON && !is_first) finish();
        const Unit& unit = walk.unit;
        const int history = unit.item.kv_len - unit.item.query_len;
        const bool begins = is_first || !RUNS_ON;
        if (!is_over) {
            if (begins) {
                feed.begin(args, walk);
                const int begin = feed.tile, end = feed.end;
                const int new_tile = history / S::KEYS;
                const bool has_new = Source::ROTATES && unit.item.kv_len > 0 && new_tile >= begin &&
                                     new_tile < end && history % S::KEYS / S::COPY_KEYS == warp;
                source.prepare(args, unit, has_new);  // or it would come behind the copies
                // What `Source` rotates, it does not look for in the cache.
                ready = Source::ROTATES || !settled || !is_first ? ALL_KEYS : history;
                num_begun = min(end - begin, S::STAGES);
                // Not unrolled: at few sequences, reading the instructions takes its time.
#pragma unroll 1
                for (int i = 0; i < S::STAGES; ++i) {
                    if (i < num_begun) feed.load(tiles, args, i, begin + i, 0, ready);
                    // The last one waits with what the first tile's turn copies.
                    if (i < S::STAGES - 1) ptx::commit_copies();
                }
            }
            if (is_first) {
                wait_for_previous();
                launch_next();
            }
            if (S::QUERIES_IN_REGISTERS)
                load_queries<S>(rows, args, unit, source.key_row(args, unit), warp_m);
            else
                copy_queries<S>(queries, args, unit);
            if (!S::QUERIES_IN_REGISTERS) ptx::commit_copies();
            source.load(args, unit);
        }
        if (RUNS_ON && !is_first) finish();
        if (is_over) return;

        const int lowest = history + args.token_of(unit.item.first_row);
        const int highest = history + args.token_of(unit.item.first_row + unit.num_rows - 1);
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; ++f) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                state.max[f][half] = -CUDART_INF_F;
                state.total[f][half] = 0.0f;
            }
#pragma unroll
            for (int n = 0; n < S::HEAD_DIM / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) state.sums[f][n][e] = 0.0f;
        }
        const int end = unit.item.kv_begin + unit.to;
        int tile = unit.item.kv_begin + unit.from;
        int turn = 0;
        if (begins) {
            turn = 1 - S::STAGES;
            stage = 1 % S::STAGES;
        }
#pragma unroll 1
        for (; tile < end; ++turn) {
            if (turn >= 0) {
                ptx::wait_copies<S::STAGES - 2>();
                // The tile is there for all who read it, and all have read the one overwritten next.
                if (S::PRIVATE)
                    __syncwarp();
                else
                    __syncthreads();
            }
            if (turn == 0 && !S::QUERIES_IN_REGISTERS) {
                ptx::wait_copies<0>();
                __syncthreads();
            }
            int from = 0;
            if (feed.has_more()) {
                if (num_begun-- > 0) from = ready;
                if (from < ALL_KEYS)
                    feed.load(tiles, args, stage == 0 ? S::STAGES - 1 : stage - 1, feed.tile, from,
                              ALL_KEYS);
                feed.next(args);
            }
            if (turn >= 0 || from < ALL_KEYS) ptx::commit_copies();
            const int now = stage;
            stage = stage + 1 == S::STAGES ? 0 : stage + 1;
            if (turn < 0) continue;
            if (turn == 0) source.turn(unit, rows);

            T* const keys = tiles + 2 * now * S::TILE;
            T* const values = keys + S::TILE;
            if (Source::ROTATES && tile == history / S::KEYS)
                source.place(args, unit, rows, keys, values);
            Scores<S> scores;
            mma_qk<S>(scores, rows, queries, keys, warp_m, warp_n);
            float scale = args.scale;
            if (args.soft_cap > 0.0f) {
                cap_scores<S>(scores, scale, args.soft_cap);
                scale = 1.0f;
            }
            const int first_key = tile * S::KEYS;
            if (first_key + S::KEYS - 1 > lowest || first_key <= highest - args.window)
                mask_scores<S>(scores, args, unit, warp_m, first_key + warp_n * S::WARP_KEYS);
            softmax_step<S>(state, scores, scale);
            mma_pv<S>(state, scores, values, warp_n);
            ++tile;
        }
        done = unit;
        is_first = false;
        is_over = walk.left == 0;
        if (!is_over) walk.next(args);
    }
}

// ---------------------------------------------------------------- planning

// Inclusive sum over the block's threads; every thread gets the sum of all in `total`.
template <int THREADS>
__device__ __noinline__ int scan(int value, int& total) {
    static_assert(THREADS == 1024, "a warp scans the warps");
    __shared__ int warp_totals[32];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const auto scan_warp = [&](int x) {
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(FULL_WARP, x, distance);
            if (lane >= distance) x += other;
        }
        return x;
    };
    value = scan_warp(value);
    if (lane == 31) warp_totals[warp] = value;
    __syncthreads();
    const int upto = scan_warp(warp_totals[lane]);
    const int before = __shfl_sync(FULL_WARP, upto, max(warp - 1, 0));
    total = __shfl_sync(FULL_WARP, upto, 31);
    __syncthreads();
    return value + (warp == 0 ? 0 : before);
}

// The last of `count` ascending numbers start(0) = 0, start(1), ... that is at most `wanted`.
template <class Start>
__device__ __forceinline__ int last_at_most(int wanted, int count, const Start& start) {
    int low = 0, high = count;
#pragma unroll 1
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (start(middle) <= wanted)
            low = middle;
        else
            high = middle;
    }
    return low;
}

constexpr int PLAN_THREADS = 1024;

// Puts item_at(0), ..., item_at(count - 1) from long to short, those of one length in their order:
// a counting sort by tiles. Where the longest has more tiles than there are threads, lengths that
// are nearly the same count as one.
template <class ItemAt>
__device__ __forceinline__ void sort_items(Item* items, int count, const ItemAt& item_at) {
    __shared__ int longest, places[PLAN_THREADS];
    const int thread = threadIdx.x;
    places[thread] = 0;
    if (thread == 0) longest = 0;
    __syncthreads();
#pragma unroll 1
    for (int k = thread; k < count; k += PLAN_THREADS) atomicMax(&longest, item_at(k).kv_tiles);
    __syncthreads();
    const int step = longest / PLAN_THREADS + 1;
    const auto rank = [&](const Item& item) { return (longest - item.kv_tiles) / step; };
#pragma unroll 1
    for (int k = thread; k < count; k += PLAN_THREADS) atomicAdd(places + rank(item_at(k)), 1);
    __syncthreads();
    const int number = places[thread];
    int total;
    places[thread] = scan<PLAN_THREADS>(number, total) - number;
#pragma unroll 1
    for (int base = 0; base < count; base += PLAN_THREADS) {
        const int k = base + thread;
        Item item;
        if (k < count) item = item_at(k);
        // One warp after the other, so that the order is always the same.
        for (int warp = 0; warp < min(PLAN_THREADS, count - base); warp += 32) {
            __syncthreads();
            if (thread / 32 * 32 != warp) continue;
            const int own = k < count ? rank(item) : -1;
            const unsigned same = __match_any_sync(0xffffffffu, own);
            const int before = __popc(same & ((1u << thread % 32) - 1));
            if (k < count) items[places[own] + before] = item;
            __syncwarp();
            if (k < count && before == 0) places[own] += __popc(same);
        }
        __syncthreads();
    }
}

// What a cut costs a block, in tiles: sums that go through memory.
constexpr int CUT_TILES = 6;
// The same where blocks have so little to do that a tile takes as long as its arithmetic.
constexpr int SHORT_CUT_TILES = 4;
constexpr int NONE = 1 << 30;

// The smallest pieces, in tiles, into which all units can be cut so that there are no more of them
// than shares. Each warp tries a size, from `even`, that of equal shares, to twice that.
__device__ __forceinline__ int piece_size(const Item* items, int num_items, int num_kv_heads,
                                          int even, int num_shares) {
    __shared__ int smallest;
    if (threadIdx.x == 0) smallest = NONE;
    __syncthreads();
    const int size = even + threadIdx.x / 32 * ((even + 31) / 32);
    int count = 0;
#pragma unroll 1
    for (int k = threadIdx.x % 32; k < num_items; k += 32)
        count += (items[k].kv_tiles + size - 1) / size;
    for (int distance = 16; distance > 0; distance /= 2)
        count += __shfl_xor_sync(0xffffffffu, count, distance);
    if (threadIdx.x % 32 == 0 && count * num_kv_heads <= num_shares) atomicMin(&smallest, size);
    __syncthreads();
    return smallest;
}

// The largest of a number per thread, or 0.
__device__ __forceinline__ int block_max(int number) {
    __shared__ int largest;
    if (threadIdx.x == 0) largest = 0;
    __syncthreads();
    number = __reduce_max_sync(FULL_WARP, number);
    if (threadIdx.x % 32 == 0) atomicMax(&largest, number);
    __syncthreads();
    const int found = largest;
    __syncthreads();
    return found;
}

// As few as give each block twice the tiles of the longest unit: so that the queue, which starts
// again with a long one for the last heads, ends with short ones for all blocks.
__device__ __forceinline__ int heads_at_once(int longest, int num_tiles, int num_kv_heads,
                                             int num_blocks) {
    const int turns = min(max(num_tiles / (2 * longest * num_blocks), 1), num_kv_heads);
    return (num_kv_heads + turns - 1) / turns;
}

// Tiles that the busiest block has, about, when blocks take whole units, long ones first: what the
// first would get if they took turns, less half of what taking turns is worse by.
__device__ __forceinline__ int queue_time(const Item* items, int units, int num_kv_heads,
                                          int num_blocks) {
    int turns = 0;
#pragma unroll 1
    for (int base = 0; base < units; base += num_blocks * PLAN_THREADS) {
        const int unit = base + num_blocks * threadIdx.x;
        int total;
        scan<PLAN_THREADS>(unit < units ? items[unit / num_kv_heads].kv_tiles : 0, total);
        turns += total;
    }
    const int longest = units > 0 ? items[0].kv_tiles : 0;
    return max(longest, turns - longest / 2);
}

}  // namespace attention

// ================================================================ kernels

using attention::PLAN_THREADS;

// Cuts the step's chunks into items and shares. Takes only the chunks that have more than min_rows
// and at most max_rows rows, so that small and large ones can have kernels of their own.
// One block of PLAN_THREADS threads.
//
//   query_start [n + 1], seq_lens [n]   as of `attend`; n chunks
//   first_item [n + 1]                  scratch
//   items [capacity]                    at least n + rows / unit_rows
//   shares [num_shares], arrivals [2 * num_shares]   arrivals become 0
//   queue   for a kernel that can work off whole units; then items go from long to short. May be
//           null.
//   whole   shares end where units do, so that no sum depends on what else is in the step
extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1)
    plan(const int* query_start, const int* seq_lens, int n, int group, int num_kv_heads,
         int unit_rows, int unit_keys, int window, int min_rows, int max_rows, int num_shares,
         int* first_item, attention::Item* items, attention::Share* shares, int* arrivals,
         attention::Queue* queue, bool whole) {
    using namespace attention;
    wait_for_previous();
    launch_next();
    const int thread = threadIdx.x;
    // Where something of each chunk, and then of each item, begins; here if they are few.
    __shared__ int begins[PLAN_THREADS];
    const bool few_chunks = n <= PLAN_THREADS;
    int num_items = 0;
#pragma unroll 1
    for (int base = 0; base < n; base += PLAN_THREADS) {
        const int i = base + thread;
        const int rows = i < n ? (query_start[i + 1] - query_start[i]) * group : 0;
        const int count =
            rows > min_rows && rows <= max_rows ? (rows + unit_rows - 1) / unit_rows : 0;
        int total;
        const int upto = num_items + scan<PLAN_THREADS>(count, total);
        if (i < n) first_item[i] = upto - count;
        if (i < n && few_chunks) begins[i] = upto - count;
        num_items += total;
    }
    if (thread == 0) first_item[n] = num_items;
    __syncthreads();

    const auto item_at = [&](int k) {
        Item item;
        item.first_tile = 0;
        // Chunks without items share their place with the next one: the last of them has items.
        item.sequence = last_at_most(
            k, n, [&](int i) { return few_chunks ? begins[i] : first_item[i]; });
        item.query_start = query_start[item.sequence];
        item.query_len = query_start[item.sequence + 1] - item.query_start;
        item.kv_len = seq_lens[item.sequence];
        item.first_row = (k - first_item[item.sequence]) * unit_rows;
        const int last_row = min(item.first_row + unit_rows, item.query_len * group) - 1;
        const int history = item.kv_len - item.query_len;
        const int lowest = history + item.first_row / group;
        const int highest = history + last_row / group;
        item.kv_begin = max(0, lowest - window + 1) / unit_keys;
        // A row that sees nothing has a tile all the same, for it must be written.
        item.kv_tiles = max(1, highest / unit_keys + 1 - item.kv_begin);
        return item;
    };
    if (queue == nullptr) {
#pragma unroll 1
        for (int k = thread; k < num_items; k += PLAN_THREADS) items[k] = item_at(k);
    } else {
        sort_items(items, num_items, item_at);
    }
    __syncthreads();

    int num_tiles = 0;
#pragma unroll 1
    for (int base = 0; base < num_items; base += PLAN_THREADS) {
        const int k = base + thread;
        const int count = k < num_items ? items[k].kv_tiles * num_kv_heads : 0;
        int total;
        const int upto = num_tiles + scan<PLAN_THREADS>(count, total);
        if (k < num_items) items[k].first_tile = upto - count;
        num_tiles += total;
    }
    __syncthreads();

    if (queue != nullptr) {
        const int units = num_items * num_kv_heads;
        const int time = queue_time(items, units, num_kv_heads, num_shares);
        const bool uncut = time <= num_tiles / num_shares + CUT_TILES;
        if (thread == 0 && units > 0)
            *queue = {uncut ? units : 0, 0, 0,
                      heads_at_once(items[0].kv_tiles, num_tiles, num_kv_heads, num_shares)};
        else if (thread == 0)
            *queue = {};
    }
    const bool few_items = num_items <= PLAN_THREADS;
    if (few_items && thread < num_items) begins[thread] = items[thread].first_tile;
    const int longest = block_max(few_items && thread < num_items ? items[thread].kv_tiles : 0);
    const auto item_of = [&](int tile) {
        return last_at_most(tile, num_items,
                            [&](int k) { return few_items ? begins[k] : items[k].first_tile; });
    };
    // Where a share begins that ends where a unit does.
    __shared__ int borders[PLAN_THREADS + 1];
    const bool few_shares = num_shares <= PLAN_THREADS;
    const auto find_border = [&](int share) {
        const int tile = share_begin(share, num_tiles, num_shares);
        if (tile >= num_tiles) return tile;
        const Item& item = items[item_of(tile)];
        const int inside = tile - item.first_tile + item.kv_tiles - 1;
        return item.first_tile + inside - inside % item.kv_tiles;
    };
    const auto find_borders = [&] {
#pragma unroll 1
        for (int share = thread; few_shares && share <= num_shares; share += PLAN_THREADS)
            borders[share] = find_border(share);
        __syncthreads();
    };
    const auto unit_border = [&](int share) {
        return few_shares ? borders[share] : find_border(share);
    };
#pragma unroll 1
    for (int share = thread; share < 2 * num_shares; share += PLAN_THREADS) arrivals[share] = 0;

    const int even = max(1, (num_tiles + num_shares - 1) / num_shares);
    const int tolerable = even + even / 16 + 2;
    bool at_units = whole;
    if (whole) find_borders();
    if (queue == nullptr && !whole && few_items) {
        if (num_items * num_kv_heads <= num_shares) {
            const int smallest = piece_size(items, num_items, num_kv_heads, even, num_shares);
            const bool uncut = longest <= (smallest == NONE ? even : smallest) + SHORT_CUT_TILES;
            const int piece = uncut ? longest : smallest;
            if (uncut || piece <= tolerable) {
                const int pieces =
                    thread < num_items ? (items[thread].kv_tiles + piece - 1) / piece : 0;
                int total;
                const int upto = scan<PLAN_THREADS>(pieces * num_kv_heads, total);
                if (thread < num_items) begins[thread] = upto - pieces * num_kv_heads;
                __syncthreads();
#pragma unroll 1
                for (int share = thread; share < num_shares; share += PLAN_THREADS) {
                    shares[share] = {};
                    if (share >= total) continue;
                    const int k = item_of(share);
                    const Item& item = items[k];
                    const int own_pieces = (item.kv_tiles + piece - 1) / piece;
                    const int head = (share - begins[k]) / own_pieces;
                    const int from = (share - begins[k]) % own_pieces * piece;
                    const int unit = item.first_tile + head * item.kv_tiles;
                    shares[share] = {unit + from,
                                     unit + min(item.kv_tiles, from + piece),
                                     k,
                                     num_tiles,
                                     from / piece,
                                     own_pieces,
                                     0,
                                     0,
                                     item};
                }
                return;
            }
        } else {
            int largest = 0;
            find_borders();
#pragma unroll 1
            for (int share = thread; share < num_shares; share += PLAN_THREADS)
                largest = max(largest, unit_border(share + 1) - unit_border(share));
            at_units = block_max(largest) <= tolerable;
        }
    }
#pragma unroll 1
    for (int share = thread; share < num_shares; share += PLAN_THREADS) {
        const int begin = at_units ? unit_border(share) : share_begin(share, num_tiles, num_shares);
        const int end =
            at_units ? unit_border(share + 1) : share_begin(share + 1, num_tiles, num_shares);
        shares[share] = {};
        if (begin == end) continue;
        const int k = item_of(begin);
        shares[share] = {begin, end, k, num_tiles, 0, 0, 0, 0, items[k]};
    }
}

// Attention of the chunks that `plan` took, with the same unit_rows = ROWS, unit_keys = KEYS,
// window and number of shares = blocks.
//
//   q [T, H, D], rows q_stride elements apart; out [T, H, D]
//   k_cache, v_cache [num_blocks, block_size, G, D], blocks block_stride elements apart
//   block_tables [n, table_stride]
//   slots 2 * gridDim.x * ROWS * (D + 2) floats of scratch
//   settled   all but q, and the keys and values of the tokens in q, was written before the kernel
//             before was launched
template <class S>
__global__ void __launch_bounds__(S::THREADS, 2)
    attend(const typename S::Element* q, const typename S::Element* k_cache,
           const typename S::Element* v_cache, typename S::Element* out, const int* block_tables,
           long long q_stride, long long block_stride, int table_stride, int block_shift,
           int num_heads, int num_kv_heads, float scale, float soft_cap, int window,
           const attention::Item* items, const attention::Share* shares, int* arrivals,
           float* slots, bool settled) {
    using namespace attention;
    const Arguments<typename S::Element> args = {q,
                                                 k_cache,
                                                 v_cache,
                                                 out,
                                                 block_tables,
                                                 q_stride,
                                                 block_stride,
                                                 table_stride,
                                                 block_shift,
                                                 num_heads,
                                                 num_kv_heads,
                                                 num_heads / num_kv_heads,
                                                 soft_cap > 0.0f ? scale : scale * LOG2_E,
                                                 soft_cap,
                                                 window,
                                                 0xffffffffu / (num_heads / num_kv_heads) + 1};
    work_off<S>(args, InPlace<S>(), items, shares, arrivals, slots, settled);
}

// The same and, before, what `rope_write_kv` of rope.cu does, for chunks of one token each.
//
//   qkv [T, (H + 2 * G) * D], rows qkv_stride elements apart
//   slots, positions [T]; cos, sin [positions, D]; q_weight, k_weight [D] if NORM
template <class S, bool NORM>
__global__ void __launch_bounds__(S::THREADS, 2)
    rope_attend(const typename S::Element* qkv, typename S::Element* k_cache,
                typename S::Element* v_cache, typename S::Element* out, const int* block_tables,
                long long qkv_stride, long long block_stride, int table_stride, int block_shift,
                int num_heads, int num_kv_heads, float scale, float soft_cap, int window,
                const attention::Item* items, const attention::Share* shares, int* arrivals,
                float* slots, bool settled, const long long* slot_mapping,
                const long long* positions, const float* cos, const float* sin,
                const typename S::Element* q_weight, const typename S::Element* k_weight,
                float eps) {
    using namespace attention;
    const Arguments<typename S::Element> args = {qkv,
                                                 k_cache,
                                                 v_cache,
                                                 out,
                                                 block_tables,
                                                 qkv_stride,
                                                 block_stride,
                                                 table_stride,
                                                 block_shift,
                                                 num_heads,
                                                 num_kv_heads,
                                                 num_heads / num_kv_heads,
                                                 soft_cap > 0.0f ? scale : scale * LOG2_E,
                                                 soft_cap,
                                                 window,
                                                 0xffffffffu / (num_heads / num_kv_heads) + 1};
    const Projection<typename S::Element> projection = {
        k_cache, v_cache, slot_mapping, positions, cos, sin, q_weight, k_weight, eps};
    work_off<S>(args, Rotated<S, NORM>(projection), items, shares, arrivals, slots, settled);
}
