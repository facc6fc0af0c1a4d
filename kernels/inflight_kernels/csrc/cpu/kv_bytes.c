// Quantises keys and values to 8 bits, bit by bit as torch_ops/kv_quantization.py defines it.

#include "kv_bytes.h"

#include <math.h>

enum {
    CODES = 8,        // that the largest value of a key in e4m3 may become
    KEY_COLUMNS = 4,  // of which the largest stands for all when errors are compared
};

static const float LARGEST_WITH_ANY_CODE = 0x1p23f;

static float code_of(int index) {
    return index < CODES - 1 ? 448.0f - 32.0f * (float)index : 240.0f;
}

static uint32_t bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// x >= 0 in float16, rounded up.
static uint16_t half_above(float x) {
    if (!(x <= 65504.0f)) return isnan(x) ? 0x7e00 : 0x7c00;
    if (x < 0x1p-14f) return (uint16_t)ceilf(x * 0x1p24f);
    uint32_t bits = bits_of_float(x) - (112u << 23);
    return (uint16_t)((bits + 0x1fff) >> 13);
}

INLINE floats chosen(ints condition, floats yes, floats no) {
    return (floats)(((ints)yes & condition) | ((ints)no & ~condition));
}

// Whole numbers of up to 2^22, rounded to nearest even.
INLINE ints rounded(floats x) { return (ints)(x + 12582912.0f) - 0x4b400000; }  // 1.5 * 2^23

// Numbers, times the inverse of their scale, as bytes.
INLINE ints codes_of(floats x, Cached cached) {
    float largest = cached == E4M3 ? 448.0f : 127.0f;
    x = chosen(x == x, x, splat(0.0f));  // NaN is 0
    x = chosen(x > largest, splat(largest), x);
    x = chosen(x < -largest, splat(-largest), x);
    if (cached == INT8) return rounded(x);
    words all = (words)x, magnitude = all & 0x7fffffff;
    // Normal numbers lose 20 bits of mantissa, and have the exponent's bias 7 instead of 127. Below
    // 2^-6 they are multiples of 2^-9.
    words normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
    ints subnormal = rounded((floats)magnitude * 512.0f);
    ints is_small = (floats)magnitude < 0x1p-6f;
    return (subnormal & is_small) | ((ints)normal & ~is_small) | (ints)(all >> 24 & 0x80);
}

// The largest magnitude; NaN if there is one.
static float largest_of(const float* x, int64_t count) {
    uint32_t largest = 0;  // as bits, among which NaN is the largest
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = bits_of_float(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return float_of_bits(largest);
}

// What the largest value of a key becomes in e4m3. Each of the lanes has one of the numbers.
static float key_code(const float* key, int64_t dim, float largest) {
    typedef double doubles __attribute__((vector_size(8 * LANES)));
    _Static_assert(LANES == CODES, "a lane for each number");
    if (!(largest < LARGEST_WITH_ANY_CODE)) return code_of(0);
    floats codes;
    for (int i = 0; i < CODES; i++) codes[i] = code_of(i);
    floats factors = codes * (1.0f / largest);
    ints errors = {0};  // multiples of 2^-11, rounded down
    for (int64_t column = 0; column < dim; column += KEY_COLUMNS) {
        int64_t count = dim - column < KEY_COLUMNS ? dim - column : KEY_COLUMNS;
        floats scaled = factors * largest_of(key + column, count);
        floats four_bits = (floats)(((words)scaled + 0x80000) & 0xfff00000);
        doubles error = __builtin_convertvector(scaled - four_bits, doubles);
        errors += __builtin_convertvector(error * error * 0x1p11, ints);
    }
    floats relative = __builtin_convertvector(errors, floats) * (1.0f / (codes * codes));
    int32_t least = INT32_MAX;
    for (int i = 0; i < CODES; i++) {
        int32_t ranked = (((ints)relative)[i] & ~(CODES - 1)) | i;
        least = ranked < least ? ranked : least;
    }
    return code_of(least & (CODES - 1));
}

// Hadamard transforms of blocks of columns, times 2^-bits.
static void spread(float* x, int64_t dim, int64_t bits) {
    int64_t half = dim / 2;
    for (int64_t distance = 1; distance <= half; distance *= 2) {
        // The last butterflies are of the halves of a head, of any width.
        int64_t apart = half % (2 * distance) ? half : distance;
        for (int64_t first = 0; first < dim; first += 2 * apart)
            for (int64_t i = first; i < first + apart; i++) {
                float low = x[i], high = x[i + apart];
                x[i] = low + high;
                x[i + apart] = low - high;
            }
        if (apart == half) break;
    }
    float factor = ldexpf(1.0f, (int)-bits);
    for (int64_t i = 0; i < dim; i++) x[i] *= factor;
}

// Write rows [rows, heads, dim], `stride` apart, into slots; those with `bits` are spread before.
void write_bytes(const float* from, int64_t stride, const int64_t* slots, int64_t rows,
                 const Bytes* to, int64_t are_keys, int64_t bits) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    Cached cached = (Cached)to->cached;
    int64_t dim = to->dim, padded = (dim + LANES - 1) / LANES * LANES;
    float x[padded];
    int8_t found[padded];
    memset(x, 0, sizeof x);
    for (int64_t row = 0; row < rows; row++) {
        int64_t block = slots[row] / to->block_size, offset = slots[row] % to->block_size;
        for (int64_t head = 0; head < to->heads; head++) {
            memcpy(x, from + row * stride + head * dim, sizeof(float) * dim);
            if (bits) spread(x, dim, bits);
            float amax = largest_of(x, dim), code = cached == E4M3 ? 448.0f : 127.0f;
            if (cached == E4M3 && are_keys) code = key_code(x, dim, amax);
            uint16_t scale = *scale_of(to, block, offset, head) = half_above(amax / code);
            float inverse = 1.0f / float_of_half(scale);
            for (int64_t i = 0; i < padded; i += LANES) {
                bytes some =
                    __builtin_convertvector(codes_of(load(x + i) * inverse, cached), bytes);
                memcpy(found + i, &some, sizeof some);
            }
            memcpy(bytes_of(to, block, offset, head), found, dim);
        }
    }
}

// Spread queries [rows, heads, dim], `stride` apart, into those beside each other.
void spread_rows(const float* from, int64_t stride, int64_t rows, int64_t heads, int64_t dim,
                 int64_t bits, float* to) {
    for (int64_t row = 0; row < rows; row++) {
        float* own = to + row * heads * dim;
        memcpy(own, from + row * stride, sizeof(float) * heads * dim);
        for (int64_t head = 0; head < heads; head++) spread(own + head * dim, dim, bits);
    }
}
