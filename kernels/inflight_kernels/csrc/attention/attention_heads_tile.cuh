// Tiles of attention_heads.cu: their shape, the products and the running sums of a warp.
//
// Fragments: a lane has the scores of keys lane / 4 and lane / 4 + 8 for rows 2 * (lane % 4) and
// the next one, and of the sums the columns lane / 4 and lane / 4 + 8 of each 16, for the same
// rows.
#pragma once

#include "attention/attention_loading.cuh"
#include "attention/attention_units.cuh"

namespace attention {

// Tile shape of a block of threads.
//   STAGES tiles of each warp are in shared memory.
//   PAIRED: clusters of two blocks, which merge units of two pieces in shared memory.
//   Cached is the type of the cache: Element, or a byte of kv_quantization.cuh.
template <typename Element_, int HEAD_DIM_, int HEADS_, int STAGES_, bool PAIRED_,
          typename Cached_ = Element_>
struct HeadsShape {
    using Element = Element_;
    using Cached = Cached_;
    static constexpr bool QUANTIZED = !SAME<Cached, Element>;
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int HEADS = HEADS_;  // KV heads per unit, and warps
    static constexpr int BLOCKS = 8 / HEADS;  // per multiprocessor
    static constexpr int STAGES = STAGES_;
    static constexpr bool PAIRED = PAIRED_;

    static constexpr int THREADS = 32 * HEADS;
    static constexpr int ROWS = 8;  // per KV head
    static constexpr int KEYS = 16;
    static constexpr int COPY_KEYS = KEYS;
    static constexpr bool CROSSES_UNITS = true;
    static constexpr int PIECE_STAGES = 3;  // of pieces of prefixes, in the memory of its own tiles

    static constexpr int CHUNKS = HEAD_DIM / 8;
    static constexpr int PITCH = HEAD_DIM + 8;
    // Of keys, or of values, of one head.
    static constexpr int TILE = QUANTIZED ? byte_tile_elements(KEYS, HEAD_DIM) : KEYS * PITCH;

    using Operand = typename OperandOf<Element, QUANTIZED>::type;  // of mma

    __device__ __forceinline__ static int first_key() { return 0; }
    __device__ __forceinline__ static int kv_head(const Unit& unit) {
        return unit.head * HEADS + threadIdx.x / 32;
    }
};

// A warp's state of its unit, two rows per lane.
template <class S>
struct HeadState {
    float sums[S::HEAD_DIM / 16][4];
    float max[2];    // running maximum of the scores, in units of log 2
    float total[2];  // running sum of the weights, this lane's keys only

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            max[r] = -CUDART_INF_F;
            total[r] = 0.0f;
        }
#pragma unroll
        for (int column = 0; column < S::HEAD_DIM / 16; ++column)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[column][e] = 0.0f;
    }
};

__device__ __forceinline__ float max_over_keys(float x) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
        x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, distance));
    return x;
}

__device__ __forceinline__ float sum_over_keys(float x) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
        x += __shfl_xor_sync(FULL_WARP, x, distance);
    return x;
}

// Loads row lane / 4 of a unit's queries; zero if it does not exist.
template <class S>
__device__ __forceinline__ void load_row(HeadRow<S>& row,
                                         const Arguments<typename S::Element>& args,
                                         const Unit& unit) {
    const int index = threadIdx.x % 32 / 4;
    if (index < unit.num_rows)
        row.load(query_row<S>(args, unit, index));
    else
        row.clear();
}

// scores = keys @ queries^T, in two accumulators to shorten the dependency chain.
template <class S>
__device__ __forceinline__ void mma_kq(float (&scores)[4], const HeadRow<S>& row,
                                       const typename S::Element* keys) {
    const int lane = threadIdx.x % 32;
    float parts[2][4] = {};
    if constexpr (S::QUANTIZED) {
        const unsigned base =
            ptx::shared_address(keys) + lane % 16 * byte_pitch(S::HEAD_DIM) + lane / 16 * 16;
#pragma unroll
        for (int step = 0; step < S::HEAD_DIM / 16; step += 2) {
            unsigned bytes[4];
            ptx::load_matrices(bytes, base + step * 16);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned a[4];
                S::Cached::template decode_halves<false>(bytes[2 * i], a[0], a[2]);
                S::Cached::template decode_halves<false>(bytes[2 * i + 1], a[1], a[3]);
                const unsigned(&words)[2] = row.words[step + i];
                ptx::mma<typename S::Operand>(parts[i], a, words[0], words[1]);
            }
        }
    } else {
        const unsigned base = ptx::shared_address(keys + lane % 16 * S::PITCH + lane / 16 * 8);
#pragma unroll
        for (int step = 0; step < S::HEAD_DIM / 16; ++step) {
            unsigned a[4];
            ptx::load_matrices(a, base + step * 32);
            ptx::mma<typename S::Element>(parts[step % 2], a, row.words[step][0],
                                          row.words[step][1]);
        }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[e] = parts[0][e] + parts[1][e];
}

// sums += values^T @ weights^T.
template <class S>
__device__ __forceinline__ void mma_vp(HeadState<S>& state, const float (&weights)[4],
                                       const typename S::Element* values) {
    using T = typename S::Operand;
    const int lane = threadIdx.x % 32;
    const unsigned b0 = ptx::transposed(ptx::pack<T>(weights[0], weights[1]));
    const unsigned b1 = ptx::transposed(ptx::pack<T>(weights[2], weights[3]));
    if constexpr (S::QUANTIZED) {
        const unsigned bytes_base =
            ptx::shared_address(values) + lane % 16 * byte_pitch(S::HEAD_DIM) + lane / 16 * 16;
#pragma unroll
        for (int column = 0; column < S::HEAD_DIM / 16; column += 2) {
            unsigned bytes[4];
            ptx::load_matrices_transposed(bytes, bytes_base + column * 16);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned a[4];
                S::Cached::template decode_halves<true>(bytes[2 * i], a[0], a[1]);
                S::Cached::template decode_halves<true>(bytes[2 * i + 1], a[2], a[3]);
                ptx::mma<T>(state.sums[column + i], a, b0, b1);
            }
        }
        return;
    }
    const int key = lane / 16 * 8 + lane % 8;
    const unsigned base = ptx::shared_address(values + key * S::PITCH + lane / 8 % 2 * 8);
#pragma unroll
    for (int column = 0; column < S::HEAD_DIM / 16; ++column) {
        unsigned a[4];
        ptx::load_matrices_transposed(a, base + column * 32);
        ptx::mma<T>(state.sums[column], a, b0, b1);
    }
}

// The scales of a lane's keys, or values, of a tile; 1 if the cache has none.
template <class S>
struct TileScales {
    float of[2];

    __device__ __forceinline__ explicit TileScales(const typename S::Element* tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            of[half] = 1.0f;
            if constexpr (S::QUANTIZED)
                of[half] = __half2float(scales_of<S>(tile)[threadIdx.x % 32 / 4 + half * 8]);
        }
    }
    // Multiplies scores by the scales of their keys, or weights by those of their values.
    __device__ __forceinline__ void apply(float (&scores)[4]) const {
        if (!S::QUANTIZED) return;
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[e] *= of[e / 2];
    }
};

// Masked scores become -inf.
template <class S>
__device__ __forceinline__ void mask_scores(float (&scores)[4],
                                            const Arguments<typename S::Element>& args,
                                            const Unit& unit, int first_key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const int row = min(lane % 4 * 2 + e % 2, unit.num_rows - 1);
        const int last = unit.item.kv_len - unit.item.query_len +
                         args.token_of(unit.item.first_row + row);
        const int key = first_key + lane / 4 + e / 2 * 8;
        if (key > last || key <= last - args.window) scores[e] = -CUDART_INF_F;
    }
}

// Online softmax: scores become weights relative to the running maximum; earlier sums are rescaled.
template <class S>
__device__ __forceinline__ void softmax_step(HeadState<S>& state, float (&scores)[4], float scale,
                                             const TileScales<S>& of_values) {
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float before = state.max[r];
        float largest;
        if constexpr (S::QUANTIZED)
            largest = max_over_keys(fmaxf(fmaf(scores[r], scale, value_log(of_values.of[0])),
                                          fmaf(scores[2 + r], scale, value_log(of_values.of[1]))));
        else
            largest = max_over_keys(fmaxf(scores[r], scores[2 + r])) * scale;
        const float now = fmaxf(before, largest);
        // For a row without keys so far, -inf - -inf would be NaN.
        const float origin = now == -CUDART_INF_F ? 0.0f : now;
        rescale[r] = ptx::exp2(before - origin);
        state.max[r] = now;
#pragma unroll
        for (int e = r; e < 4; e += 2) scores[e] = ptx::exp2(fmaf(scores[e], scale, -origin));
        state.total[r] = fmaf(state.total[r], rescale[r], scores[r] + scores[2 + r]);
    }
    // Most tiles do not raise the maximum.
    if (!__any_sync(FULL_WARP, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
    for (int column = 0; column < S::HEAD_DIM / 16; ++column)
#pragma unroll
        for (int e = 0; e < 4; ++e) state.sums[column][e] *= rescale[e % 2];
}

}  // namespace attention
