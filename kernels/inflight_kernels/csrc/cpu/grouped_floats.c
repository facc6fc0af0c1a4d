// Products with weight-only matrices in float32, of weights whose codes stand for levels of a
// table, or whose shape the products of integers do not take.
//
// For a group of columns, a product adds scale * sum(level * x) and minimum * sum(x). Codes become
// levels in registers, or in a tile in the first-level cache where many rows of x share them.
// Either way the order is the same, so a row's result does not depend on the other rows.

#define WIDE
#include "grouped.h"

enum {
    TILE_COLUMNS = 64,  // of a tile of levels: 8 KB
    MAX_DIRECT = 3,     // rows of x for which levels stay in registers
    AHEAD = 512,        // words that are prefetched, 2 KB
};

// Values of the codes in the lowest bits of each lane.
INLINE floats values_of(words codes, int bits, const float* levels) {
    words mask = (words){0} + (bits == 4 ? 15u : 255u);
    codes &= mask;
    if (!levels) return __builtin_convertvector((ints)codes, floats);
#if LANES == 16
    return (floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)load(levels));
#elif defined(__AVX2__)
    __m256i index = (__m256i)codes;
    __m256 low = _mm256_permutevar8x32_ps((__m256)load(levels), index);
    __m256 high = _mm256_permutevar8x32_ps((__m256)load(levels + LANES), index);
    __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return (floats)_mm256_blendv_ps(low, high, is_high);
#else
    floats found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = levels[codes[lane]];
    return found;
#endif
}

// totals [rows, PANEL], of at most MAX_DIRECT rows.
INLINE void few_rows(const Weight* w, int64_t panel, const FloatRows* in, int rows, float* totals,
                     int bits, const float* levels) {
    int per_word = 32 / bits;
    int64_t groups = w->k / w->group;
    const uint32_t* codes = w->codes + panel * (w->k / per_word) * PANEL;
    memset(totals, 0, sizeof(float) * rows * PANEL);
    for (int64_t first = 0; first < w->k;) {
        floats part[MAX_DIRECT][VECTORS];
        for (int row = 0; row < rows; row++)
            for (int vector = 0; vector < VECTORS; vector++) part[row][vector] = splat(0.0f);
        int64_t g = first / w->group, end = first + w->group;
        for (; first < end; first += per_word) {
            __builtin_prefetch(codes + AHEAD);
            __builtin_prefetch(codes + AHEAD + PANEL / 2);
            for (int vector = 0; vector < VECTORS; vector++) {
                words word;
                memcpy(&word, codes, sizeof word);
                codes += LANES;
                for (int place = 0; place < per_word; place++) {
                    floats level = values_of(word >> (bits * place), bits, levels);
                    for (int row = 0; row < rows; row++)
                        part[row][vector] = fused(level, splat(in->x[row * w->k + first + place]),
                                                  part[row][vector]);
                }
            }
        }
        for (int vector = 0; vector < VECTORS; vector++) {
            Group group = group_of(w, (panel * groups + g) * PANEL + vector * LANES);
            for (int row = 0; row < rows; row++) {
                float* total = totals + row * PANEL + vector * LANES;
                const float* sum = in->sums ? in->sums + row * groups + g : 0;
                store(total, with_group(load(total), part[row][vector], group, sum));
            }
        }
    }
}

// Levels of columns [first, first + count) of a panel -> tile [count, PANEL].
INLINE void fill(const Weight* w, int64_t panel, int64_t first, int64_t count, float* tile,
                 int bits, const float* levels) {
    int per_word = 32 / bits;
    const uint32_t* codes = w->codes + (panel * w->k + first) / per_word * PANEL;
    for (int64_t column = 0; column < count; column += per_word)
        for (int vector = 0; vector < VECTORS; vector++) {
            words word;
            memcpy(&word, codes, sizeof word);
            codes += LANES;
            for (int place = 0; place < per_word; place++)
                store(tile + (column + place) * PANEL + vector * LANES,
                      values_of(word >> (bits * place), bits, levels));
        }
}

// A tile of levels, columns of one group.
typedef struct {
    const float* levels;           // [count, PANEL]
    int64_t first, count, number;  // of its columns, and of their group
    int begins, ends;              // its group
    Group groups[VECTORS];         // where it ends
} Tile;

// Products of rows of x with half of a tile, from `half` on. They begin at 0 with a group, wait in
// parts [rows, PANEL], and are added to totals [rows, PANEL] when the group ends.
INLINE void add_product(const Weight* w, const Tile* tile, int64_t half, const FloatRows* in,
                        int64_t row, int rows, float* parts, float* totals) {
    int64_t groups = w->k / w->group;
    const float *x = in->x + row * w->k + tile->first, *levels = tile->levels + half;
    parts += row * PANEL + half;
    totals += row * PANEL + half;
    floats part[6][2];
    for (int i = 0; i < rows; i++)
        for (int side = 0; side < 2; side++)
            part[i][side] = tile->begins ? splat(0.0f) : load(parts + i * PANEL + side * LANES);
    for (int64_t column = 0; column < tile->count; column++) {
        floats left = load(levels + column * PANEL), right = load(levels + column * PANEL + LANES);
        for (int i = 0; i < rows; i++) {
            floats factor = splat(x[i * w->k + column]);
            part[i][0] = fused(left, factor, part[i][0]);
            part[i][1] = fused(right, factor, part[i][1]);
        }
    }
    for (int side = 0; side < 2; side++) {
        Group group = tile->groups[half / LANES + side];
        for (int i = 0; i < rows; i++) {
            if (!tile->ends) {
                store(parts + i * PANEL + side * LANES, part[i][side]);
                continue;
            }
            float* total = totals + i * PANEL + side * LANES;
            const float* sum = in->sums ? in->sums + (row + i) * groups + tile->number : 0;
            store(total, with_group(load(total), part[i][side], group, sum));
        }
    }
}

INLINE void add_products(const Weight* w, const Tile* tile, const FloatRows* in, float* parts,
                         float* totals) {
    for (int64_t half = 0; half < PANEL; half += 2 * LANES) {
        int64_t row = 0;
        for (; row + 6 <= in->rows; row += 6) add_product(w, tile, half, in, row, 6, parts, totals);
        switch (in->rows - row) {
            case 1:
                add_product(w, tile, half, in, row, 1, parts, totals);
                break;
            case 2:
                add_product(w, tile, half, in, row, 2, parts, totals);
                break;
            case 3:
                add_product(w, tile, half, in, row, 3, parts, totals);
                break;
            case 4:
                add_product(w, tile, half, in, row, 4, parts, totals);
                break;
            case 5:
                add_product(w, tile, half, in, row, 5, parts, totals);
                break;
        }
    }
}

// totals [rows, PANEL], of at most BLOCK_ROWS rows.
INLINE void many_rows(const Weight* w, int64_t panel, const FloatRows* in, float* totals, int bits,
                      const float* levels) {
    float memory[TILE_COLUMNS * PANEL] __attribute__((aligned(64)));
    float parts[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t groups = w->k / w->group;
    memset(totals, 0, sizeof(float) * in->rows * PANEL);
    for (int64_t first = 0; first < w->k;) {
        int64_t g = first / w->group, end = (g + 1) * w->group;
        int64_t count = end - first < TILE_COLUMNS ? end - first : TILE_COLUMNS;
        fill(w, panel, first, count, memory, bits, levels);
        Tile tile = {memory, first, count, g, first == end - w->group, first + count == end, {}};
        if (tile.ends)
            for (int vector = 0; vector < VECTORS; vector++)
                tile.groups[vector] = group_of(w, (panel * groups + g) * PANEL + vector * LANES);
        add_products(w, &tile, in, parts, totals);
        first += count;
    }
}

INLINE void panel_product(const Weight* w, int64_t panel, const FloatRows* in, float* totals,
                          int bits, const float* levels) {
    switch (in->rows) {
        case 1:
            few_rows(w, panel, in, 1, totals, bits, levels);
            break;
        case 2:
            few_rows(w, panel, in, 2, totals, bits, levels);
            break;
        case 3:
            few_rows(w, panel, in, 3, totals, bits, levels);
            break;
        default:
            many_rows(w, panel, in, totals, bits, levels);
    }
}

void float_product(const Weight* w, int64_t panel, const FloatRows* in, float* totals) {
    if (w->levels)
        panel_product(w, panel, in, totals, 4, w->levels);
    else if (w->bits == 4)
        panel_product(w, panel, in, totals, 4, 0);
    else
        panel_product(w, panel, in, totals, 8, 0);
}
