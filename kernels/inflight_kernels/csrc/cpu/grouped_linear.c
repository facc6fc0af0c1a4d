// Products with weight-only matrices of 4 or 8 bits on a CPU, and rows of them.
//
// A weight [n, k] is level(code) * scale + minimum, with a scale and a minimum for each group of
// columns of a row, times a factor of the row. For a group, a product adds scale * sum(level * x) and
// minimum * sum(x), all in float32; codes become levels in registers, or in a tile in the first-level
// cache where many rows of x share them.
//
// Every output is computed in one order, whatever the number of rows of x and of threads, so a row's
// result does not depend on the others.
//
// Memory: panels of 32 rows, the last one padded with zeros. Of a panel, a word has 8 codes of 4 bits
// or 4 of 8 bits: consecutive columns of one row, lowest bits first. Words [k / codes in a word][32];
// scales and minimums [k / group][32] in float16.

#include "pool.h"
#include "vectors.h"

#include <stdlib.h>

enum {
    OCTETS = 4,
    PANEL = LANES * OCTETS,
    TILE_COLUMNS = 64,  // of a tile of levels: 8 KB
    BLOCK_ROWS = 96,    // of x, whose sums for a panel take 12 KB
    MAX_DIRECT = 3,     // rows of x for which levels stay in registers
    MAX_STACK = 4096,   // sums of x that are kept on the stack
    TASKS_PER_THREAD = 4,
    AHEAD = 512,  // words that are prefetched, 2 KB
};

typedef struct {
    const uint32_t *codes;
    const uint16_t *scales;
    const uint16_t *minimums;  // null for none
    const float *factors;      // [n], powers of two
    const float *levels;       // [16]; null if a code is its own value
    int64_t n, k, group;
    int64_t bits;              // 4 or 8
    float zero;                // subtracted from codes
} Weight;

// Exact, subnormal numbers included; finite ones alone.
INLINE floats widened(const uint16_t *from) {
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

// Values of the codes in the lowest bits of each lane.
INLINE floats values_of(words codes, int bits, const float *levels) {
    words mask = (words){0} + (bits == 4 ? 15u : 255u);
    codes &= mask;
    if (!levels) return __builtin_convertvector((ints)codes, floats);
#if defined(__AVX2__)
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

// Some rows of x, and the sums of their groups of columns.
typedef struct {
    const float *x;     // [rows, k]
    const float *sums;  // [rows, k / group]; null if nothing is added to levels
    int64_t rows;
} Input;

typedef struct {
    floats scale, minimum;
} Group;

INLINE Group group_of(const Weight *w, int64_t place) {
    Group found = {widened(w->scales + place), splat(0.0f)};
    if (w->minimums) found.minimum = widened(w->minimums + place);
    found.minimum = fused(splat(-w->zero), found.scale, found.minimum);
    return found;
}

// A total, and what a group of columns adds to it: its product without scale, and the sum of x there.
INLINE floats with_group(floats total, floats part, Group group, const float *sum) {
    total = fused(part, group.scale, total);
    return sum ? fused(group.minimum, splat(*sum), total) : total;
}

// totals [rows, PANEL], of at most MAX_DIRECT rows.
INLINE void few_rows(const Weight *w, int64_t panel, const Input *in, int rows, float *totals,
                     int bits, const float *levels) {
    int per_word = 32 / bits;
    int64_t groups = w->k / w->group;
    const uint32_t *codes = w->codes + panel * (w->k / per_word) * PANEL;
    memset(totals, 0, sizeof(float) * rows * PANEL);
    for (int64_t first = 0; first < w->k;) {
        floats part[MAX_DIRECT][OCTETS];
        for (int row = 0; row < rows; row++)
            for (int octet = 0; octet < OCTETS; octet++) part[row][octet] = splat(0.0f);
        int64_t g = first / w->group, end = first + w->group;
        for (; first < end; first += per_word) {
            __builtin_prefetch(codes + AHEAD);
            __builtin_prefetch(codes + AHEAD + PANEL / 2);
            for (int octet = 0; octet < OCTETS; octet++) {
                words word;
                memcpy(&word, codes, sizeof word);
                codes += LANES;
                for (int place = 0; place < per_word; place++) {
                    floats level = values_of(word >> (bits * place), bits, levels);
                    for (int row = 0; row < rows; row++)
                        part[row][octet] = fused(
                            level, splat(in->x[row * w->k + first + place]), part[row][octet]);
                }
            }
        }
        for (int octet = 0; octet < OCTETS; octet++) {
            Group group = group_of(w, (panel * groups + g) * PANEL + octet * LANES);
            for (int row = 0; row < rows; row++) {
                float *total = totals + row * PANEL + octet * LANES;
                const float *sum = in->sums ? in->sums + row * groups + g : 0;
                store(total, with_group(load(total), part[row][octet], group, sum));
            }
        }
    }
}

// Levels of columns [first, first + count) of a panel -> tile [count, PANEL].
INLINE void fill(const Weight *w, int64_t panel, int64_t first, int64_t count, float *tile, int bits,
                 const float *levels) {
    int per_word = 32 / bits;
    const uint32_t *codes = w->codes + (panel * w->k + first) / per_word * PANEL;
    for (int64_t column = 0; column < count; column += per_word)
        for (int octet = 0; octet < OCTETS; octet++) {
            words word;
            memcpy(&word, codes, sizeof word);
            codes += LANES;
            for (int place = 0; place < per_word; place++)
                store(tile + (column + place) * PANEL + octet * LANES,
                      values_of(word >> (bits * place), bits, levels));
        }
}

// A tile of levels, columns of one group.
typedef struct {
    const float *levels;  // [count, PANEL]
    int64_t first, count, number;  // of its columns, and of their group
    int begins, ends;              // its group
    Group groups[OCTETS];          // where it ends
} Tile;

// Products of rows of x with half of a tile, from `half` on. They begin at 0 with a group, wait in
// parts [rows, PANEL], and are added to totals [rows, PANEL] when the group ends.
INLINE void add_product(const Weight *w, const Tile *tile, int64_t half, const Input *in, int64_t row,
                        int rows, float *parts, float *totals) {
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
            float *total = totals + i * PANEL + side * LANES;
            const float *sum = in->sums ? in->sums + (row + i) * groups + tile->number : 0;
            store(total, with_group(load(total), part[i][side], group, sum));
        }
    }
}

INLINE void add_products(const Weight *w, const Tile *tile, const Input *in, float *parts,
                         float *totals) {
    for (int64_t half = 0; half < PANEL; half += 2 * LANES) {
        int64_t row = 0;
        for (; row + 6 <= in->rows; row += 6)
            add_product(w, tile, half, in, row, 6, parts, totals);
        switch (in->rows - row) {
        case 1: add_product(w, tile, half, in, row, 1, parts, totals); break;
        case 2: add_product(w, tile, half, in, row, 2, parts, totals); break;
        case 3: add_product(w, tile, half, in, row, 3, parts, totals); break;
        case 4: add_product(w, tile, half, in, row, 4, parts, totals); break;
        case 5: add_product(w, tile, half, in, row, 5, parts, totals); break;
        }
    }
}

// totals [rows, PANEL], of at most BLOCK_ROWS rows.
INLINE void many_rows(const Weight *w, int64_t panel, const Input *in, float *totals, int bits,
                      const float *levels) {
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
            for (int octet = 0; octet < OCTETS; octet++)
                tile.groups[octet] = group_of(w, (panel * groups + g) * PANEL + octet * LANES);
        add_products(w, &tile, in, parts, totals);
        first += count;
    }
}

INLINE void panel_product(const Weight *w, int64_t panel, const Input *in, float *totals, int bits,
                          const float *levels) {
    switch (in->rows) {
    case 1: few_rows(w, panel, in, 1, totals, bits, levels); break;
    case 2: few_rows(w, panel, in, 2, totals, bits, levels); break;
    case 3: few_rows(w, panel, in, 3, totals, bits, levels); break;
    default: many_rows(w, panel, in, totals, bits, levels);
    }
}

static void product(const Weight *w, int64_t panel, const Input *in, float *totals) {
    if (w->levels) panel_product(w, panel, in, totals, 4, w->levels);
    else if (w->bits == 4) panel_product(w, panel, in, totals, 4, 0);
    else panel_product(w, panel, in, totals, 8, 0);
}

typedef struct {
    const Weight *weight;
    Input input;
    const float *bias;  // may be null
    float *out;
    int64_t stride;  // of out, floats from one row to the next
    int64_t panels;  // of a task
} Product;

static void panels_of_product(const void *context, int64_t index) {
    const Product *p = context;
    const Weight *w = p->weight;
    float totals[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t all = (w->n + PANEL - 1) / PANEL, last = (index + 1) * p->panels;
    int64_t rows = p->input.rows, groups = w->k / w->group;
    for (int64_t panel = index * p->panels; panel < last && panel < all; panel++) {
        int64_t begin = panel * PANEL, width = w->n - begin < PANEL ? w->n - begin : PANEL;
        const float *factors = w->factors + begin;
        for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
            Input block = {p->input.x + first * w->k, 0, rows - first};
            if (p->input.sums) block.sums = p->input.sums + first * groups;
            if (block.rows > BLOCK_ROWS) block.rows = BLOCK_ROWS;
            product(w, panel, &block, totals);
            for (int64_t row = 0; row < block.rows; row++) {
                float *to = p->out + (first + row) * p->stride + begin;
                const float *from = totals + row * PANEL;
                for (int64_t i = 0; i < width; i++)
                    to[i] = from[i] * factors[i] + (p->bias ? p->bias[begin + i] : 0.0f);
            }
        }
    }
}

static void sum_groups(const Weight *w, const float *x, int64_t rows, float *sums) {
    for (int64_t at = 0; at < rows * w->k / w->group; at++) {
        floats total = splat(0.0f);
        for (int64_t i = 0; i < w->group; i += LANES) total += load(x + at * w->group + i);
        sums[at] = sum_of(total);
    }
}

// out [rows, stride] = x [rows, k] @ weight.T + bias. Returns whether there was memory for it.
int grouped_linear(const Weight *weight, const float *x, int64_t rows, const float *bias, float *out,
                   int64_t stride, int64_t threads) {
    int64_t all = (weight->n + PANEL - 1) / PANEL, tasks = TASKS_PER_THREAD * threads;
    int64_t panels = (all + tasks - 1) / tasks, num_sums = rows * weight->k / weight->group;
    float few[MAX_STACK], *sums = 0;
    if (weight->minimums || weight->zero != 0.0f) {
        sums = num_sums <= MAX_STACK ? few : malloc(sizeof(float) * num_sums);
        if (!sums) return 0;
        sum_groups(weight, x, rows, sums);
    }
    Product whole = {weight, {x, sums, rows}, bias, out, stride, panels};
    pool_run(panels_of_product, &whole, (all + panels - 1) / panels, threads);
    if (sums != few) free(sums);
    return 1;
}

// Rows of the weight, dequantised: out [count, k].
void grouped_rows(const Weight *w, const int64_t *rows, int64_t count, float *out) {
    int per_word = 32 / (int)w->bits;
    uint32_t mask = w->bits == 4 ? 15 : 255;
    int64_t groups = w->k / w->group;
    for (int64_t i = 0; i < count; i++) {
        int64_t panel = rows[i] / PANEL, lane = rows[i] % PANEL, within = lane % LANES;
        const uint32_t *codes = w->codes + panel * (w->k / per_word) * PANEL + lane;
        float *to = out + i * w->k, factor = w->factors[rows[i]];
        for (int64_t g = 0; g < groups; g++) {
            Group group = group_of(w, (panel * groups + g) * PANEL + lane - within);
            float scale = group.scale[within], minimum = group.minimum[within];
            for (int64_t column = g * w->group; column < (g + 1) * w->group; column++) {
                uint32_t word = codes[column / per_word * PANEL];
                uint32_t code = word >> (w->bits * (column % per_word)) & mask;
                float value = w->levels ? w->levels[code] : (float)code;
                to[column] = (value * scale + minimum) * factor;
            }
        }
    }
}
