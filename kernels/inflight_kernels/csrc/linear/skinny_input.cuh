// x of a linear layer for few tokens, and its quantisation by the block that multiplies it. sm_90a
// only.
#pragma once

#include "linear/skinny_gemm.cuh"

// x of a product: a map of it, and of 8-bit values the scale of each row; or, to be quantised by
// each block, rows of 16 bits, up to MAX_QUANTIZED of them, `stride` values apart.
template <typename T>
struct Input {
    const TensorMap* map;
    const float* scales;
    const T* rows;
    int stride;
    const float* norm;  // the norm's weight, if x is their norm, otherwise null
    float eps;          // of the norm
    // Rows that are added before the norm, k values apart, and where the first block writes the sums,
    // in other memory; only if they are summed.
    const float* residual;
    float* total;
};

constexpr int MAX_QUANTIZED = ATOM;

// Steps of which a block multiplies x, of any type of 8 bits.
template <bool PAIR>
__device__ int quantized_steps(int k) {
    const int steps = (k + STAGE_DEPTH<Fp8> - 1) / STAGE_DEPTH<Fp8>;
    return PAIR ? (steps + 1) / 2 : steps;
}

// Barrier of the consumers and the helpers.
__device__ inline void sync_quantizers() {
    asm volatile("bar.sync 2, %0;" ::"n"((WARPS + HELPERS) * 32) : "memory");
}

// Quantise columns of x's rows -> `to`, an atom for each stage; the norm and the scale of a row
// take all of its columns. Called by the consumers and the helpers, numbered by `thread`; `partial`
// has a value for each of their warps and row. AT_ONCE vectors of each thread are read at once.
// Returns the scale of the row `token`, if there is one. OF_SUMS: x is the norm of a sum. Rows are
// spread by spread_bits (see spread_columns): then all lanes of a warp do as many rounds as its
// first one.
template <int AT_ONCE, bool OF_SUMS, bool SPREADS, typename T, typename Value>
__device__ float quantize_input(const Input<T>& x, Value* to, float2* partial, int m, int k,
                                int first_step, int last_step, int thread, int token,
                                int spread_bits) {
    constexpr int N = VECTOR<T>, ALL = WARPS + HELPERS, THREADS = ALL * 32;
    constexpr int DEPTH = STAGE_DEPTH<Value>;
    const int lane = thread % 32, warp = thread / 32;
    bool writes = OF_SUMS && blockIdx.x == 0;
    const auto load = [&](const uint4& raw, int t, int column, float(&a)[N], float& squares) {
        unpack<T>(raw, a);
        if constexpr (OF_SUMS) {
            const int place = t * k + column;
            float more[N];
            load_floats(x.residual + place, more);
#pragma unroll
            for (int j = 0; j < N; j++) a[j] += more[j];
#pragma unroll
            for (int j = 0; writes && j < N; j += 4)
                store_vector(x.total + place + j,
                             pack<float>(*reinterpret_cast<float(*)[4]>(a + j)));
        }
        if (!OF_SUMS && !x.norm) return;
        float w[N];
        load_floats(x.norm + column, w);
#pragma unroll
        for (int j = 0; j < N; j++) {
            squares += a[j] * a[j];
            a[j] *= w[j];
        }
    };
    for (int t = 0; t < m; t++) {
        const T* const row = x.rows + t * x.stride;
        float squares = 0.0f;
        unsigned largest = 0;
        for (int from = thread * N; (SPREADS ? from - lane * N : from) < k;
             from += AT_ONCE * THREADS * N) {
            uint4 raw[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int column = from + i * THREADS * N;
                raw[i] = column < k ? load_vector(row + column) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int column = from + i * THREADS * N;
                if (OF_SUMS && !SPREADS && column >= k) continue;
                float a[N] = {};
                if (!(OF_SUMS && SPREADS) || column < k)
                    load(raw[i], t, min(column, k - N), a, squares);
                if constexpr (SPREADS) spread_columns(a, spread_bits);
#pragma unroll
                for (int j = 0; j < N; j++) largest = max(largest, magnitude(a[j]));
            }
        }
        squares = warp_sum(squares);
        largest = __reduce_max_sync(FULL_WARP, largest);
        if (lane == 0)
            partial[t * ALL + warp] = make_float2(squares, __uint_as_float(largest));
    }
    sync_quantizers();
    writes = false;

    float found = 0.0f;
    for (int t = 0; t < m; t++) {
        float squares = 0.0f;
        unsigned largest = 0;
#pragma unroll
        for (int w = 0; w < ALL; w++) {
            squares += partial[t * ALL + w].x;
            largest = max(largest, __float_as_uint(partial[t * ALL + w].y));
        }
        const RowScale<Value> scale(largest);
        if (t == token)
            found = x.norm ? scale.scale * rsqrtf(squares / k + x.eps) : scale.scale;
        const T* const row = x.rows + t * x.stride;
        constexpr int CHUNKS = DEPTH / 16;  // of 16 bytes, swizzled in an atom's row
        for (int i = thread; (SPREADS ? i - lane : i) < (last_step - first_step) * CHUNKS;
             i += THREADS) {
            const int step = i / CHUNKS, chunk = i % CHUNKS;
            const int column = (first_step + step) * DEPTH + chunk * 16;
            const bool inside = column < k && (!SPREADS || first_step + step < last_step);
            unsigned words[4] = {};
            float a[2 * N], unused = 0.0f;
            if (inside) {
#pragma unroll
                for (int half = 0; half < 2; half++)
                    load(load_vector(row + column + half * N), t, column + half * N,
                         *reinterpret_cast<float(*)[N]>(a + half * N), unused);
            } else if (SPREADS) {
#pragma unroll
                for (int j = 0; j < 2 * N; j++) a[j] = 0.0f;
            }
            if constexpr (SPREADS) spread_columns(a, spread_bits);
            if (inside) {
#pragma unroll
                for (int j = 0; j < 2 * N; j++) a[j] *= scale.inverse;
#pragma unroll
                for (int j = 0; j < 4; j++) words[j] = Value::encode(a + 4 * j);
            }
            if (SPREADS && first_step + step >= last_step) continue;
            store_vector(to + step * MAX_QUANTIZED * DEPTH + t * DEPTH + (chunk ^ t) * 16,
                         make_uint4(words[0], words[1], words[2], words[3]));
        }
    }
    fence_async_proxy();
    sync_quantizers();
    return found;
}
