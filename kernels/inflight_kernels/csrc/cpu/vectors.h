// Vectors of LANES lanes. They are GCC's and so of any architecture.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

// Sources whose loops gain from 512 bits define WIDE first. CPUs that are older than these
// instructions lower their clock for them.
#if defined(WIDE) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define LANES 16
#else
#define LANES 8
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE floats splat(float value) { return value - (floats){0.0f}; }

INLINE floats load(const float* from) {
    floats found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE void store(float* to, floats values) { memcpy(to, &values, sizeof values); }

// a * b + c, rounded once where the CPU can. Everywhere spelled out: left to the compiler, which of
// two products is fused with a sum would depend on the code around it, and so would a row's result.
INLINE floats fused(floats a, floats b, floats c) {
#if LANES == 16
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
    for (int lane = 0; lane < LANES; lane++) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return c;
#else
    return a * b + c;
#endif
}

INLINE float sum_of(floats values) {
    typedef float quad __attribute__((vector_size(16)));
    quad parts[LANES / 4];
    memcpy(parts, &values, sizeof parts);
    quad sums = parts[0] + parts[1];
    for (int i = 2; i < LANES / 4; i++) sums += parts[i];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// Lanes of two vectors by number, those of the second one from LANES on.
INLINE floats shuffled(floats first, floats second, ints lanes) {
#if defined(__clang__)
    floats found;
    for (int lane = 0; lane < LANES; lane++)
        found[lane] = lanes[lane] < LANES ? first[lanes[lane]] : second[lanes[lane] - LANES];
    return found;
#else
    return __builtin_shuffle(first, second, lanes);
#endif
}

// The larger of each pair; of a pair with a NaN, the second one.
INLINE floats larger(floats first, floats second) {
    ints is_first = first > second;
    return (floats)(((ints)first & is_first) | ((ints)second & ~is_first));
}

// e^x, off by at most two units in the last place: Cephes's polynomial on [-ln 2 / 2, ln 2 / 2],
// times a power of two. Exactly 0 from -87.3 down, as results would be subnormal; NaN of NaN.
INLINE floats exponential(floats x) {
    ints is_zero = x < -87.33f;
    ints is_large = x > 88.72f;
    floats inside = (floats)((ints)x & ~is_zero & ~is_large);
    floats shifted = fused(inside, splat(1.44269504f), splat(12582912.0f));  // rounds: 1.5 * 2^23
    ints power = (ints)shifted - 0x4b400000;
    floats whole = shifted - 12582912.0f;
    floats rest = fused(whole, splat(-0.693359375f), inside);  // ln 2 in two parts
    rest = fused(whole, splat(2.12194440e-4f), rest);
    floats series = splat(1.9875691500e-4f);
    series = fused(series, rest, splat(1.3981999507e-3f));
    series = fused(series, rest, splat(8.3334519073e-3f));
    series = fused(series, rest, splat(4.1665795894e-2f));
    series = fused(series, rest, splat(1.6666665459e-1f));
    series = fused(series, rest, splat(5.0000001201e-1f));
    floats value = fused(series, rest * rest, rest) + 1.0f;
    // Twice, so that neither factor leaves the range of exponents.
    ints half = power >> 1;
    value = value * (floats)((half + 127) << 23) * (floats)((power - half + 127) << 23);
    ints infinite = (ints)splat(__builtin_inff()) & is_large;
    return (floats)(((ints)value & ~is_zero & ~is_large) | infinite);
}
