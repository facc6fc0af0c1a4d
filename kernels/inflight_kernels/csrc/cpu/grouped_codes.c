// Products with weight-only matrices in integers: codes times values of x that are rounded, 32
// columns with a scale in common, as in llama.cpp's Q8 blocks.
//
// With 8 bits of x alone, half of the predictions' error comes from the few blocks of a row with
// the largest values. Those have 16 bits, in two planes, for a quarter more products.
//
// For a group of columns, a product adds scale * sum(code * x) and minimum * sum(x), of rounded x.
// The sums of code * x are exact; all else is in one order, so a row's result does not depend on
// the others.

#define WIDE
#include "grouped.h"

enum {
    AHEAD = 512,           // words that are prefetched, 2 KB
    TOGETHER = LANES / 8,  // vectors of rows whose codes stay in registers for all rows of x
    UNPACKED = 8,          // of them for each, at most
    UPPER = 254,           // what a step of the upper plane counts in those of the lower one
};

// Blocks have two planes from this part of a row's mean square of the blocks' largest values on.
static const float FINE = 2.0f;

typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));
typedef int16_t shorts __attribute__((vector_size(4 * LANES)));

int takes_rounded(const Weight* w) {
    return !w->levels && w->k % ROUNDED == 0 && (w->group == 16 || w->group % ROUNDED == 0);
}

#if LANES == 16
// sum + products of neighbouring 8-bit values, the codes unsigned, four for a lane.
INLINE ints with_bytes(ints sum, words codes, words x) {
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
}

// sum + products of neighbouring 16-bit values, two for a lane.
INLINE ints with_shorts(ints sum, words codes, words x) {
    return (ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
}
#else
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
#endif

INLINE words splat_word(const void* from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word - (words){0};
}

// Codes of a unit of columns of LANES rows: of 4 bits as bytes, columns 0 2 4 6 and 1 3 5 7 of each
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

// Sums over a unit's columns of codes times rounded x, for TOGETHER vectors of rows of the weight.
INLINE void dots(words codes[TOGETHER][UNPACKED], const char* x, int bits, int count, ints* sums) {
#if LANES == 16
    for (int vector = 0; vector < TOGETHER; vector++) sums[vector] = (ints){0};
    for (int i = 0; i < count; i++) {
        words values = splat_word(x + 4 * i);
        for (int vector = 0; vector < TOGETHER; vector++)
            sums[vector] = bits == 4 ? with_bytes(sums[vector], codes[vector][i], values)
                                     : with_shorts(sums[vector], codes[vector][i], values);
    }
#else
    if (bits == 4) {
        // At most 8 * 2 * 15 * 127 in 16 bits.
        shorts sum = pairs_of_bytes(codes[0][0], splat_word(x));
        for (int i = 1; i < count; i++) sum += pairs_of_bytes(codes[0][i], splat_word(x + 4 * i));
        sums[0] = pairs_of_shorts(sum, (shorts){0} + 1);
        return;
    }
    sums[0] = pairs_of_shorts((shorts)codes[0][0], (shorts)splat_word(x));
    for (int i = 1; i < count; i++)
        sums[0] += pairs_of_shorts((shorts)codes[0][i], (shorts)splat_word(x + 4 * i));
#endif
}

// A unit of columns, all of one group and one scale of x, and the rows of x from its first column
// on.
typedef struct {
    int begins, ends;  // its group
    int bits, count;   // of a code; vectors of unpacked codes
    const char *values, *lower;
    const uint8_t* is_fine;
    const float *scales, *sums;
} Unit;

// Its products with TOGETHER vectors of rows of the weight. They wait in parts [rows, PANEL] until
// the group ends.
INLINE void unit_product(const Weight* w, words codes[TOGETHER][UNPACKED], const Group* groups,
                         const Unit* unit, int64_t rows, float* parts, float* totals) {
    int64_t k = w->k, blocks = k / ROUNDED, num_groups = k / w->group;
    int64_t stride = k * (unit->bits == 4 ? 1 : 2);
    for (int64_t row = 0; row < rows; row++) {
        ints exact[TOGETHER], fine[TOGETHER];
        dots(codes, unit->values + row * stride, unit->bits, unit->count, exact);
        if (unit->bits == 4 && unit->is_fine[row * blocks]) {
            dots(codes, unit->lower + row * k, unit->bits, unit->count, fine);
            for (int i = 0; i < TOGETHER; i++) exact[i] = exact[i] * UPPER + fine[i];
        }
        floats scale = splat(unit->scales[row * blocks]);
        const float* x_sum = unit->sums ? unit->sums + row * num_groups : 0;
        for (int i = 0; i < TOGETHER; i++) {
            float* part = parts + row * PANEL + i * LANES;
            float* total = totals + row * PANEL + i * LANES;
            floats sum = __builtin_convertvector(exact[i], floats);
            sum = unit->begins ? sum * scale : fused(sum, scale, load(part));
            if (unit->ends)
                store(total, with_group(load(total), sum, groups[i], x_sum));
            else
                store(part, sum);
        }
    }
}

// Of a panel, unit by unit of `size` columns.
INLINE void units_of_product(const Weight* w, int64_t panel, const RoundedRows* in, float* totals,
                             int bits, int size, int is_group) {
    int per_word = 32 / bits, count = 2 * size / per_word;
    int64_t groups = w->k / w->group, rows = in->rows;
    const uint32_t* codes = w->codes + panel * (w->k / per_word) * PANEL;
    float parts[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    memset(totals, 0, sizeof(float) * rows * PANEL);
    for (int64_t column = 0; column < w->k; column += size, codes += size / per_word * PANEL) {
        int64_t g = column / w->group, block = column / ROUNDED;
        Unit unit = {
            is_group || column == g * w->group,
            is_group || column + size == (g + 1) * w->group,
            bits,
            count,
            (const char*)in->values + column * (bits == 4 ? 1 : 2),
            (const char*)in->lower + column,
            in->is_fine + block,
            in->scales + block,
            in->sums ? in->sums + g : 0,
        };
        for (int i = 0; i < size / per_word * 2; i++) __builtin_prefetch(codes + AHEAD + i * 16);
        for (int first = 0; first < PANEL; first += TOGETHER * LANES) {
            words unpacked[TOGETHER][UNPACKED];
            Group ending[TOGETHER];
            for (int i = 0; i < TOGETHER; i++) {
                int lane = first + i * LANES;
                unpack(codes + lane, bits, count, unpacked[i]);
                ending[i] = (Group){splat(0.0f), splat(0.0f)};
                if (unit.ends) ending[i] = group_of(w, (panel * groups + g) * PANEL + lane);
            }
            unit_product(w, unpacked, ending, &unit, rows, parts + first, totals + first);
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
