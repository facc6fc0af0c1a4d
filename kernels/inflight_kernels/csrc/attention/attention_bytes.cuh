// Tiles of a cache of 8 bits (kv_quantization.cuh), as copied and as operands of mma.
//
// A matrix of ldmatrix, 8 rows of 16 bytes, gives a lane the 4 bytes (lane / 4, 4 * (lane % 4)) and
// the next ones, two registers of an operand. Thus of each 16 columns, the products of a score are
// added in another order than the columns', in which a lane's queries are adjacent as well.
// Transposed, it gives a lane the bytes 2 * (lane / 4) and the next one of rows 2 * (lane % 4) and
// the next one, which are sorted by column as they are decoded. So the sums of even columns are in
// the registers that the first 8 columns have otherwise, those of odd columns in the others.
//
// The products are those of float16, to which four bytes are converted in two to five instructions,
// to bfloat16 in eight, which took longer than reading them. Queries become float16 as well (see
// `as_half_operands`), and weights, multiplied by the scales of values, are at most 1 (`ValueLogs`).
#pragma once

#include "attention/attention_ptx.cuh"
#include "attention/attention_units.cuh"
#include "common.cuh"
#include "kv_quantization.cuh"

namespace attention {

// Bytes from row to row of a tile: 16 more than a head, which puts the 8 rows of an ldmatrix into
// different banks, for each head dim.
__device__ constexpr int byte_pitch(int head_dim) { return head_dim + 16; }

// The size of a tile and the scales after it, in elements of 2 bytes.
__device__ constexpr int byte_tile_elements(int keys, int head_dim) {
    return keys * (byte_pitch(head_dim) + 2) / 2;
}

// Two queries in bfloat16 as float16. What is beyond its range becomes infinite, and the results of
// its row NaN; what is rounded below 2^-14 changes a score by at most 2^-25 of the sum of a key's
// magnitudes.
__device__ __forceinline__ unsigned as_half_operands(unsigned word) {
    const float2 pair = ptx::unpack<__nv_bfloat16>(word);
    return ptx::pack<__half>(pair.x, pair.y);
}

// The operands of mma for elements of q and a cache.
template <typename T, bool QUANTIZED>
struct OperandOf {
    using type = T;
};
template <typename T>
struct OperandOf<T, true> {
    static_assert(SAME<T, __nv_bfloat16>, "queries beside bytes are in bfloat16");
    using type = __half;
};

// Log 2 of a scale of values; of 0, that of the smallest one above. Added to the score of its key
// in the running maximum, it bounds a weight times the scale by 1, and a weight by 2^24.
__device__ __forceinline__ float value_log(float scale) {
    float log;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log) : "f"(scale));
    return fmaxf(log, -24.0f);
}

// The scales of a tile, in shared memory.
template <class S>
__device__ __forceinline__ const __half* scales_of(const typename S::Element* tile) {
    return reinterpret_cast<const __half*>(reinterpret_cast<const unsigned char*>(tile) +
                                           S::KEYS * byte_pitch(S::HEAD_DIM));
}

template <class S>
__device__ __forceinline__ __half* scales_of(typename S::Element* tile) {
    return reinterpret_cast<__half*>(reinterpret_cast<unsigned char*>(tile) +
                                     S::KEYS * byte_pitch(S::HEAD_DIM));
}

// A key, or a value, of one head as bytes: four columns of it in each of the first HEAD_DIM / 4
// lanes.
template <class S>
struct ByteRow {
    static constexpr int LANES = S::HEAD_DIM / 4;
    static_assert(LANES <= 32, "a row is the work of one warp");

    unsigned word;
    __half scale;

    // Quantises as rope.cu does. All lanes of the warp must call it, with zeros past the head.
    __device__ __forceinline__ explicit ByteRow(const float (&four)[4]) {
        unsigned largest = 0;  // as bits, which compare as magnitudes do, and NaN is the largest
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = max(largest, __float_as_uint(four[i]) & 0x7fffffffu);
        largest = __reduce_max_sync(FULL_WARP, largest);
        scale = scale_of<typename S::Cached>(__uint_as_float(largest));
        word = encode_word<typename S::Cached>(four, inverse_of(scale));
    }

    __device__ __forceinline__ void store(void* bytes, __half* scale_place) const {
        const int lane = threadIdx.x % 32;
        if (lane < LANES) reinterpret_cast<unsigned*>(bytes)[lane] = word;
        if (lane == 0) *scale_place = scale;
    }
};

// Copies rows of keys and values from `first_key` on, COPY_KEYS of them, to a tile whose part for
// them is at `target`, restricted to the keys [begin, end). Rows from kv_end on become zero.
//
//   CHUNKS         of 16 bytes in a row
//   PITCH          bytes from row to row of the tile
//   keys, values   the first row in the cache
//   row_stride     chunks from row to row there
template <class S, int CHUNKS, int PITCH>
__device__ __forceinline__ void copy_rows(unsigned target, const void* keys, const void* values,
                                          int row_stride, int first_key, int begin, int end,
                                          int kv_end) {
    static_assert(S::COPY_KEYS * CHUNKS % 32 == 0, "each lane copies the same number of chunks");
    const int lane = threadIdx.x % 32;
    const int lane_row = lane / CHUNKS;
    const int lane_chunk = lane % CHUNKS;
    const int origin = lane_row * row_stride + lane_chunk;
    const uint4* const from_keys = static_cast<const uint4*>(keys) + origin;
    const uint4* const from_values = static_cast<const uint4*>(values) + origin;
    target += lane_row * PITCH + lane_chunk * 16;
#pragma unroll
    for (int i = 0; i < S::COPY_KEYS * CHUNKS / 32; ++i) {
        // Rows and chunks relative to the lane's, the same for all lanes if they divide evenly.
        const int index = i * 32 + (32 % CHUNKS == 0 ? 0 : lane);
        const int row = index / CHUNKS - (32 % CHUNKS == 0 ? 0 : lane_row);
        const int chunk = index % CHUNKS - (32 % CHUNKS == 0 ? 0 : lane_chunk);
        const int key = first_key + lane_row + row;
        const bool copied = (begin == 0 || key >= begin) && (end == ALL_KEYS || key < end);
        const bool valid = key < kv_end;
        const unsigned place = target + row * PITCH + chunk * 16;
        const int source = row * row_stride + chunk;
        ptx::copy_async_if(copied, place, from_keys + source, valid);
        ptx::copy_async_if(copied, place + S::TILE * 2, from_values + source, valid);
    }
}

// Copies this warp's part of a tile of keys and values, restricted to the keys [begin, end), with
// their scales. Rows and scales past the sequence become zero: their weight is 0, but the cache may
// contain NaN there.
template <class S>
__device__ __forceinline__ void load_byte_tile(typename S::Element* keys,
                                               const Arguments<typename S::Element>& args,
                                               int kv_head, int kv_end, int tile, int page,
                                               int begin, int end) {
    constexpr int SCALE_CHUNKS = S::COPY_KEYS / 8;  // of 16 bytes, of keys and of values each
    static_assert(S::COPY_KEYS % 8 == 0, "whole chunks of scales");
    const int lane = threadIdx.x % 32;
    const int row_stride = args.num_kv_heads * S::HEAD_DIM;
    const int first_row = S::first_key();
    const int first_key = tile * S::KEYS + first_row;
    const int offset = first_key & ((1 << args.block_shift) - 1);  // in the block
    const long long block = page * args.block_stride;
    using Bytes = const unsigned char*;
    const Bytes k_block = reinterpret_cast<Bytes>(args.k_cache) + block;
    const Bytes v_block = reinterpret_cast<Bytes>(args.v_cache) + block;
    const long long origin = static_cast<long long>(offset) * row_stride + kv_head * S::HEAD_DIM;
    const unsigned target = ptx::shared_address(keys);
    constexpr int PITCH = byte_pitch(S::HEAD_DIM);
    copy_rows<S, S::HEAD_DIM / 16, PITCH>(target + first_row * PITCH, k_block + origin,
                                          v_block + origin, row_stride / 16, first_key, begin, end,
                                          kv_end);
    // Scales of 8 keys are copied with the last of them, so once.
    const int row = lane % SCALE_CHUNKS * 8;
    const int key = first_key + row;
    const bool copied = lane < 2 * SCALE_CHUNKS && key + 7 >= begin && key + 7 < end;
    const bool of_values = lane / SCALE_CHUNKS % 2 == 1;
    const unsigned place = target + (of_values ? S::TILE * 2 : 0) +
                           S::KEYS * byte_pitch(S::HEAD_DIM) + (first_row + row) * 2;
    const long long scales =
        scales_offset(1 << args.block_shift, args.num_kv_heads, S::HEAD_DIM) +
        (static_cast<long long>(kv_head) << args.block_shift) * 2 + (offset + row) * 2;
    ptx::copy_part_async_if(copied, place, (of_values ? v_block : k_block) + scales,
                            min(max(kv_end - key, 0), 8) * 2);
}

}  // namespace attention
