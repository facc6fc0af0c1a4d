// Products with weight-only matrices in integers: codes times values of x that are rounded to 8
// bits, 32 columns with a scale in common, as in llama.cpp's Q8 blocks.
//
// For a group of columns, a product adds scale * sum(code * x) and minimum * sum(x), of rounded x.
// The sums of code * x are exact; all else is in one order, so a row's result does not depend on
// the others.

#include "grouped.h"

enum {
    AHEAD = 512,  // words that are prefetched, 2 KB
    VECTORS = 8,  // of weights that stay in registers for all rows of x
};

typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));
typedef int16_t shorts __attribute__((vector_size(4 * LANES)));

int takes_rounded(const Weight* w) {
    return !w->levels && w->k % ROUNDED == 0 && (w->group == 16 || w->group % ROUNDED == 0);
}

// Sums of neighbouring products of 8-bit values, the codes unsigned and at most 15.
INLINE shorts pairs_of_bytes(words codes, words x) {
#if defined(__AVX2__)
    return (shorts)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
#else
    bytes unsigned_ = (bytes)codes, signed_ = (bytes)x;
    shorts found;
    for (int i = 0; i < 2 * LANES; i++)
        found[i] = (int16_t)(unsigned_[2 * i] * (int8_t)signed_[2 * i] +
                             unsigned_[2 * i + 1] * (int8_t)signed_[2 * i + 1]);
    return found;
#endif
}

// Sums of neighbouring products of 16-bit values.
INLINE ints pairs_of_shorts(shorts a, shorts b) {
#if defined(__AVX2__)
    return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    ints found;
    for (int i = 0; i < LANES; i++) found[i] = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return found;
#endif
}

INLINE words splat_word(const void* from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return (words){word, word, word, word, word, word, word, word};
}

// Codes of a unit of columns of eight rows: of 4 bits as bytes, columns 0 2 4 6 and 1 3 5 7 of each
// word; of 8 bits as 16-bit values, columns 0 2 and 1 3.
INLINE void unpack(const uint32_t* codes, int bits, int count, words* found) {
    words mask = (words){0} + (bits == 4 ? 0x0f0f0f0fu : 0x00ff00ffu);
    for (int i = 0; i < count / 2; i++) {
        words word;
        memcpy(&word, codes + i * PANEL, sizeof word);
        found[2 * i] = word & mask;
        found[2 * i + 1] = (word >> bits) & mask;
    }
}

// Sums over a unit's columns of codes times rounded x, for eight rows of the weight.
INLINE ints dot(const words* codes, const char* x, int bits, int count) {
    if (bits == 4) {
        // At most 8 * 2 * 15 * 127 in 16 bits.
        shorts sum = pairs_of_bytes(codes[0], splat_word(x));
        for (int i = 1; i < count; i++) sum += pairs_of_bytes(codes[i], splat_word(x + 4 * i));
        return pairs_of_shorts(sum, (shorts){0} + 1);
    }
    ints sum = pairs_of_shorts((shorts)codes[0], (shorts)splat_word(x));
    for (int i = 1; i < count; i++)
        sum += pairs_of_shorts((shorts)codes[i], (shorts)splat_word(x + 4 * i));
    return sum;
}

// Of a panel, unit by unit: `unit` columns, all of one group and one scale of x.
INLINE void units_of_product(const Weight* w, int64_t panel, const RoundedRows* in, float* totals,
                             int bits, int unit, int is_group) {
    int per_word = 32 / bits, count = 2 * unit / per_word, size = bits == 4 ? 1 : 2;
    int64_t groups = w->k / w->group, blocks = w->k / ROUNDED;
    const uint32_t* codes = w->codes + panel * (w->k / per_word) * PANEL;
    float parts[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    memset(totals, 0, sizeof(float) * in->rows * PANEL);
    for (int64_t column = 0; column < w->k; column += unit, codes += unit / per_word * PANEL) {
        int64_t g = column / w->group;
        int begins = is_group || column == g * w->group;
        int ends = is_group || column + unit == (g + 1) * w->group;
        for (int i = 0; i < unit / per_word * 2; i++) __builtin_prefetch(codes + AHEAD + i * 16);
        for (int octet = 0; octet < OCTETS; octet++) {
            words unpacked[VECTORS];
            unpack(codes + octet * LANES, bits, count, unpacked);
            Group group = {splat(0.0f), splat(0.0f)};
            if (ends) group = group_of(w, (panel * groups + g) * PANEL + octet * LANES);
            for (int64_t row = 0; row < in->rows; row++) {
                const char* x = (const char*)in->values + (row * w->k + column) * size;
                floats sum = __builtin_convertvector(dot(unpacked, x, bits, count), floats);
                floats scale = splat(in->scales[row * blocks + column / ROUNDED]);
                float* part = parts + row * PANEL + octet * LANES;
                float* total = totals + row * PANEL + octet * LANES;
                sum = begins ? sum * scale : fused(sum, scale, load(part));
                const float* x_sum = in->sums ? in->sums + row * groups + g : 0;
                if (ends)
                    store(total, with_group(load(total), sum, group, x_sum));
                else
                    store(part, sum);
            }
        }
    }
}

void rounded_product(const Weight* w, int64_t panel, const RoundedRows* in, float* totals) {
    if (w->bits == 4 && w->group == 32)
        units_of_product(w, panel, in, totals, 4, 32, 1);
    else if (w->bits == 4 && w->group == 16)
        units_of_product(w, panel, in, totals, 4, 16, 1);
    else if (w->bits == 4)
        units_of_product(w, panel, in, totals, 4, 32, 0);
    else
        units_of_product(w, panel, in, totals, 8, 16, 0);
}

// 32 values of x -> their scale, and integers in -127..127. Blocks that are not finite get the
// scale NaN; those too small for a scale's reciprocal are 0.
INLINE float round_block(const float* x, ints* rounded) {
    floats most = splat(0.0f), poison = splat(0.0f);
    for (int i = 0; i < ROUNDED / LANES; i++) {
        floats value = load(x + i * LANES);
        most = larger((floats)((words)value & 0x7fffffffu), most);
        poison += value * 0.0f;
    }
    float largest = 0.0f;
    for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    int is_tiny = largest < 1e-30f;
    floats factor = splat(is_tiny ? 0.0f : 127.0f / largest);
    for (int i = 0; i < ROUNDED / LANES; i++) {
        floats shifted = load(x + i * LANES) * factor + 12582912.0f;  // rounds: 1.5 * 2^23
        rounded[i] = (ints)shifted - 0x4b400000;
    }
    return (is_tiny ? 0.0f : largest / 127.0f) + sum_of(poison);
}

void round_row(const Weight* w, const float* x, void* values, float* scales, float* sums) {
    if (sums) memset(sums, 0, sizeof(float) * (w->k / w->group));
    for (int64_t block = 0; block < w->k / ROUNDED; block++) {
        union {
            ints vectors[ROUNDED / LANES];
            int32_t single[ROUNDED];
        } rounded;
        int64_t first = block * ROUNDED;
        float scale = scales[block] = round_block(x + first, rounded.vectors);
        for (int half = 0; sums && half < ROUNDED; half += 16) {
            int32_t sum = 0;
            for (int i = 0; i < 16; i++) sum += rounded.single[half + i];
            sums[(first + half) / w->group] += scale * (float)sum;
        }
        if (w->bits == 4) {
            int8_t* to = (int8_t*)values + first;
            for (int i = 0; i < ROUNDED; i += 8)
                for (int j = 0; j < 4; j++) {
                    to[i + j] = (int8_t)rounded.single[i + 2 * j];
                    to[i + 4 + j] = (int8_t)rounded.single[i + 2 * j + 1];
                }
        } else {
            int16_t* to = (int16_t*)values + first;
            for (int i = 0; i < ROUNDED; i += 4)
                for (int j = 0; j < 2; j++) {
                    to[i + j] = (int16_t)rounded.single[i + 2 * j];
                    to[i + 2 + j] = (int16_t)rounded.single[i + 2 * j + 1];
                }
        }
    }
}
