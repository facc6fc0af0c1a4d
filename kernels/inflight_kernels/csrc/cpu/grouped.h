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
    PANEL = 32,
    VECTORS = PANEL / LANES,  // of a panel's rows
    BLOCK_ROWS = 96,          // of x, whose sums for a panel take 12 KB
    ROUNDED = 32,             // columns of x that are rounded with one scale
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
#if LANES == 16
    return (floats)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__)
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

// Rows of x as integers, each block of ROUNDED columns with a scale. For codes of 8 bits they have
// 16 bits; for those of 4 bits 8 bits, or 16 in two planes in the blocks that count most in a row.
typedef struct {
    // [rows, k], permuted: int16_t for codes of 8 bits, otherwise int8_t, the upper plane.
    void* values;
    int8_t* lower;     // [rows, k], of blocks with two planes: a value is UPPER * upper + lower
    uint8_t* is_fine;  // [rows, k / ROUNDED], whether a block has two planes
    float* scales;     // [rows, k / ROUNDED]
    float* sums;       // [rows, k / group], of the rounded values; null if nothing needs them
    int64_t rows;
} RoundedRows;

// Whether there are products of codes with rounded values for a weight.
int takes_rounded(const Weight* weight);

// Rows from `first` on.
RoundedRows rounded_from(const Weight* weight, const RoundedRows* rows, int64_t first,
                         int64_t count);

// Round a row x [k] for a weight, into one of `to`.
void round_row(const Weight* weight, const float* x, RoundedRows to);

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
