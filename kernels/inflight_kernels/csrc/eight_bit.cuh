// 8-bit values with a scale for each row. Scales are in float.
#pragma once

#include "common.cuh"
#include "kv_quantization.cuh"

constexpr float SMALLEST_AMAX = 1e-12f;  // rows of zeros have a scale as well

// The magnitude of a value as bits, which compare as magnitudes do; NaN is above infinity.
__device__ inline unsigned magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

// How a row is quantised to Value: its values times `inverse`, and `scale` to get them back.
template <typename Value>
struct RowScale {
    float scale, inverse;

    // Of a row whose largest magnitude has these bits. If that is infinite or NaN the scale is NaN,
    // so that products with the row are NaN.
    __device__ explicit RowScale(unsigned largest) {
        const bool finite = largest < 0x7f800000u;
        const float amax = fmaxf(__uint_as_float(largest), SMALLEST_AMAX);
        scale = finite ? amax / Value::LARGEST : __uint_as_float(0x7fffffffu);
        inverse = finite ? Value::LARGEST / amax : 0.0f;
    }
};

// A coarse scale of e4m3 for a part of a row whose other parts are not known yet: one of 2^-4, 2^4,
// 2^12 and so on, and of 2^-12 and so on. Most parts of a row have the same one, as what an MLP has
// between its layers is mostly below 28 = 2^-4 * 448; the others can be converted to the largest.
// Of the 15 powers of two with e4m3's precision, a scale leaves 8 unused at most. It has a code;
// that of parts with NaN or infinity is BROKEN_CODE.
constexpr unsigned BROKEN_CODE = 255;
constexpr unsigned COARSE_BITS = 8;  // log 2 of the ratio of adjacent scales

// The least scale with which a part whose largest magnitude has these bits has no value above 448.
__device__ inline unsigned coarse_code(unsigned largest) {
    if (largest >= 0x7f800000u) return BROKEN_CODE;
    // With the exponent of the next power of two if it is above 1.75 = 448 / 256 times its own.
    const unsigned bits = max(largest, __float_as_uint(SMALLEST_AMAX));
    return (((bits + 0x1fffffu) >> 23) + 4) / COARSE_BITS;
}

// The scale of a code, or its inverse.
__device__ inline float coarse_scale(unsigned code) {
    return __uint_as_float(code == BROKEN_CODE ? 0x7fffffffu : (COARSE_BITS * code - 5) << 23);
}
__device__ inline float inverse_coarse_scale(unsigned code) {
    return __uint_as_float(code == BROKEN_CODE ? 0u : (259 - COARSE_BITS * code) << 23);
}

// Maximum over the warp, all of whose lanes must call it; returned to every lane.
__device__ inline unsigned warp_max(unsigned value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL_WARP, value);
#else
    return value;  // nothing is quantised there
#endif
}

// Maximum over the block, whose size is a multiple of 32; returned to every thread. One barrier;
// `partial` must not be reused before another one.
__device__ inline unsigned block_max(unsigned value, unsigned (&partial)[32]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    value = warp_max(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    return warp_max(lane < num_warps ? partial[lane] : 0u);
}

// Rows of Int8 may be spread before they are quantised: blocks of 2^bits columns are Hadamard
// transformed, by butterflies of columns that are 1, 2, 4 and so on apart, as
// torch_ops/quantization.py defines it. Kernels that do so are others (SPREADS), as few tokens wait
// for instructions.

// Spread N adjacent columns of each lane; lanes of a block are adjacent, beginning with a multiple
// of their number, and have zeros behind the end of a row. bits: 4 to 6. All lanes of the warp must
// call it.
template <int N>
__device__ __forceinline__ void spread_columns(float (&a)[N], int bits) {
    static_assert(N <= 16, "a thread has columns of one block");
#pragma unroll
    for (int distance = 1; distance < N; distance *= 2)
#pragma unroll
        for (int j = 0; j < N; j++)
            if (!(j & distance)) butterfly(a[j], a[j + distance]);
    // Not unrolled: few tokens wait for their kernels' instructions longer than for what these do.
#pragma unroll 1
    for (int distance = 1; distance * N < 1 << bits; distance *= 2)
#pragma unroll
        for (int j = 0; j < N; j++) a[j] = butterfly_of_lanes(a[j], distance);
    // What products grow by is taken off by powers of two, here half of it, rounded down.
    const float factor = __uint_as_float((127 - bits / 2) << 23);
#pragma unroll
    for (int j = 0; j < N; j++) a[j] *= factor;
}

// Quantise and store the values of a 16-byte vector of T.
template <typename T, typename Value>
__device__ void store_bytes(Value* address, const RowScale<Value>& scale,
                            const float (&values)[VECTOR<T>]) {
    static_assert(VECTOR<T> == 8, "16-bit values");
    float scaled[8];
#pragma unroll
    for (int j = 0; j < 8; j++) scaled[j] = values[j] * scale.inverse;
    *reinterpret_cast<uint2*>(address) =
        make_uint2(Value::encode(scaled), Value::encode(scaled + 4));
}
