// Processing of a unit by a block with mma.sync: the products of a tile (attention_loading.cuh),
// the running sums, and their reduction over warps (FlashAttention, arXiv:2205.14135). Units and
// shares are defined in attention_units.cuh.
#pragma once

#include "attention/attention_bytes.cuh"
#include "attention/attention_loading.cuh"
#include "attention/attention_ptx.cuh"
#include "attention/attention_units.cuh"
#include "common.cuh"

namespace attention {

// Tile shape of a block of threads.
//   WARPS_M x WARPS_N warps; each has FRAGMENTS * 16 rows and KEYS / WARPS_N of the keys.
//   STAGES tiles of keys and values are in shared memory.
//   Cached is the type of the cache: Element, or a byte of kv_quantization.cuh.
template <typename Element_, int HEAD_DIM_, int WARPS_M_, int WARPS_N_, int FRAGMENTS_, int KEYS_,
          int STAGES_, typename Cached_ = Element_>
struct Shape {
    using Element = Element_;
    using Cached = Cached_;
    static constexpr bool QUANTIZED = !SAME<Cached, Element>;
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int WARPS_M = WARPS_M_;
    static constexpr int WARPS_N = WARPS_N_;
    static constexpr int FRAGMENTS = FRAGMENTS_;
    static constexpr int KEYS = KEYS_;
    static constexpr int STAGES = STAGES_;
    static constexpr int HEADS = 1;  // KV heads per unit

    static constexpr int WARPS = WARPS_M * WARPS_N;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int WARP_ROWS = 16 * FRAGMENTS;
    static constexpr int ROWS = WARPS_M * WARP_ROWS;
    static constexpr int WARP_KEYS = KEYS / WARPS_N;  // multiplied by a warp
    static constexpr int COPY_KEYS = KEYS / WARPS;    // copied by a warp
    // With one row of warps these are the same keys: no warp waits for another one's copies.
    static constexpr bool PRIVATE = WARPS_M == 1;
    // Queries are kept in registers if they fit, and are then loaded there directly.
    static constexpr bool QUERIES_IN_REGISTERS = FRAGMENTS == 1 && HEAD_DIM <= 128;

    static constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes, in a row
    // 8 elements of padding put the 8 rows of an ldmatrix into different banks, for each HEAD_DIM.
    static constexpr int PITCH = HEAD_DIM + 8;
    static constexpr int TILE = QUANTIZED ? byte_tile_elements(KEYS, HEAD_DIM) : KEYS * PITCH;
    static constexpr int FLOAT_PITCH = HEAD_DIM + 8;

    // The sums of all warps reuse the memory of the tiles. Those of bytes are too small: then the
    // sums have memory of their own, or, if it is all in use, at least as much as they need.
    static constexpr int SUMS_BYTES = WARPS_N * ROWS * FLOAT_PITCH * 4;
    static constexpr int STAGE_BYTES = 2 * TILE * 2;
    static constexpr bool SUMS_APART = QUANTIZED && QUERIES_IN_REGISTERS;

    static constexpr int QUERY_BYTES = QUERIES_IN_REGISTERS ? 0 : ROWS * PITCH * 2;
    static constexpr int TILE_BYTES =
        SUMS_APART ? STAGES * STAGE_BYTES + SUMS_BYTES
                   : (STAGES * STAGE_BYTES > SUMS_BYTES || !QUANTIZED ? STAGES * STAGE_BYTES
                                                                      : SUMS_BYTES);
    static constexpr int STATE_BYTES = WARPS_N * ROWS * 8;
    static constexpr int SHARED_BYTES = QUERY_BYTES + TILE_BYTES + STATE_BYTES;

    static_assert(HEAD_DIM % 32 == 0, "copies and fragments cover 32 columns at a time");
    static_assert(WARP_KEYS % 16 == 0, "a fragment of probabilities has 16 keys");
    static_assert(COPY_KEYS <= 16, "16 consecutive keys are always in one block of the cache");
    static_assert(COPY_KEYS * CHUNKS % 32 == 0, "each lane copies the same number of chunks");
    static_assert(SUMS_BYTES <= TILE_BYTES, "no room for the sums");
    // If one stage holds the sums, the others may already receive the next unit's tiles.
    static constexpr bool CROSSES_UNITS =
        QUERIES_IN_REGISTERS && (SUMS_APART || SUMS_BYTES <= TILE_BYTES / STAGES);

    // Operands of mma.
    using Operand = typename OperandOf<Element, QUANTIZED>::type;

    // The part of a tile that this warp copies: its keys from here on, of this head.
    __device__ __forceinline__ static int first_key() { return threadIdx.x / 32 * COPY_KEYS; }
    __device__ __forceinline__ static int kv_head(const Unit& unit) { return unit.head; }
};

// ---------------------------------------------------------------- registers

template <class S>
struct State {
    float sums[S::FRAGMENTS][S::HEAD_DIM / 8][4];
    float max[S::FRAGMENTS][2];    // running maximum of the scores (ValueLogs), in units of log 2
    float total[S::FRAGMENTS][2];  // running sum of the weights, this lane's columns only
};

template <class S>
using Scores = float[S::FRAGMENTS][S::WARP_KEYS / 8][4];

// ---------------------------------------------------------------- arithmetic

// Fragment `step` of this warp's queries, from registers or from shared memory.
template <class S>
__device__ __forceinline__ void get_query_fragment(unsigned (&fragment)[4],
                                                   const HeadRow<S> (&rows)[2],
                                                   const typename S::Element* queries, int first,
                                                   int step) {
    if (!S::QUERIES_IN_REGISTERS) {
        load_query_fragment<S>(fragment, queries, first, step);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment[i] = rows[i % 2].words[step][i / 2];
}

// `mma_qk` of bytes: 32 columns at a time.
template <class S>
__device__ __forceinline__ void mma_qk_bytes(Scores<S>& scores, const HeadRow<S> (&rows)[2],
                                             const typename S::Element* queries,
                                             const typename S::Element* keys, int warp_m,
                                             int warp_n) {
    const int lane = threadIdx.x % 32;
    // Matrices of 8 keys and 16 columns, in the order keys 0-7 | columns 0-15, 0-7 | 16-31,
    // 8-15 | 0-15, 8-15 | 16-31.
    const int key = warp_n * S::WARP_KEYS + lane / 16 * 8 + lane % 8;
    const unsigned base =
        ptx::shared_address(keys) + key * byte_pitch(S::HEAD_DIM) + lane / 8 % 2 * 16;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
        for (int n = 0; n < S::WARP_KEYS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[f][n][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < S::HEAD_DIM / 16; step += 2) {
        unsigned a[S::FRAGMENTS][2][4];
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                get_query_fragment<S>(a[f][i], rows, queries, warp_m * S::WARP_ROWS + f * 16,
                                      step + i);
#pragma unroll
        for (int n = 0; n < S::WARP_KEYS / 16; ++n) {
            unsigned bytes[4];
            ptx::load_matrices(bytes, base + n * 16 * byte_pitch(S::HEAD_DIM) + step * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned low, high;
                S::Cached::template decode_halves<false>(bytes[i], low, high);
#pragma unroll
                for (int f = 0; f < S::FRAGMENTS; ++f)
                    ptx::mma<typename S::Operand>(scores[f][2 * n + i / 2], a[f][i % 2], low, high);
            }
        }
    }
}

// Multiplies by the scales of a tile of bytes: scores by those of their keys, or weights by those
// of their values.
template <class S>
__device__ __forceinline__ void apply_scales(Scores<S>& scores, const typename S::Element* tile,
                                             int warp_n) {
    const __half2* const scales =
        reinterpret_cast<const __half2*>(scales_of<S>(tile) + warp_n * S::WARP_KEYS) +
        threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < S::WARP_KEYS / 8; ++n) {
        const float2 scale = __half22float2(scales[n * 4]);
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[f][n][e] *= e % 2 == 0 ? scale.x : scale.y;
    }
}

// By which the running maximum of a tile's scores is raised for the scales of its values (see
// `value_log`); nothing without them.
template <class S, bool QUANTIZED = S::QUANTIZED>
struct ValueLogs {
    __device__ __forceinline__ ValueLogs(const typename S::Element*, int) {}
    __device__ __forceinline__ float of(int, int) const { return 0.0f; }
};

template <class S>
struct ValueLogs<S, true> {
    float logs[S::WARP_KEYS / 8][2];

    __device__ __forceinline__ ValueLogs(const typename S::Element* values, int warp_n) {
        const __half2* const scales =
            reinterpret_cast<const __half2*>(scales_of<S>(values) + warp_n * S::WARP_KEYS) +
            threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < S::WARP_KEYS / 8; ++n) {
            const float2 scale = __half22float2(scales[n * 4]);
            logs[n][0] = value_log(scale.x);
            logs[n][1] = value_log(scale.y);
        }
    }
    __device__ __forceinline__ float of(int n, int e) const { return logs[n][e % 2]; }
};

// scores = queries @ keys^T.
template <class S>
__device__ __forceinline__ void mma_qk(Scores<S>& scores, const HeadRow<S> (&rows)[2],
                                       const typename S::Element* queries,
                                       const typename S::Element* keys, int warp_m, int warp_n) {
    if constexpr (S::QUANTIZED) {
        mma_qk_bytes<S>(scores, rows, queries, keys, warp_m, warp_n);
        return;
    }
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

// Masked scores become -inf. A row attends to the keys up to its own position; rows that do not
// exist are treated like the last valid one. Few tiles need this, so no register is reserved for
// it.
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

// Online softmax: scores become weights relative to the running maximum; earlier sums are rescaled.
template <class S>
__device__ __forceinline__ void softmax_step(State<S>& state, Scores<S>& scores, float scale,
                                             const ValueLogs<S>& logs) {
    float rescale[S::FRAGMENTS][2];
    const auto raised = [&](int f, int n, int e) {
        const float score = scores[f][n][e];
        return S::QUANTIZED ? fmaf(score, scale, logs.of(n, e)) : score;
    };
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = raised(f, 0, 2 * half);
#pragma unroll
            for (int n = 0; n < S::WARP_KEYS / 8; ++n)
                largest = fmaxf(largest, fmaxf(raised(f, n, 2 * half), raised(f, n, 2 * half + 1)));
            largest = max_of_quad(largest);
            const float before = state.max[f][half];
            const float now = fmaxf(before, S::QUANTIZED ? largest : largest * scale);
            // For a row without keys so far, -inf - -inf would be NaN.
            const float origin = now == -CUDART_INF_F ? 0.0f : now;
            rescale[f][half] = ptx::exp2(before - origin);
            state.max[f][half] = now;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < S::WARP_KEYS / 8; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    scores[f][n][e] = ptx::exp2(fmaf(scores[f][n][e], scale, -origin));
                    total += scores[f][n][e];
                }
            state.total[f][half] = fmaf(state.total[f][half], rescale[f][half], total);
        }
    // Most tiles do not raise the maximum.
    bool raises = false;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
        raises = raises || rescale[f][0] != 1.0f || rescale[f][1] != 1.0f;
    if (!__any_sync(FULL_WARP, raises)) return;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
        for (int n = 0; n < S::HEAD_DIM / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) state.sums[f][n][e] *= rescale[f][e / 2];
}

// sums += weights @ values. Two adjacent 8-column fragments of scores have the layout of a
// 16-column left operand.
template <class S>
__device__ __forceinline__ void mma_pv(State<S>& state, const Scores<S>& weights,
                                       const typename S::Element* values, int warp_n) {
    using T = typename S::Operand;
    const int lane = threadIdx.x % 32;
    // Matrices in the order keys 0-7 | columns 0-7, 8-15 | 0-7, 0-7 | 8-15, 8-15 | 8-15; of bytes,
    // twice as many columns.
    const int key = warp_n * S::WARP_KEYS + lane % 16;
    const unsigned base =
        S::QUANTIZED
            ? ptx::shared_address(values) + key * byte_pitch(S::HEAD_DIM) + lane / 16 * 16
            : ptx::shared_address(values + key * S::PITCH + lane / 16 * 8);
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
        if constexpr (S::QUANTIZED) {
#pragma unroll
            for (int column = 0; column < S::HEAD_DIM / 16; column += 2) {
                unsigned bytes[4];
                ptx::load_matrices_transposed(
                    bytes, base + n * 16 * byte_pitch(S::HEAD_DIM) + column * 16);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    unsigned even[2], odd[2];
                    S::Cached::template decode_halves<true>(bytes[2 * i], even[0], odd[0]);
                    S::Cached::template decode_halves<true>(bytes[2 * i + 1], even[1], odd[1]);
#pragma unroll
                    for (int f = 0; f < S::FRAGMENTS; ++f) {
                        float(&sums)[S::HEAD_DIM / 8][4] = state.sums[f];
                        ptx::mma<T>(sums[2 * (column + i)], a[f], even[0], even[1]);
                        ptx::mma<T>(sums[2 * (column + i) + 1], a[f], odd[0], odd[1]);
                    }
                }
            }
            continue;
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

// Stores each warp's sums, and the maximum and total of each row, to shared memory.
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
            if constexpr (S::QUANTIZED) {
                // Even columns of each 16 are in one fragment, odd ones in the next.
#pragma unroll
                for (int n = 0; n < S::HEAD_DIM / 8; n += 2) {
                    const float* const even = state.sums[f][n] + 2 * half;
                    const float* const odd = state.sums[f][n + 1] + 2 * half;
                    *reinterpret_cast<float4*>(sums + row * S::FLOAT_PITCH + n * 8 + lane % 4 * 4) =
                        make_float4(even[0], odd[0], even[1], odd[1]);
                }
                continue;
            }
#pragma unroll
            for (int n = 0; n < S::HEAD_DIM / 8; ++n)
                *reinterpret_cast<float2*>(sums + row * S::FLOAT_PITCH + n * 8 + lane % 4 * 2) =
                    make_float2(state.sums[f][n][2 * half], state.sums[f][n][2 * half + 1]);
        }
}

// Reduces the warps' sums and hands the rows to emit(row, column, merged), four columns at a time;
// if the unit is split, stores them in a slot, and merges the slots if this is the last block of
// the unit to arrive. Returns whether the rows were emitted.
template <class S, class Emit>
__device__ __forceinline__ bool finish_unit(const Unit& unit, const Share& share, const float* sums,
                                            const float2* states, const Slots<S>& slots,
                                            int* arrivals, const Emit& emit) {
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
            emit(row, column, merged);
        } else {
            *reinterpret_cast<float4*>(slots.row(own_slot, row) + column) = merged.sums;
            if (column == 0) *slots.state(own_slot, row) = make_float2(merged.max, merged.total);
        }
    }
    if (whole) return true;

    const Blocks blocks(unit, share);
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        int* const arrived = arrivals + blocks.first;
        is_last = ptx::count_arrival(arrived) == blocks.last - blocks.first;
        if (is_last) *arrived = 0;  // for the next launch with this plan
    }
    __syncthreads();
    if (is_last) merge_slots<S, S::THREADS>(slots, blocks, 0, unit.num_rows, threadIdx.x, emit);
    return is_last;
}

}  // namespace attention
