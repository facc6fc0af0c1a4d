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
// `as_half_operands`), and weights, multiplied by the scales of values, are at most 1
// (`ValueLogs`).
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
    __device__ __forceinline__ ByteRow(const float (&four)[4], bool is_key) {
        using Byte = typename S::Cached;
        unsigned bits = 0;  // which compare as magnitudes do, and NaN is the largest
#pragma unroll
        for (int i = 0; i < 4; ++i) bits = max(bits, __float_as_uint(four[i]) & 0x7fffffffu);
        const float largest = __uint_as_float(__reduce_max_sync(FULL_WARP, bits));
        const bool chooses = SAME<Byte, Fp8> && is_key;
        // Each lane has one of a key's scales ready before it is known which one it will be.
        const int index = threadIdx.x % KeyScales::COUNT;
        scale = scale_of(largest, chooses ? KeyScales::code_of(index) : Byte::LARGEST);
        float inverse = inverse_of(scale);
        if (chooses) {
            const int best = KeyScales::best<32>({KeyScales::largest_of(four)}, largest);
            scale = __shfl_sync(FULL_WARP, scale, best);
            inverse = __shfl_sync(FULL_WARP, inverse, best);
        }
        word = encode_word<Byte>(four, inverse);
    }

    __device__ __forceinline__ void store(void* bytes, __half* scale_place) const {
        const int lane = threadIdx.x % 32;
        if (lane < LANES) reinterpret_cast<unsigned*>(bytes)[lane] = word;
        if (lane == 0) *scale_place = scale;
    }
};

}  // namespace attention
