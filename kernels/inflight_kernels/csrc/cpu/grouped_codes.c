// Products with weight-only matrices in integers: codes times values of x that are rounded, 32
// columns with a scale in common, as in llama.cpp's Q8 blocks.
//
// With 8 bits of x alone, half of the predictions' error comes from the few blocks of a row with
// the largest values. Those have 16 bits, in two planes, for a quarter more products.
//
// For a group of columns, a product adds scale * sum(code * x) and minimum * sum(x), of rounded x.
// The sums of code * x are exact; all else is in one order, so a row's result does not depend on
// the others.

#include "grouped.h"

enum {
    AHEAD = 512,  // words that are prefetched, 2 KB
    VECTORS = 8,  // of weights that stay in registers for all rows of x
    UPPER = 254,  // what a step of the upper plane counts in those of the lower one
};

// Blocks have two planes from this part of a row's mean square of the blocks' largest values on.
static const float FINE = 2.0f;

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
                ints exact = dot(unpacked, x, bits, count);
                if (bits == 4 && in->is_fine[row * blocks + column / ROUNDED]) {
                    const char* lower = (const char*)in->lower + row * w->k + column;
                    exact = exact * UPPER + dot(unpacked, lower, bits, count);
                }
                floats sum = __builtin_convertvector(exact, floats);
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

static float largest_of(const float* x) {
    floats most = splat(0.0f);
    for (int i = 0; i < ROUNDED / LANES; i++)
        most = larger((floats)((words)load(x + i * LANES) & 0x7fffffffu), most);
    float largest = 0.0f;
    for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    return largest;
}

typedef union {
    ints vectors[ROUNDED / LANES];
    int32_t single[ROUNDED];
} Block;

// A block of x -> integers of at most `steps`, and their scale. It is NaN if a value is not finite,
// and 0 with values too small for its reciprocal.
static float round_block(const float* x, float largest, float steps, Block* rounded) {
    int is_tiny = largest < 1e-30f;
    floats factor = splat(is_tiny ? 0.0f : steps / largest), poison = splat(0.0f);
    for (int i = 0; i < ROUNDED / LANES; i++) {
        floats value = load(x + i * LANES);
        floats shifted = value * factor + 12582912.0f;  // rounds: 1.5 * 2^23
        rounded->vectors[i] = (ints)shifted - 0x4b400000;
        poison += value * 0.0f;
    }
    return (is_tiny ? 0.0f : largest / steps) + sum_of(poison);
}

// Columns 0 2 4 6 1 3 5 7 of each eight, as `unpack` has them.
static void permute_bytes(const int32_t* from, int8_t* to) {
    for (int i = 0; i < ROUNDED; i += 8)
        for (int j = 0; j < 4; j++) {
            to[i + j] = (int8_t)from[i + 2 * j];
            to[i + 4 + j] = (int8_t)from[i + 2 * j + 1];
        }
}

// Columns 0 2 1 3 of each four.
static void permute_shorts(const int32_t* from, int16_t* to) {
    for (int i = 0; i < ROUNDED; i += 4)
        for (int j = 0; j < 2; j++) {
            to[i + j] = (int16_t)from[i + 2 * j];
            to[i + 2 + j] = (int16_t)from[i + 2 * j + 1];
        }
}

RoundedRows rounded_from(const Weight* w, const RoundedRows* rows, int64_t first, int64_t count) {
    int64_t size = w->bits == 4 ? sizeof(int8_t) : sizeof(int16_t), blocks = w->k / ROUNDED;
    float* sums = rows->sums ? rows->sums + first * (w->k / w->group) : 0;
    return (RoundedRows){
        (char*)rows->values + first * w->k * size,
        rows->lower + first * w->k,
        rows->is_fine + first * blocks,
        rows->scales + first * blocks,
        sums,
        count,
    };
}

void round_row(const Weight* w, const float* x, RoundedRows to) {
    int64_t blocks = w->k / ROUNDED;
    float squares = 0.0f;
    for (int64_t b = 0; b < blocks; b++) {
        float largest = to.scales[b] = largest_of(x + b * ROUNDED);
        squares += largest * largest;
    }
    float limit = FINE * squares / (float)blocks;
    if (to.sums) memset(to.sums, 0, sizeof(float) * (w->k / w->group));
    for (int64_t b = 0; b < blocks; b++) {
        Block rounded, upper;
        int64_t first = b * ROUNDED;
        float largest = to.scales[b];
        int is_fine = w->bits != 4 || largest * largest > limit;
        float steps = is_fine ? 127.0f * UPPER : 127.0f;
        float scale = to.scales[b] = round_block(x + first, largest, steps, &rounded);
        for (int half = 0; to.sums && half < ROUNDED; half += 16) {
            int32_t sum = 0;
            for (int i = 0; i < 16; i++) sum += rounded.single[half + i];
            to.sums[(first + half) / w->group] += scale * (float)sum;
        }
        to.is_fine[b] = (uint8_t)is_fine;
        if (w->bits != 4) {
            permute_shorts(rounded.single, (int16_t*)to.values + first);
        } else if (is_fine) {
            for (int i = 0; i < ROUNDED; i++) {
                int32_t value = rounded.single[i];
                upper.single[i] = (value + (value < 0 ? -UPPER / 2 : UPPER / 2)) / UPPER;
                rounded.single[i] = value - UPPER * upper.single[i];
            }
            permute_bytes(upper.single, (int8_t*)to.values + first);
            permute_bytes(rounded.single, to.lower + first);
        } else {
            permute_bytes(rounded.single, (int8_t*)to.values + first);
        }
    }
}
