// Linear layers and embeddings with weight-only matrices on a CPU; see grouped.h.

#include <math.h>
#include <stdlib.h>

#include "grouped.h"
#include "pool.h"

enum { TASKS_PER_THREAD = 4 };

typedef struct {
    const Weight* weight;
    int is_rounded;
    FloatRows floats;
    RoundedRows rounded;
    const float* bias;  // may be null
    float* out;
    int64_t stride;  // of out, floats from one row to the next
    int64_t panels;  // of a task
} Product;

// Rows [first, first + count) of the input.
static void rows_of_product(const Product* p, int64_t panel, int64_t first, int64_t count,
                            float* totals) {
    const Weight* w = p->weight;
    int64_t groups = w->k / w->group;
    if (p->is_rounded) {
        RoundedRows in = rounded_from(w, &p->rounded, first, count);
        rounded_product(w, panel, &in, totals);
    } else {
        const float* sums = p->floats.sums ? p->floats.sums + first * groups : 0;
        FloatRows in = {p->floats.x + first * w->k, sums, count};
        float_product(w, panel, &in, totals);
    }
}

static void panels_of_product(const void* context, int64_t index) {
    const Product* p = context;
    const Weight* w = p->weight;
    float totals[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t all = (w->n + PANEL - 1) / PANEL, last = (index + 1) * p->panels, rows = p->floats.rows;
    for (int64_t panel = index * p->panels; panel < last && panel < all; panel++) {
        int64_t begin = panel * PANEL, width = w->n - begin < PANEL ? w->n - begin : PANEL;
        const float* factors = w->factors + begin;
        for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
            int64_t count = rows - first < BLOCK_ROWS ? rows - first : BLOCK_ROWS;
            rows_of_product(p, panel, first, count, totals);
            for (int64_t row = 0; row < count; row++) {
                float* to = p->out + (first + row) * p->stride + begin;
                const float* from = totals + row * PANEL;
                for (int64_t i = 0; i < width; i++)
                    to[i] = from[i] * factors[i] + (p->bias ? p->bias[begin + i] : 0.0f);
            }
        }
    }
}

static void round_of_product(const void* context, int64_t row) {
    const Product* p = context;
    const Weight* w = p->weight;
    round_row(w, p->floats.x + row * w->k, rounded_from(w, &p->rounded, row, 1));
}

static void sum_groups(const Weight* w, const float* x, int64_t rows, float* sums) {
    for (int64_t at = 0; at < rows * w->k / w->group; at++) {
        floats total = splat(0.0f);
        for (int64_t i = 0; i < w->group; i += LANES) total += load(x + at * w->group + i);
        sums[at] = sum_of(total);
    }
}

// Memory of the calling thread, kept for the next call; null if there is none.
static void* scratch(size_t size) {
    static _Thread_local void* memory;
    static _Thread_local size_t capacity;
    if (size > capacity) {
        free(memory);
        memory = malloc(size);
        capacity = memory ? size : 0;
    }
    return memory;
}

// out [rows, stride] = x [rows, k] @ weight.T + bias. Returns whether there was memory for it.
int grouped_linear(const Weight* w, const float* x, int64_t rows, const float* bias, float* out,
                   int64_t stride, int64_t threads) {
    int64_t groups = w->k / w->group, blocks = w->k / ROUNDED;
    int64_t floats_of_row = groups + blocks, bytes_of_row = 3 * w->k + blocks;
    float* memory = scratch(rows * (sizeof(float) * floats_of_row + bytes_of_row));
    if (!memory) return 0;
    float* sums = w->minimums || w->zero != 0.0f ? memory : 0;
    float* scales = memory + rows * groups;
    int8_t* values = (int8_t*)(scales + rows * blocks);
    int8_t* lower = values + 2 * rows * w->k;  // behind values of 16 bits
    uint8_t* is_fine = (uint8_t*)(lower + rows * w->k);
    int64_t all = (w->n + PANEL - 1) / PANEL, tasks = TASKS_PER_THREAD * threads;
    int64_t panels = (all + tasks - 1) / tasks;
    FloatRows floats = {x, sums, rows};
    RoundedRows rounded = {values, lower, is_fine, scales, sums, rows};
    Product whole = {w, takes_rounded(w), floats, rounded, bias, out, stride, panels};
    if (whole.is_rounded)
        pool_run(round_of_product, &whole, rows, rows * w->k >= 1 << 12 ? threads : 1);
    else if (sums)
        sum_groups(w, x, rows, sums);
    pool_run(panels_of_product, &whole, (all + panels - 1) / panels, threads);
    return 1;
}

// Rows of the weight, dequantised: out [count, k]. A row that there is not is NaN.
void grouped_rows(const Weight* w, const int64_t* rows, int64_t count, float* out) {
    int per_word = 32 / (int)w->bits;
    uint32_t mask = w->bits == 4 ? 15 : 255;
    int64_t groups = w->k / w->group;
    for (int64_t i = 0; i < count; i++) {
        if (rows[i] < 0 || rows[i] >= w->n) {
            for (int64_t column = 0; column < w->k; column++) out[i * w->k + column] = NAN;
            continue;
        }
        int64_t panel = rows[i] / PANEL, lane = rows[i] % PANEL, within = lane % LANES;
        const uint32_t* codes = w->codes + panel * (w->k / per_word) * PANEL + lane;
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
