// Weight-only matrices of 4 or 8 bits.
//
// A weight [n, k] is level(code) * scale + minimum, with a scale and a minimum for each group of
// columns of a row, times a factor of the row.
//
// Memory: panels of 32 rows, the last one padded with zeros. Of a panel, a word has 8 codes of 4
// bits or 4 of 8 bits: consecutive columns of one row, lowest bits first. Words [k / codes in a
// word][32]; scales and minimums [k / group][32] in float16.
#pragma once

#include "vectors.h"

enum {
    OCTETS = 4,
    PANEL = LANES * OCTETS,
    BLOCK_ROWS = 96,  // of x, whose sums for a panel take 12 KB
    ROUNDED = 32,     // columns of x that are rounded with one scale
};

typedef struct {
    const uint32_t* codes;
    const uint16_t* scales;
    const uint16_t* minimums;  // null for none
    const float* factors;      // [n], powers of two
    const float* levels;       // [16]; null if a code is its own value
    int64_t n, k, group;
    int64_t bits;  // 4 or 8
    float zero;    // subtracted from codes
} Weight;

// Exact, subnormal numbers included; finite ones alone.
INLINE floats widened(const uint16_t* from) {
    halves half;
    memcpy(&half, from, sizeof half);
#if defined(__F16C__)
    return (floats)_mm256_cvtph_ps((__m128i)half);
#else
    words whole = __builtin_convertvector(half, words);
    floats magnitude = (floats)((whole & 0x7fff) << 13) * 0x1p112f;
    return (floats)((words)magnitude | (whole & 0x8000) << 16);
#endif
}

typedef struct {
    floats scale, minimum;
} Group;

INLINE Group group_of(const Weight* w, int64_t place) {
    Group found = {widened(w->scales + place), splat(0.0f)};
    if (w->minimums) found.minimum = widened(w->minimums + place);
    found.minimum = fused(splat(-w->zero), found.scale, found.minimum);
    return found;
}

// A total, and what a group of columns adds to it: its product without scale, and the sum of x
// there.
INLINE floats with_group(floats total, floats part, Group group, const float* sum) {
    total = fused(part, group.scale, total);
    return sum ? fused(group.minimum, splat(*sum), total) : total;
}

// Rows of x, rounded to 8 bits.
typedef struct {
    const void*
        values;  // [rows, k], int8_t for codes of 4 bits and int16_t for those of 8, permuted
    const float* scales;  // [rows, k / ROUNDED]
    const float* sums;    // [rows, k / group], of the rounded values; null if nothing needs them
    int64_t rows;
} RoundedRows;

// Whether there are products of codes with rounded values for a weight.
int takes_rounded(const Weight* weight);

// Round a row of x for a weight: values [k], scales [k / ROUNDED] and, unless null, sums [k /
// group].
void round_row(const Weight* weight, const float* x, void* values, float* scales, float* sums);

// totals [rows, PANEL] of a panel, of at most BLOCK_ROWS rows.
void rounded_product(const Weight* weight, int64_t panel, const RoundedRows* in, float* totals);

// Some rows of x, and the sums of their groups of columns.
typedef struct {
    const float* x;     // [rows, k]
    const float* sums;  // [rows, k / group]; null if nothing needs them
    int64_t rows;
} FloatRows;

// As rounded_product.
void float_product(const Weight* weight, int64_t panel, const FloatRows* in, float* totals);
