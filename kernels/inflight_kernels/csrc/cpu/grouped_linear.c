// Products with weight-only matrices of 4 or 8 bits on a CPU, and rows of them.
//
// A weight [n, k] is level(code) * scale + minimum, with a scale and a minimum for each group of
// columns of a row, times a factor of the row. It is dequantised in registers, or a tile of it in the
// first-level cache where many rows of x share it: the product is that of float32 values.
//
// Every output is one sum over k in order, whatever the number of rows of x and of threads, so a row's
// result does not depend on the others.
//
// Memory: panels of 32 rows, the last one padded with zeros. Of a panel, a word has 8 codes of 4 bits
// or 4 of 8 bits: consecutive columns of one row, lowest bits first. Words [k / codes in a word][32];
// scales and minimums [k / group][32] in float16.

#include "pool.h"
#include "vectors.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum {
    OCTETS = 4,
    PANEL = LANES * OCTETS,
    TILE_COLUMNS = 64,  // of a dequantised tile: 8 KB
    BLOCK_ROWS = 96,    // of x, whose sums for a panel take 12 KB
    MAX_DIRECT = 3,     // rows of x for which a weight is dequantised in registers
    TASKS_PER_THREAD = 4,
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

typedef struct {
    floats scale, minimum;
} Group;

INLINE Group group_of(const Weight *w, int64_t place, int has_minimums) {
    Group found;
    found.scale = widened(w->scales + place);
    found.minimum = has_minimums ? widened(w->minimums + place) : splat(0.0f);
    found.minimum -= w->zero * found.scale;
    return found;
}

// out [rows, n] for a panel, of at most MAX_DIRECT rows x [rows, k].
INLINE void few_rows(const Weight *w, int64_t panel, const float *x, float *sums, int rows,
                     int bits, int has_minimums, const float *levels) {
    int per_word = 32 / bits;
    const uint32_t *codes = w->codes + panel * (w->k / per_word) * PANEL;
    floats total[MAX_DIRECT][OCTETS];
    for (int row = 0; row < rows; row++)
        for (int octet = 0; octet < OCTETS; octet++) total[row][octet] = splat(0.0f);
    int64_t groups = w->k / w->group;
    for (int64_t g = 0; g < groups; g++) {
        Group group[OCTETS];
        for (int octet = 0; octet < OCTETS; octet++)
            group[octet] = group_of(w, (panel * groups + g) * PANEL + octet * LANES, has_minimums);
        for (int64_t first = g * w->group; first < (g + 1) * w->group; first += per_word) {
            for (int octet = 0; octet < OCTETS; octet++) {
                words word;
                memcpy(&word, codes, sizeof word);
                codes += LANES;
                for (int place = 0; place < per_word; place++) {
                    floats weight = values_of(word >> (bits * place), bits, levels);
                    weight = weight * group[octet].scale + group[octet].minimum;
                    for (int row = 0; row < rows; row++)
                        total[row][octet] += weight * x[row * w->k + first + place];
                }
            }
        }
    }
    for (int row = 0; row < rows; row++)
        for (int octet = 0; octet < OCTETS; octet++)
            store(sums + row * PANEL + octet * LANES, total[row][octet]);
}

// Columns [first, first + count) of a panel -> tile [count, PANEL].
INLINE void dequantise(const Weight *w, int64_t panel, int64_t first, int64_t count, float *tile,
                       int bits, int has_minimums, const float *levels) {
    int per_word = 32 / bits;
    const uint32_t *codes = w->codes + (panel * w->k + first) / per_word * PANEL;
    int64_t groups = w->k / w->group;
    for (int64_t done = 0; done < count;) {
        int64_t column = first + done, g = column / w->group;
        int64_t left = (g + 1) * w->group - column;
        int64_t end = done + (left < count - done ? left : count - done);
        Group group[OCTETS];
        for (int octet = 0; octet < OCTETS; octet++)
            group[octet] = group_of(w, (panel * groups + g) * PANEL + octet * LANES, has_minimums);
        for (; done < end; done += per_word) {
            for (int octet = 0; octet < OCTETS; octet++) {
                words word;
                memcpy(&word, codes, sizeof word);
                codes += LANES;
                for (int place = 0; place < per_word; place++) {
                    floats weight = values_of(word >> (bits * place), bits, levels);
                    weight = weight * group[octet].scale + group[octet].minimum;
                    store(tile + (done + place) * PANEL + octet * LANES, weight);
                }
            }
        }
    }
}

// sums [rows, PANEL] += x [rows, count] times a tile, for half of the panel.
INLINE void add_product(const float *x, int64_t k, const float *tile, int64_t count, float *sums,
                        int rows) {
    floats total[6][2];
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < 2; part++) total[row][part] = load(sums + row * PANEL + part * LANES);
    for (int64_t column = 0; column < count; column++) {
        floats left = load(tile + column * PANEL), right = load(tile + column * PANEL + LANES);
        for (int row = 0; row < rows; row++) {
            float factor = x[row * k + column];
            total[row][0] += left * factor;
            total[row][1] += right * factor;
        }
    }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < 2; part++) store(sums + row * PANEL + part * LANES, total[row][part]);
}

INLINE void many_rows(const Weight *w, int64_t panel, const float *x, int64_t rows, float *sums,
                      int bits, int has_minimums, const float *levels) {
    float tile[TILE_COLUMNS * PANEL] __attribute__((aligned(64)));
    memset(sums, 0, sizeof(float) * rows * PANEL);
    for (int64_t first = 0; first < w->k; first += TILE_COLUMNS) {
        int64_t count = w->k - first < TILE_COLUMNS ? w->k - first : TILE_COLUMNS;
        dequantise(w, panel, first, count, tile, bits, has_minimums, levels);
        for (int half = 0; half < PANEL; half += 2 * LANES) {
            int64_t row = 0;
            for (; row + 6 <= rows; row += 6)
                add_product(x + row * w->k + first, w->k, tile + half, count,
                            sums + row * PANEL + half, 6);
            const float *from = x + row * w->k + first;
            float *to = sums + row * PANEL + half;
            switch (rows - row) {
            case 1: add_product(from, w->k, tile + half, count, to, 1); break;
            case 2: add_product(from, w->k, tile + half, count, to, 2); break;
            case 3: add_product(from, w->k, tile + half, count, to, 3); break;
            case 4: add_product(from, w->k, tile + half, count, to, 4); break;
            case 5: add_product(from, w->k, tile + half, count, to, 5); break;
            }
        }
    }
}

INLINE void panel_product(const Weight *w, int64_t panel, const float *x, int64_t rows, float *sums,
                          int bits, int has_minimums, const float *levels) {
    switch (rows) {
    case 1: few_rows(w, panel, x, sums, 1, bits, has_minimums, levels); break;
    case 2: few_rows(w, panel, x, sums, 2, bits, has_minimums, levels); break;
    case 3: few_rows(w, panel, x, sums, 3, bits, has_minimums, levels); break;
    default: many_rows(w, panel, x, rows, sums, bits, has_minimums, levels);
    }
}

static void product(const Weight *w, int64_t panel, const float *x, int64_t rows, float *sums) {
    int has_minimums = w->minimums != 0;
    if (w->levels) {
        panel_product(w, panel, x, rows, sums, 4, has_minimums, w->levels);
    } else if (w->bits == 4) {
        if (has_minimums) panel_product(w, panel, x, rows, sums, 4, 1, 0);
        else panel_product(w, panel, x, rows, sums, 4, 0, 0);
    } else {
        panel_product(w, panel, x, rows, sums, 8, has_minimums, 0);
    }
}

typedef struct {
    const Weight *weight;
    const float *x, *bias;  // bias may be null
    float *out;
    int64_t rows, stride;  // of out, floats from one row to the next
    int64_t panels;        // of a task
} Product;

static void panels_of_product(const void *context, int64_t index) {
    const Product *p = context;
    const Weight *w = p->weight;
    float sums[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t all = (w->n + PANEL - 1) / PANEL, last = (index + 1) * p->panels;
    for (int64_t panel = index * p->panels; panel < last && panel < all; panel++) {
        int64_t begin = panel * PANEL, width = w->n - begin < PANEL ? w->n - begin : PANEL;
        for (int64_t first = 0; first < p->rows; first += BLOCK_ROWS) {
            int64_t count = p->rows - first < BLOCK_ROWS ? p->rows - first : BLOCK_ROWS;
            product(w, panel, p->x + first * w->k, count, sums);
            for (int64_t row = 0; row < count; row++) {
                float *to = p->out + (first + row) * p->stride + begin;
                const float *factors = w->factors + begin, *from = sums + row * PANEL;
                for (int64_t i = 0; i < width; i++)
                    to[i] = from[i] * factors[i] + (p->bias ? p->bias[begin + i] : 0.0f);
            }
        }
    }
}

// out [rows, stride] = x [rows, k] @ weight.T + bias
void grouped_linear(const Weight *weight, const float *x, int64_t rows, const float *bias, float *out,
                    int64_t stride, int64_t threads) {
    int64_t all = (weight->n + PANEL - 1) / PANEL, tasks = TASKS_PER_THREAD * threads;
    int64_t panels = (all + tasks - 1) / tasks;
    Product whole = {weight, x, bias, out, rows, stride, panels};
    pool_run(panels_of_product, &whole, (all + panels - 1) / panels, threads);
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
            Group group = group_of(w, (panel * groups + g) * PANEL + lane - within, w->minimums != 0);
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
