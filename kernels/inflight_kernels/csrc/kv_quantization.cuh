// Keys and values of 8 bits; torch_ops/kv_quantization.py defines their layout and rounding.
//
// Bytes are encoded from floats and decoded to bfloat16 or float16, all exactly as on any other
// GPU: e4m3 by integer operations where there are no instructions for it, below compute
// capability 8.9.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Two bfloat16, the first in the lower half.
__device__ __forceinline__ __nv_bfloat162 as_pair(unsigned word) {
    return *reinterpret_cast<const __nv_bfloat162*>(&word);
}

__device__ __forceinline__ unsigned as_word(const __nv_bfloat162& pair) {
    return *reinterpret_cast<const unsigned*>(&pair);
}

// Two float16, likewise.
__device__ __forceinline__ __half2 as_halves(unsigned word) {
    return *reinterpret_cast<const __half2*>(&word);
}

__device__ __forceinline__ unsigned half_word(const __half2& pair) {
    return *reinterpret_cast<const unsigned*>(&pair);
}

struct Fp8 {  // e4m3
    static constexpr float LARGEST = 448.0f;
    unsigned char bits;

    // Four values as the bytes of a word. Rounds to nearest even; larger values become the largest.
    static __device__ __forceinline__ unsigned encode(const float* values) {
        unsigned word = 0;
#if __CUDA_ARCH__ >= 890
        asm("{\n"
            ".reg .b16 low, high;\n"
            "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
            "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
            "mov.b32 %0, {low, high};\n"
            "}"
            : "=r"(word)
            : "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]));
#else
#pragma unroll
        for (int i = 0; i < 4; i++) word |= encode_one(values[i]) << 8 * i;
#endif
        return word;
    }

    // Bytes 0 and 2, and bytes 1 and 3 of a word, as pairs of bfloat16.
    static __device__ __forceinline__ void decode(unsigned word, unsigned& even, unsigned& odd) {
        even = widen(word << 8);
        odd = widen(word);
    }

    // Bytes 0 and 1, and bytes 2 and 3 of a word, as pairs of float16; or, if ACROSS, bytes 0 and
    // 2, and bytes 1 and 3.
    template <bool ACROSS>
    static __device__ __forceinline__ void decode_halves(unsigned word, unsigned& first,
                                                         unsigned& second) {
#if __CUDA_ARCH__ >= 890
        asm("{\n"
            ".reg .b16 low, high;\n"
            "mov.b32 {low, high}, %2;\n"
            "cvt.rn.f16x2.e4m3x2 %0, low;\n"
            "cvt.rn.f16x2.e4m3x2 %1, high;\n"
            "}"
            : "=r"(first), "=r"(second)
            : "r"(ACROSS ? __byte_perm(word, 0, 0x3120) : word));
#else
        first = widen_to_halves(__byte_perm(word, 0, ACROSS ? 0x2404 : 0x1404));
        second = widen_to_halves(__byte_perm(word, 0, ACROSS ? 0x3414 : 0x3424));
#endif
    }

   private:
#if __CUDA_ARCH__ < 890
    static __device__ __forceinline__ unsigned encode_one(float x) {
        const unsigned all = __float_as_uint(x);
        const unsigned magnitude = all & 0x7fffffffu;
        // Normal numbers lose 20 bits of mantissa, and have the exponent's bias 7 instead of 127.
        const unsigned rounded = (magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20;
        const unsigned normal = min(rounded - (120u << 3), 0x7eu);
        // Below 2^-6 they are multiples of 2^-9.
        const unsigned subnormal = __float2uint_rn(__uint_as_float(magnitude) * 512.0f);
        return (magnitude < 0x3c800000u ? subnormal : normal) | (all >> 24 & 0x80u);
    }

    // The upper byte of each half. Its exponent becomes the lower bits of float16's, whose bias is
    // larger by 8.
    static __device__ __forceinline__ unsigned widen_to_halves(unsigned word) {
        const unsigned bits = (word & 0x80008000u) | (word >> 1 & 0x3f803f80u);
        return half_word(__hmul2(as_halves(bits), as_halves(0x5c005c00u)));  // 2^8, twice
    }
#endif

    // The upper byte of each half. Its exponent becomes the lower bits of bfloat16's, whose bias is
    // larger by 120.
    static __device__ __forceinline__ unsigned widen(unsigned word) {
        const unsigned bits = (word & 0x80008000u) | (word >> 4 & 0x07f007f0u);
        const __nv_bfloat162 rebias = as_pair(0x7b807b80u);  // 2^120, twice
        return as_word(__hmul2(as_pair(bits), rebias));
    }
};

struct Int8 {
    static constexpr float LARGEST = 127.0f;
    signed char bits;

    // See Fp8; magnitudes are at most LARGEST, apart from rounding errors.
    static __device__ __forceinline__ unsigned encode(const float* values) {
        unsigned word = 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            word |= (static_cast<unsigned>(__float2int_rn(values[i])) & 0xffu) << 8 * i;
        return word;
    }

    // See Fp8.
    static __device__ __forceinline__ void decode(unsigned word, unsigned& even, unsigned& odd) {
        even = widen(word);
        odd = widen(word >> 8);
    }

    // See Fp8. A byte plus 1024 is the number plus 128 and 1024, which are subtracted.
    template <bool ACROSS>
    static __device__ __forceinline__ void decode_halves(unsigned word, unsigned& first,
                                                         unsigned& second) {
        const unsigned raised = word ^ 0x80808080u;
        const auto minus_offset = [&](unsigned order) {
            const unsigned numbers = __byte_perm(raised, 0x64646464u, order);
            return half_word(__hsub2(as_halves(numbers), as_halves(0x64806480u)));
        };
        first = minus_offset(ACROSS ? 0x4240 : 0x4140);
        second = minus_offset(ACROSS ? 0x4341 : 0x4342);
    }

   private:
    // The lower byte of each half. From 128 on, bfloat16 counts in ones: 128 plus the lower 7 bits,
    // minus 128, or 256 for a negative number.
    static __device__ __forceinline__ unsigned widen(unsigned word) {
        const unsigned number = (word & 0x007f007fu) | 0x43004300u;
        const unsigned offset = (word & 0x00800080u) | 0x43004300u;
        return as_word(__hsub2(as_pair(number), as_pair(offset)));
    }
};

// x * a + y * b and x * a - y * b, rounded alike in each kernel. A compiler may fuse either product,
// but a key's bytes must not depend on the kernel that rotates it.
__device__ __forceinline__ float sum_of_products(float x, float a, float y, float b) {
    return __fmaf_rn(x, a, __fmul_rn(y, b));
}

__device__ __forceinline__ float difference_of_products(float x, float a, float y, float b) {
    return __fmaf_rn(x, a, -__fmul_rn(y, b));
}

// The scale of a vector whose largest magnitude becomes this number, rounded up so that nothing is
// clipped. Not finite if the magnitude is not, or too large.
__device__ __forceinline__ __half scale_of(float largest, float code) {
    return __float2half_ru(largest / code);
}

// A key of e4m3 is encoded with one of several scales: its largest value becomes a number of e4m3
// with any of the eight mantissas. That with the least squared error of the largest values of each
// four columns is chosen. Errors are added up as multiples of 2^-11, rounded down, so that a sum
// does not depend on its order, and bytes not on the kernel.
struct KeyScales {
    static constexpr int COUNT = 8;

    // What the largest value becomes.
    static __device__ __forceinline__ float code_of(int index) {
        return index < 7 ? 448.0f - 32.0f * static_cast<float>(index) : 240.0f;
    }

    // The largest magnitude of four columns.
    static __device__ __forceinline__ float largest_of(const float* four) {
        return fmaxf(fmaxf(fabsf(four[0]), fabsf(four[1])), fmaxf(fabsf(four[2]), fabsf(four[3])));
    }

    // The index of the scale for a key with this largest magnitude, of which each of WIDTH lanes
    // has N times the largest of four columns. All lanes of the warp must call it. Lane i computes
    // the error of scale i % COUNT, if there are so many lanes. Of a key that is zero, or not
    // finite, the index means nothing.
    template <int WIDTH, int N>
    static __device__ __forceinline__ int best(const float (&values)[N], float largest) {
        unsigned errors[COUNT];
        errors_of(values, largest, errors);
        // Lanes exchange halves of what they have, so that each has the sums of some scales; from
        // eight lanes on, of one.
        constexpr int SHARES = WIDTH < COUNT ? WIDTH : COUNT;
        const int first = threadIdx.x % SHARES * (COUNT / SHARES);
#pragma unroll
        for (int distance = SHARES / 2, count = COUNT / 2; distance > 0;
             distance /= 2, count /= 2) {
            const bool upper = threadIdx.x & distance;
#pragma unroll
            for (int i = 0; i < count; i++) {
                const unsigned other = upper ? errors[i] : errors[i + count];
                errors[i] = (upper ? errors[i + count] : errors[i]) +
                            __shfl_xor_sync(0xffffffffu, other, distance);
            }
        }
#pragma unroll
        for (int distance = SHARES; distance < WIDTH; distance *= 2)
#pragma unroll
            for (int i = 0; i < COUNT / SHARES; i++)
                errors[i] += __shfl_xor_sync(0xffffffffu, errors[i], distance);
        unsigned least = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < COUNT / SHARES; i++) {
            const float code = code_of(first + i);
            const float error =
                __fmul_rn(static_cast<float>(errors[i]), __frcp_rn(__fmul_rn(code, code)));
            // Of errors that differ in their last bits alone, the first one.
            least = min(least, (__float_as_uint(error) & ~(COUNT - 1u)) | (first + i));
        }
#pragma unroll
        for (int distance = 1; distance < SHARES; distance *= 2)
            least = min(least, __shfl_xor_sync(0xffffffffu, least, distance));
        // From 2^23 on, the scales of small numbers need not be finite.
        return largest < 8388608.0f ? least % COUNT : 0;
    }

   private:
    template <int N>
    static __device__ __forceinline__ void errors_of(const float (&values)[N], float largest,
                                                     unsigned (&errors)[COUNT]) {
        static_assert(N <= 16, "a sum is at most 2^12");
        constexpr float BEGIN = 4096.0f;  // from here to its double, floats are multiples of 2^-11
        const float inverse = __frcp_rn(largest);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float factor = __fmul_rn(inverse, code_of(i));
            float sum = BEGIN;
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float code = __fmul_rn(values[j], factor);
                // Four significant bits; below 2^-6, e4m3 has fewer, which no sum can tell.
                const unsigned rounded = (__float_as_uint(code) + 0x80000u) & 0xfff00000u;
                const float error = __fsub_rn(code, __uint_as_float(rounded));
                sum = __fmaf_rd(error, error, sum);
            }
            errors[i] = __float_as_uint(sum) - __float_as_uint(BEGIN);
        }
    }
};

// Multiplies a vector to be encoded: the inverse of its scale; 0 if that is 0 or not finite.
__device__ __forceinline__ float inverse_of(__half scale) {
    const float wide = __half2float(scale);
    return wide > 0.0f && wide < 65536.0f ? 1.0f / wide : 0.0f;
}

// Four values, multiplied by the inverse of their scale, as bytes of a word; zeros if that is 0.
template <typename Byte>
__device__ __forceinline__ unsigned encode_word(const float* values, float inverse) {
    float scaled[4];
#pragma unroll
    for (int i = 0; i < 4; i++) scaled[i] = inverse > 0.0f ? values[i] * inverse : 0.0f;
    return Byte::encode(scaled);
}

// Keys of Int8 and their queries are spread: blocks of columns of a head are Hadamard transformed,
// by butterflies of columns that are 1, 2, 4 and so on apart in either half of the head, and then
// of those across from each other. The order is the same in each kernel, as a key's bytes must not
// depend on it.

// x, y -> their sum and their difference.
__device__ __forceinline__ void butterfly(float& x, float& y) {
    const float sum = x + y;
    y = x - y;
    x = sum;
}

// The same of lanes so far apart. All lanes of the warp must call it.
__device__ __forceinline__ float butterfly_of_lanes(float x, int distance) {
    const float other = __shfl_xor_sync(0xffffffffu, x, distance);
    return fmaf(threadIdx.x & distance ? -1.0f : 1.0f, x, other);
}

// Log 2 of the columns of a block.
__device__ constexpr int spread_bits(int head_dim) {
    const int half = head_dim / 2;
    int bits = 1;
    while (half >> bits << bits == half) bits++;
    return bits;
}

// What products grow by is taken off by powers of two.
__device__ constexpr float spread_factor_of_q(int head_dim) {
    return 1.0f / static_cast<float>(1 << spread_bits(head_dim) / 2);
}
__device__ constexpr float spread_factor_of_k(int head_dim) {
    return 1.0f / static_cast<float>(1 << (spread_bits(head_dim) + 1) / 2);
}

// Where the scales [num_kv_heads, block_size] of a block begin, in bytes from its begin.
__device__ __forceinline__ long long scales_offset(int block_size, int num_kv_heads, int head_dim) {
    return static_cast<long long>(block_size) * num_kv_heads * head_dim;
}
