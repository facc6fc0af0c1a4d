// Quantises activations by rows, for products of 8-bit values. Fp8: sm_89 and later.
#include "eight_bit.cuh"

// One block per row of `width` values, which is kept in registers: blockDim.x * VECTORS 16-byte
// vectors of T. Rows of x are `stride` values apart, those of `values` are contiguous. spread_bits:
// see spread_columns.
template <typename Value, typename T, int VECTORS, bool SPREADS = false>
__global__ void __launch_bounds__(512) quantize_rows(const T* x, Value* values, float* scales,
                                                     int width, int stride, int spread_bits) {
    constexpr int N = VECTOR<T>;
    __shared__ unsigned partial[32];
    // The last rows first, as in norm_row.cuh.
    const long long own = gridDim.x - 1 - blockIdx.x;
    const T* const row = x + own * stride;

    pdl_launch_dependents();
#pragma unroll 1
    for (bool real = !rehearses();; real = true) {
        if (real) pdl_wait();
        uint4 raw[VECTORS];
        float spread[SPREADS ? VECTORS : 1][N];  // as they are quantised
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int column = (i * blockDim.x + threadIdx.x) * N;
            if (!SPREADS && column >= width) continue;
            raw[i] = real && column < width ? load_vector(row + column) : make_uint4(0, 0, 0, 0);
            float (&a)[N] = spread[SPREADS ? i : 0];
            unpack<T>(raw[i], a);
            if constexpr (SPREADS) spread_columns(a, spread_bits);
#pragma unroll
            for (int j = 0; j < N; j++) largest = max(largest, magnitude(a[j]));
        }
        const RowScale<Value> scale(block_max(largest, partial));
        if (real && threadIdx.x == 0) scales[own] = scale.scale;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int column = (i * blockDim.x + threadIdx.x) * N;
            if (column >= width) continue;
            float (&a)[N] = spread[SPREADS ? i : 0];
            if (!SPREADS) unpack<T>(raw[i], a);
            if (real) store_bytes<T>(values + own * width + column, scale, a);
        }
        if (real) return;
        __syncthreads();
    }
}

// Gives all parts of a row the largest of their scales: of e4m3, parts of PART columns, with codes
// codes[part * m + row] (eight_bit.cuh). A warp per row; rows are contiguous, `width` and `part`
// multiples of 16, with at most MAX_PARTS of them.
constexpr int MAX_PARTS = 1024;
constexpr int ROWS_AT_ONCE = 8;
__global__ void __launch_bounds__(32 * ROWS_AT_ONCE)
    settle_rows(unsigned char* values, float* scales, const unsigned char* codes, int m, int width,
                int part) {
    __shared__ unsigned char own_codes[ROWS_AT_ONCE][MAX_PARTS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.x * ROWS_AT_ONCE + warp, parts = (width + part - 1) / part;
    pdl_launch_dependents();
    pdl_wait();
    if (row >= m) return;

    unsigned largest = 0, least = BROKEN_CODE;
    for (int i = lane; i < parts; i += 32) {
        const unsigned code = codes[static_cast<long long>(i) * m + row];
        own_codes[warp][i] = code;
        largest = max(largest, code);
        least = min(least, code);
    }
    largest = __reduce_max_sync(FULL_WARP, largest);
    least = __reduce_min_sync(FULL_WARP, least);
    if (lane == 0) scales[row] = coarse_scale(largest);
    if (least == largest) return;  // as are most rows

    __syncwarp();
    uint4* const vectors = reinterpret_cast<uint4*>(values + static_cast<long long>(row) * width);
#pragma unroll 4
    for (int i = lane; i < width / 16; i += 32) {
        const unsigned code = own_codes[warp][i * 16 / part];
        if (code == largest) continue;
        const uint4 raw = vectors[i];
        // 0 if nothing is left of them.
        const unsigned less = COARSE_BITS * (largest - code);
        const float factor = less < 127 ? __uint_as_float((127 - less) << 23) : 0.0f;
        const auto converted = [&](unsigned word) {
            unsigned low, high;
            Fp8::decode_halves<false>(word, low, high);
            const float2 a = __half22float2(as_halves(low)), b = __half22float2(as_halves(high));
            const float scaled[4] = {a.x * factor, a.y * factor, b.x * factor, b.y * factor};
            return pack_bytes<Fp8>(scaled);
        };
        vectors[i] =
            make_uint4(converted(raw.x), converted(raw.y), converted(raw.z), converted(raw.w));
    }
}
