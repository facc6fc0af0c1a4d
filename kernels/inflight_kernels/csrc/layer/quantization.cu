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

// Rows of e4m3 whose parts of PART columns have coarse scales (eight_bit.cuh) get the largest of
// these for all of their parts. A warp per row; rows are contiguous, `width` and `part` multiples
// of 16, with at most MAX_PARTS of them.
constexpr int MAX_PARTS = 1024;
constexpr int ROWS_AT_ONCE = 8;

// The code of parts that are in 16 bits yet. No scale has it: that of zeros is 11.
constexpr unsigned LEFT_CODE = 0;

// Calls each(column, values) for the 16-byte vectors of these parts of a row, by a warp.
template <typename T, class Each>
__device__ __forceinline__ void visit_left(const T* row, const unsigned char* codes, int width,
                                           int part, const Each& each) {
#pragma unroll 4
    for (int column = threadIdx.x % 32 * VECTOR<T>; column < width; column += 32 * VECTOR<T>) {
        if (codes[column / part] != LEFT_CODE) continue;
        float values[VECTOR<T>];
        unpack<T>(load_vector(row + column), values);
        each(column, values);
    }
}

// 16 values divided by 2^less; 0 if nothing is left of them.
__device__ __forceinline__ uint4 divided(const uint4& raw, unsigned less) {
    const float factor = less < 127 ? __uint_as_float((127 - less) << 23) : 0.0f;
    const auto converted = [&](unsigned word) {
        unsigned low, high;
        Fp8::decode_halves<false>(word, low, high);
        const float2 a = __half22float2(as_halves(low)), b = __half22float2(as_halves(high));
        const float scaled[4] = {a.x * factor, a.y * factor, b.x * factor, b.y * factor};
        return Fp8::encode(scaled);
    };
    return make_uint4(converted(raw.x), converted(raw.y), converted(raw.z), converted(raw.w));
}

// Of the kernels below, with codes [m, parts]. Parts with LEFT_CODE are read from `left`, in 16
// bits, if T is not void, and codes are set to that.
template <typename T>
__device__ __forceinline__ void settle(const T* left, unsigned char* values, float* scales,
                                       unsigned char* codes, int m, int width, int part) {
    __shared__ unsigned char all_codes[ROWS_AT_ONCE][MAX_PARTS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.x * ROWS_AT_ONCE + warp, parts = (width + part - 1) / part;
    unsigned char* const own_codes = all_codes[warp];
    pdl_launch_dependents();
    pdl_wait();
    if (row >= m) return;

    unsigned largest = 0, least = BROKEN_CODE;
    codes += static_cast<long long>(row) * parts;
#pragma unroll 4
    for (int i = lane; i < parts; i += 32) {
        const unsigned code = codes[i];
        if (!SAME<T, void>) codes[i] = LEFT_CODE;
        own_codes[i] = code;
        largest = max(largest, code);
        least = min(least, code);
    }
    largest = __reduce_max_sync(FULL_WARP, largest);
    least = __reduce_min_sync(FULL_WARP, least);
    __syncwarp();
    if constexpr (!SAME<T, void>) {
        left += static_cast<long long>(row) * width;
        if (least == LEFT_CODE) {
            unsigned found = 0;
            visit_left(left, own_codes, width, part, [&](int, const float (&a)[VECTOR<T>]) {
#pragma unroll
                for (int j = 0; j < VECTOR<T>; j++) found = max(found, magnitude(a[j]));
            });
            largest = max(largest, coarse_code(__reduce_max_sync(FULL_WARP, found)));
        }
    }
    if (lane == 0) scales[row] = coarse_scale(largest);
    if (least == largest) return;  // as are most rows

    values += static_cast<long long>(row) * width;
    uint4* const vectors = reinterpret_cast<uint4*>(values);
#pragma unroll 4
    for (int i = lane; i < width / 16; i += 32) {
        const unsigned code = own_codes[i * 16 / part];
        if (code == largest || code == LEFT_CODE) continue;
        vectors[i] = divided(vectors[i], COARSE_BITS * (largest - code));
    }
    if constexpr (!SAME<T, void>) {
        if (least != LEFT_CODE) return;
        const float inverse = inverse_coarse_scale(largest);
        visit_left(left, own_codes, width, part, [&](int column, float (&a)[VECTOR<T>]) {
#pragma unroll
            for (int j = 0; j < VECTOR<T>; j++) a[j] *= inverse;
            *reinterpret_cast<uint2*>(values + column) =
                make_uint2(Fp8::encode(a), Fp8::encode(a + 4));
        });
    }
}

// All parts are quantised.
__global__ void __launch_bounds__(32 * ROWS_AT_ONCE)
    settle_rows(unsigned char* values, float* scales, unsigned char* codes, int m, int width,
                int part) {
    settle<void>(nullptr, values, scales, codes, m, width, part);
}

// Some parts may be left in 16 bits, in rows of as many values.
template <typename T>
__global__ void __launch_bounds__(32 * ROWS_AT_ONCE)
    settle_parts(const T* left, unsigned char* values, float* scales, unsigned char* codes, int m,
                 int width, int part) {
    settle<T>(left, values, scales, codes, m, width, part);
}
