// Attention of queries over the blocks of their sequences, in float32: one pass over the keys with
// a running maximum (arXiv:2205.14135, its online softmax), LANES keys at a time.
//
// The queries of a task share its keys, which are read once for all of them, and converted if they
// have 8 bits. Each has its own sums, in one order: its result does not depend on the others. With
// vectors of 512 bits the order, and so some texts, would differ between CPUs.

#include <math.h>

#include "kv_bytes.h"
#include "pool.h"
#include "vectors.h"

enum {
    MAX_GROUP = 16,
    MAX_DIM = 256,
    MAX_ROWS = 4,  // of a run, MAX_RUN in Python
    MAX_QUERIES = MAX_ROWS * MAX_GROUP,
    SCORED = 4,       // keys whose scores are computed together
    CACHE_LINE = 16,  // floats
    AHEAD = 16,       // keys that are fetched before their turn
    COLUMNS = 4,      // vectors of a query's sums that stay in registers
};

typedef struct {
    const float *q, *k_cache, *v_cache;  // caches of floats, or of 8 bits
    float* out;
    int64_t q_stride;         // floats from one row of q to the next
    const int64_t* rows;      // of q and out
    const int64_t* owners;    // the sequence of each row
    const int64_t* tables;    // [sequences, table_width], its blocks
    const int64_t* seq_lens;  // keys of each row
    const int64_t* runs;      // the first row of each run, and their end
    int64_t table_width, block_size, heads, kv_heads, dim, window;
    int64_t cached;        // type of the caches
    int64_t block_stride;  // of caches of 8 bits: bytes from one block to the next
    float scale;
} Attention;

// The queries of a run's rows that share a key head, row by row.
typedef struct {
    int64_t group, count, dim;
    const float* queries[MAX_QUERIES];
    float most[MAX_QUERIES];  // of the scores so far
    float norm[MAX_QUERIES];  // sum of their weights
    float kept[MAX_QUERIES];  // what former sums are multiplied by
    floats weights[MAX_QUERIES];
    float sums[MAX_QUERIES * MAX_DIM] __attribute__((aligned(64)));  // [count, dim]
} Queries;

// The larger of each lane and the one `by` further.
INLINE floats larger_of_lanes(floats values, int by) {
    ints others;
    for (int lane = 0; lane < LANES; lane++) others[lane] = (lane + by) % LANES;
    return larger(shuffled(values, values, others), values);
}

INLINE float largest_of(floats values) {
    values = larger_of_lanes(values, 4);
    values = larger_of_lanes(values, 2);
    return larger_of_lanes(values, 1)[0];
}

// In each lane the sum of two lanes, `by` apart: of `second` where the bit `by` of the lane's
// number is set, else of `first`.
INLINE floats merged(floats first, floats second, int by) {
    ints lower, upper;
    for (int lane = 0; lane < LANES; lane++) {
        lower[lane] = lane & by ? LANES + lane - by : lane;
        upper[lane] = lane & by ? LANES + lane : lane + by;
    }
    return shuffled(first, second, lower) + shuffled(first, second, upper);
}

// The sum of each of LANES vectors, in the lane of its number; its bits are those of sum_of.
INLINE floats sums_of(floats* vectors) {
    for (int i = 0; i < 4; i++) vectors[i] = merged(vectors[i], vectors[i + 4], 4);
    for (int i = 0; i < 2; i++) vectors[i] = merged(vectors[i], vectors[i + 2], 2);
    return merged(vectors[0], vectors[1], 1);
}

// Products of a query with `count` keys, `step` apart.
INLINE void multiply(const float* query, const float* keys, int64_t step, int64_t dim, int count,
                     floats* products) {
    floats sums[SCORED];
    for (int i = 0; i < count; i++) sums[i] = splat(0.0f);
    for (int64_t column = 0; column < dim; column += LANES) {
        floats factor = load(query + column);
        for (int i = 0; i < count; i++)
            sums[i] = fused(factor, load(keys + i * step + column), sums[i]);
    }
    for (int i = 0; i < count; i++) products[i] = sums[i];
}

// Scores of `count` keys, `step` apart, in as many lanes.
static floats score(const float* query, const float* keys, int64_t count, int64_t step,
                    int64_t dim) {
    floats products[LANES];
    int64_t key = 0;
    for (; key + SCORED <= count; key += SCORED)
        multiply(query, keys + key * step, step, dim, SCORED, products + key);
    for (; key < count; key++) multiply(query, keys + key * step, step, dim, 1, products + key);
    for (; key < LANES; key++) products[key] = splat(0.0f);
    return sums_of(products);
}

// Weights of keys, `step` apart, so many for each row, for the queries from `first` on, and what is
// kept of their sums.
static void weigh(Queries* all, int64_t first, const float* keys, const int64_t* counts,
                  int64_t step, float scale) {
    floats scores[MAX_QUERIES], lanes;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = (float)lane;
    for (int64_t at = first; at < all->count; at++) {
        int64_t count = counts[at / all->group];
        ints is_key = lanes < (float)count;
        floats found = score(all->queries[at], keys, count, step, all->dim) * scale;
        floats hidden = (floats)((ints)splat(-INFINITY) & ~is_key);
        scores[at] = (floats)((ints)found & is_key) + hidden;
        float former = all->most[at], largest = largest_of(scores[at]);
        all->most[at] = largest > former ? largest : former;
        all->kept[at] = former - all->most[at];
    }
    for (int64_t i = first / LANES * LANES; i < all->count; i += LANES)
        store(all->kept + i, exponential(load(all->kept + i)));
    for (int64_t at = first; at < all->count; at++) {
        floats weights = all->weights[at] = exponential(scores[at] - all->most[at]);
        all->norm[at] = all->norm[at] * all->kept[at] + sum_of(weights);
    }
}

// Add values [count, dim], `step` apart, to a query's sums.
static void add_values(Queries* all, int64_t at, const float* values, int64_t count, int64_t step) {
    float weights[LANES] __attribute__((aligned(64)));
    store(weights, all->weights[at]);
    float *sums = all->sums + at * all->dim, kept = all->kept[at];
    int64_t column = 0;
    for (; column + COLUMNS * LANES <= all->dim; column += COLUMNS * LANES) {
        floats totals[COLUMNS];
        for (int i = 0; i < COLUMNS; i++) totals[i] = load(sums + column + i * LANES) * kept;
        for (int64_t key = 0; key < count; key++)
            for (int i = 0; i < COLUMNS; i++)
                totals[i] = fused(load(values + key * step + column + i * LANES),
                                  splat(weights[key]), totals[i]);
        for (int i = 0; i < COLUMNS; i++) store(sums + column + i * LANES, totals[i]);
    }
    for (; column < all->dim; column += LANES) {
        floats total = load(sums + column) * kept;
        for (int64_t key = 0; key < count; key++)
            total = fused(load(values + key * step + column), splat(weights[key]), total);
        store(sums + column, total);
    }
}

// Fetch rows of a head, `step` apart.
INLINE void prefetch(const float* rows, int64_t step, int64_t dim) {
    for (int64_t row = 0; row < LANES; row++)
        for (int64_t column = 0; column < dim; column += CACHE_LINE)
            __builtin_prefetch(rows + row * step + column);
}

// The floats [count, dim] of a head's keys, or values, from a slot on, in a block of 8 bits.
static void dequantize(const Attention* a, const float* cache, int64_t slot, int64_t head,
                       int64_t count, float* to) {
    Bytes all = {(uint8_t*)cache, a->block_stride, a->block_size, a->kv_heads, a->dim, a->cached};
    int64_t block = slot / a->block_size, offset = slot % a->block_size;
    for (int64_t key = 0; key < count; key++, to += a->dim) {
        const uint8_t* bytes = bytes_of(&all, block, offset + key, head);
        float scale = float_of_half(*scale_of(&all, block, offset + key, head));
        for (int64_t column = 0; column < a->dim; column += LANES)
            store(to + column, numbers_of(bytes + column, (Cached)a->cached) * scale);
    }
}

// The queries of a run of rows of one sequence, each with a key more than the one before, that
// share a key head.
static void attend_run(const void* context, int64_t index) {
    const Attention* a = context;
    int64_t run = index / a->kv_heads, kv_head = index % a->kv_heads;
    int64_t begin = a->runs[run], rows = a->runs[run + 1] - begin;
    int64_t group = a->heads / a->kv_heads, dim = a->dim, step = a->kv_heads * dim;
    const int64_t* table = a->tables + a->owners[begin] * a->table_width;
    const int64_t* seq_lens = a->seq_lens + begin;
    float decoded[2][LANES * MAX_DIM] __attribute__((aligned(64)));  // of 8 bits
    Queries all;
    all.group = group, all.count = rows * group, all.dim = dim;
    for (int64_t at = 0; at < all.count; at++) {
        int64_t head = kv_head * group + at % group;
        all.queries[at] = a->q + a->rows[begin + at / group] * a->q_stride + head * dim;
        all.most[at] = -INFINITY, all.norm[at] = 0.0f;
    }
    for (int64_t at = 0; at < MAX_QUERIES; at++) all.kept[at] = 0.0f;
    memset(all.sums, 0, sizeof(float) * all.count * all.dim);
    int64_t end = seq_lens[rows - 1];
    // With a window, a run is one row.
    int64_t first = a->window && end > a->window ? end - a->window : 0;
    while (first < end) {
        int64_t offset = first % a->block_size, count = a->block_size - offset;
        if (count > end - first) count = end - first;
        if (count > LANES) count = LANES;
        int64_t slot = table[first / a->block_size] * a->block_size + offset, seen = 0;
        int64_t counts[MAX_ROWS];  // keys of each row
        for (int64_t row = 0; row < rows; row++) {
            int64_t own = seq_lens[row] - first;
            counts[row] = own < count ? own : count;
            if (own <= 0) seen = row + 1;
        }
        const float *keys = a->k_cache + slot * step + kv_head * dim,
                    *values = a->v_cache + slot * step + kv_head * dim;
        int64_t apart = step, later = first + AHEAD;
        if (a->cached != FLOATS) {
            dequantize(a, a->k_cache, slot, kv_head, count, decoded[0]);
            dequantize(a, a->v_cache, slot, kv_head, count, decoded[1]);
            keys = decoded[0], values = decoded[1], apart = dim;
        } else if (later < end) {
            slot = table[later / a->block_size] * a->block_size + later % a->block_size;
            prefetch(a->k_cache + slot * step + kv_head * dim, step, dim);
            prefetch(a->v_cache + slot * step + kv_head * dim, step, dim);
        }
        weigh(&all, seen * group, keys, counts, apart, a->scale);
        for (int64_t at = seen * group; at < all.count; at++)
            add_values(&all, at, values, counts[at / group], apart);
        first += count;
    }
    for (int64_t at = 0; at < all.count; at++) {
        int64_t head = kv_head * group + at % group;
        float* out = a->out + (a->rows[begin + at / group] * a->heads + head) * dim;
        for (int64_t i = 0; i < dim; i++) out[i] = all.sums[at * all.dim + i] / all.norm[at];
    }
}

// Attention of runs of single queries over the blocks of their sequences.
void attend_rows(const Attention* attention, int64_t runs, int64_t threads) {
    pool_run(attend_run, attention, runs * attention->kv_heads, threads);
}
