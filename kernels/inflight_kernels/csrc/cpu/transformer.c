// Transformer operations on float32, for the few rows of a decode step, in which a call of torch
// takes longer than the work. Definitions: torch_ops/transformer.py.

#include <math.h>

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
