// Linear layers whose weight has 4, 6 or 8 bits a value and scales of groups (grouped.cuh), while x
// is bfloat16.
//
// For few tokens a kernel streams the weight once, from memory to registers: each warp of a block
// has records of its own, and loads them some ahead. Codes become bfloat16, or bytes
// (grouped_planes.cuh), as the left operand of mma, whose 16 rows are rows of the weight; the 8
// columns are tokens, of which few are padding then. x lies in shared memory, as many columns of it
// as fit.
//
// For more tokens another kernel writes the weight in 16 bits for a product of those; see
// grouped_gemm_hopper.cu as well.
#include "linear/grouped_few.cuh"

// out[m, n'] = epilogue(x[m, k] @ weight[n, k]^T), m <= 8, in planes 4, k a multiple of 8; rows of
// x are `stride` values apart. Epilogue: + bias; if gated, with a weight of gate | up: silu(gate) *
// up, n' = n / 2, a multiple of 16; + residual (bias and residual may be null; out may alias the
// residual, and is float if `wide`). A tile is 16 * TILES rows of the weight, or half as many of
// gate and of up; block b computes tiles b, b + blocks and so on. WARPS warps share the columns;
// their sums are added in order. `values` is null unless codes are indices. x is read `phase`
// columns at a time, a multiple of COLUMNS * WARPS * DEPTH, or all of them, rounded up to
// PLANE_COLUMNS. Dynamic shared memory: m rows of 2 * phase + 32 bytes, twice WARPS * 8 * (16 *
// TILES + 4) floats, and in planes 8 floats for each PLANE_COLUMNS and each GROUP columns of a
// phase.
template <class R, bool PLANES, int TILES, int WARPS, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32, 1)
    grouped_gemm(const __nv_bfloat16* x, int stride, const unsigned char* records,
                 const grouped::Table* values, const __nv_bfloat16* bias,
                 const __nv_bfloat16* residual, void* out, int m, int n, int k, int phase,
                 bool gated, bool wide) {
#if __CUDA_ARCH__ >= 800
    using namespace grouped;
    constexpr int HEIGHT = TILES * ROWS, PITCH = HEIGHT + 4, SUMS = WARPS * FEW_TOKENS * PITCH;
    extern __shared__ __align__(128) unsigned char memory[];

    // Blocks of the next kernel start when all of this one have: it reads its weights meanwhile.
    pdl_launch_dependents();
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    const int width = gated ? n / 2 : n;
    const int columns = gated ? HEIGHT / 2 : HEIGHT;  // of out
    const int tiles = (width + columns - 1) / columns, blocks = gridDim.x;
    const int chunks = (k + COLUMNS - 1) / COLUMNS;
    // Of this warp, the records warp, warp + WARPS and so on; counted in whole turns of `ahead`.
    const int own = (chunks - warp + WARPS - 1) / WARPS, turns = (own + DEPTH - 1) / DEPTH * DEPTH;

    // The next record to load, of the tiles of 16 rows; of those past the weight's end, the last.
    const unsigned char* sources[TILES];
    int loaded_tile = blockIdx.x, position = 0;
    const auto find = [&] {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            const bool is_up = gated && t >= TILES / 2;
            const int row =
                loaded_tile * columns + (is_up ? width + (t - TILES / 2) * ROWS : t * ROWS);
            const int last = (gated && !is_up ? width : n) - 1;
            sources[t] = records + R::offset(min(row, last) / ROWS, k) + warp * R::BYTES;
        }
    };
    Loaded<R, PLANES> ahead[DEPTH][TILES];
    const auto load = [&](Loaded<R, PLANES>(&to)[TILES]) {
        if (position < own && loaded_tile < tiles) {
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                to[t].load(sources[t], lane);
                sources[t] += WARPS * R::BYTES;
            }
        }
        if (++position == turns) {
            position = 0;
            loaded_tile += blocks;
            find();
        }
    };
    // No kernel writes weights: they may be read before the preceding kernel has ended.
    find();
    if (own > 0)
#pragma unroll
        for (int d = 0; d < DEPTH; d++) load(ahead[d]);
    Table table = {};
    if constexpr (R::CODES == TABLE) table = *values;

    const SharedX<R, PLANES> of_x(memory + 2 * SUMS * sizeof(float), phase);
    const auto load_x = [&](int begin, int end) {
        of_x.template load<WARPS * 32>(x, stride, m, k, begin, end);
        of_x.finish();
    };
    pdl_wait();
    const bool is_whole = phase >= k;
    if (is_whole) load_x(0, chunks * COLUMNS);

    const Epilogue epilogue = {bias, residual, out, width, gated, wide};
    float* partial = reinterpret_cast<float*>(memory);
    for (int tile = blockIdx.x; tile < tiles; tile += blocks) {
        float sums[TILES][4] = {};
        for (int begin = 0; begin < k; begin += phase) {
            const int end = min(begin + phase, chunks * COLUMNS);
            if (!is_whole) {
                if (begin) __syncthreads();  // all warps have read the columns before
                load_x(begin, end);
            }
            unsigned own_x = of_x.row(m, warp);
            const int count = ((end - begin) / COLUMNS - warp + WARPS - 1) / WARPS;
#pragma unroll 1
            for (int i = 0; i < count; i += DEPTH) {
#pragma unroll
                for (int d = 0; d < DEPTH; d++) {
                    if (i + d < count)
                        of_x.multiply(ahead[d], table, own_x, warp + (i + d) * WARPS, sums);
                    load(ahead[d]);
                    own_x += WARPS * of_x.COLUMN_BYTES * COLUMNS;
                }
            }
        }

        float* const mine = partial + warp * FEW_TOKENS * PITCH;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                mine[(lane % 4 * 2 + e % 2) * PITCH + t * ROWS + lane / 4 + e / 2 * 8] = sums[t][e];
        __syncthreads();
        const int first = tile * columns;
        for (int i = threadIdx.x; i < m * columns; i += WARPS * 32) {
            const int row = i / columns, column = i % columns;
            if (first + column >= width) continue;
            const float* const parts = partial + row * PITCH + column;
            epilogue.store(row, first + column, epilogue.added(row, first + column), [&](int part) {
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    const float* const of_warp = parts + w * FEW_TOKENS * PITCH + part * columns;
                    sum += of_warp[0];
                    if (PLANES) sum += of_warp[PLANE_TOKENS * PITCH];
                }
                return sum;
            });
        }
        // The next tile's sums go elsewhere: those of this one may still be read.
        partial = partial == reinterpret_cast<float*>(memory) ? partial + SUMS : partial - SUMS;
    }
#endif
}

// out[n, k] = the values that products have, k a multiple of 8. A warp writes a record at a time.
// Dynamic shared memory: for each warp of a block R::BYTES, and 16 rows of 2 * COLUMNS + 16 bytes.
template <class R>
__global__ void grouped_dequantize(const unsigned char* records, const grouped::Table* values,
                                   __nv_bfloat16* out, int n, int k) {
#if __CUDA_ARCH__ >= 800
    using namespace grouped;
    constexpr int PITCH = 2 * COLUMNS + 16;  // of a row
    extern __shared__ __align__(128) unsigned char memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int chunks = (k + COLUMNS - 1) / COLUMNS, tiles = (n + ROWS - 1) / ROWS;
    const long long index = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + warp;
    if (index >= static_cast<long long>(tiles) * chunks) return;
    const int tile = index / chunks, chunk = index % chunks;
    unsigned char* const record = memory + warp * (R::BYTES + ROWS * PITCH);
    unsigned char* const rows = record + R::BYTES;
    copy_record<R::BYTES>(ptx::shared_address(record) + lane * 16,
                          records + index * R::BYTES + lane * 16, lane);
    ptx::commit_copies();
    Table table = {};
    if constexpr (R::CODES == TABLE) table = *values;
    ptx::wait_copies<0>();
    __syncwarp();
    const Reader<R> reader = {ptx::shared_address(record), lane};
    Codes<R> codes[COLUMNS / (2 * STEP)];
    reader.read(codes);
    const auto scales = reader.scales();
    Scales of_group;
#pragma unroll
    for (int step = 0; step < COLUMNS / STEP; step++) {
        if (step * STEP % R::GROUP == 0) of_group = scales.of(step);
        unsigned a[4];
        operand<R>(codes[step / 2], step % 2, of_group, table, a);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + i % 2 * 8, column = step * STEP + i / 2 * 8 + lane % 4 * 2;
            *reinterpret_cast<unsigned*>(rows + row * PITCH + column * 2) = a[i];
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < ROWS * COLUMNS / 8; i += 32) {
        const int row = i / (COLUMNS / 8), column = i % (COLUMNS / 8) * 8;
        if (tile * ROWS + row < n && chunk * COLUMNS + column < k)
            store_vector(out + static_cast<long long>(tile * ROWS + row) * k + chunk * COLUMNS +
                             column,
                         *reinterpret_cast<const uint4*>(rows + row * PITCH + column * 2));
    }
#endif
}
