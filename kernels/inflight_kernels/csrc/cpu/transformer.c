// Transformer operations on float32, for the few rows of a decode step, in which a call of torch
// takes longer than the work. Definitions: torch_ops/transformer.py.

#include <math.h>

#include "pool.h"
#include "vectors.h"

// normed [rows, width] = norm(x + residual) * weight; total = x + residual. residual may be null.
void rms_norm(const float* x, const float* residual, const float* weight, float eps, int64_t rows,
              int64_t width, float* normed, float* total) {
    for (int64_t row = 0; row < rows; row++) {
        const float* from = x + row * width;
        float *sums = total + row * width, *to = normed + row * width;
        if (residual) {
            const float* beside = residual + row * width;
            for (int64_t i = 0; i < width; i++) sums[i] = from[i] + beside[i];
        } else {
            memcpy(sums, from, sizeof(float) * width);
        }
        floats squares[2] = {splat(0.0f), splat(0.0f)};
        int64_t i = 0;
        for (; i + 2 * LANES <= width; i += 2 * LANES)
            for (int part = 0; part < 2; part++) {
                floats values = load(sums + i + part * LANES);
                squares[part] = fused(values, values, squares[part]);
            }
        float square = sum_of(squares[0] + squares[1]);
        for (; i < width; i++) square += sums[i] * sums[i];
        float factor = 1.0f / sqrtf(square / (float)width + eps);
        for (i = 0; i < width; i++) to[i] = sums[i] * factor * weight[i];
    }
}

// Rotate heads [rows, heads, dim], `stride` apart, in place; cos and sin [rows, dim].
void rotate(float* x, int64_t stride, const float* cos, const float* sin, int64_t rows,
            int64_t heads, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cos + row * dim, *s = sin + row * dim;
        for (int64_t head = 0; head < heads; head++) {
            float *first = x + row * stride + head * dim, *second = first + half;
            for (int64_t i = 0; i < half; i++) {
                float low = first[i], high = second[i];
                first[i] = low * c[i] + high * s[i];
                second[i] = high * c[half + i] + low * s[half + i];
            }
        }
    }
}

// Write rows [rows, width], `stride` apart, into slots of a layer's cache [slots, width].
void write_rows(const float* from, int64_t stride, const int64_t* slots, int64_t rows,
                int64_t width, float* cache) {
    for (int64_t row = 0; row < rows; row++)
        memcpy(cache + slots[row] * width, from + row * stride, sizeof(float) * width);
}

// out [rows, width] = silu(gate) * up, of gate | up [rows, 2 * width]
void silu_mul(const float* gate_up, int64_t rows, int64_t width, float* out) {
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * width, *up = gate + width;
        float* to = out + row * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            floats x = load(gate + i);
            store(to + i, x / (1.0f + exponential(-x)) * load(up + i));
        }
        for (; i < width; i++) {
            floats x = splat(gate[i]);
            to[i] = (x / (1.0f + exponential(-x)))[0] * up[i];
        }
    }
}

enum { MAX_GROUP = 16, MAX_DIM = 256 };

typedef struct {
    const float *q, *k_cache, *v_cache;
    float* out;
    int64_t q_stride;         // floats from one row of q to the next
    const int64_t* rows;      // of q and out
    const int64_t* owners;    // the sequence of each row
    const int64_t* tables;    // [sequences, table_width], its blocks
    const int64_t* seq_lens;  // keys of each row
    int64_t table_width, block_size, heads, kv_heads, dim, window;
    float scale;
} Attention;

// One row's query heads that share a key head: one pass over the keys, with a running maximum
// (arXiv:2205.14135, its online softmax), block by block.
static void attend_group(const void* context, int64_t index) {
    const Attention* a = context;
    int64_t place = index / a->kv_heads, kv_head = index % a->kv_heads;
    int64_t group = a->heads / a->kv_heads, dim = a->dim, step = a->kv_heads * dim;
    int64_t row = a->rows[place], seq_len = a->seq_lens[place];
    const int64_t* table = a->tables + a->owners[place] * a->table_width;
    const float* q = a->q + row * a->q_stride + kv_head * group * dim;
    float most[MAX_GROUP], norm[MAX_GROUP];
    float sums[MAX_GROUP * MAX_DIM] __attribute__((aligned(64)));
    for (int64_t head = 0; head < group; head++) most[head] = -INFINITY, norm[head] = 0.0f;
    memset(sums, 0, sizeof(float) * group * dim);
    int64_t first = a->window && seq_len > a->window ? seq_len - a->window : 0;
    while (first < seq_len) {
        int64_t offset = first % a->block_size, count = a->block_size - offset;
        if (count > seq_len - first) count = seq_len - first;
        if (count > LANES) count = LANES;
        int64_t slot = table[first / a->block_size] * a->block_size + offset;
        const float* keys = a->k_cache + slot * step + kv_head * dim;
        const float* values = a->v_cache + slot * step + kv_head * dim;
        for (int64_t head = 0; head < group; head++) {
            const float* query = q + head * dim;
            floats scores = splat(-INFINITY);
            for (int64_t key = 0; key < count; key++) {
                floats products = splat(0.0f);
                for (int64_t i = 0; i < dim; i += LANES)
                    products = fused(load(query + i), load(keys + key * step + i), products);
                scores[key] = sum_of(products) * a->scale;
            }
            float highest = most[head];
            for (int64_t key = 0; key < count; key++)
                if (!(scores[key] <= highest)) highest = scores[key];  // a NaN as well
            floats weights = exponential(scores - highest);
            float kept = exponential(splat(most[head] - highest))[0];
            most[head] = highest;
            norm[head] = norm[head] * kept + sum_of(weights);
            float* sum = sums + head * dim;
            for (int64_t i = 0; i < dim; i += LANES) {
                floats total = load(sum + i) * kept;
                for (int64_t key = 0; key < count; key++)
                    total = fused(load(values + key * step + i), splat(weights[key]), total);
                store(sum + i, total);
            }
        }
        first += count;
    }
    float* out = a->out + row * a->heads * dim + kv_head * group * dim;
    for (int64_t head = 0; head < group; head++)
        for (int64_t i = 0; i < dim; i++) out[head * dim + i] = sums[head * dim + i] / norm[head];
}

// Attention of single queries over the blocks of their sequences.
void attend_rows(const Attention* attention, int64_t rows, int64_t threads) {
    pool_run(attend_group, attention, rows * attention->kv_heads, threads);
}
