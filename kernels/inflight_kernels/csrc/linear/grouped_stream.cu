// Linear layers of one or two tokens whose weight is in records (grouped.cuh), while x is bfloat16.
//
// As in grouped_gemm.cu the weight goes from memory to registers once, and x lies in shared memory.
// But a multiprocessor has one block, whose warps take the records of all its tiles by turns: so
// each warp has as many, one more at most, and what a block reads at a time lies together, as does
// what the blocks read. Sums of a tile wait in shared memory for the end of the block.
#include "linear/grouped_few.cuh"

namespace grouped {

constexpr int SHARERS = 4;     // lanes that add the warps' sums of an output,
constexpr int SHARED_TOKENS =
    4;  // of up to so many tokens: those of more keep lanes busy by themselves

}  // namespace grouped

// out[m, n'] = epilogue(x[m, k] @ weight[n, k]^T), m <= 8, in planes 4, k a multiple of 8; rows of
// x are `stride` values apart. See grouped_gemm for the epilogue, `gated` and `values`. Only the
// first *num_tokens of the m tokens are computed, at least one; all if it is null. It is
// history_ready.
// A tile is 16 rows of the weight, or as many of gate and then of up; block b computes tiles b,
// b + blocks and so on. A warp loads DEPTH records ahead. Dynamic shared memory: m rows of 2 * k +
// 32 bytes, k rounded up to PLANE_COLUMNS; in planes 8 floats for each PLANE_COLUMNS and each GROUP
// columns; and for each tile of a block, or half of one if gated, warp and token 20 floats, in
// planes twice.
template <class R, bool PLANES, int WARPS, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32, 1)
    grouped_stream(const __nv_bfloat16* x, int stride, const unsigned char* records,
                   const grouped::Table* values, const __nv_bfloat16* bias,
                   const __nv_bfloat16* residual, void* out, int m, int n, int k, bool gated,
                   bool wide, const int* num_tokens) {
#if __CUDA_ARCH__ >= 800
    using namespace grouped;
    constexpr int PITCH = ROWS + 4;
    constexpr int PARTS = PLANES ? 2 : 1;  // sums of a token
    extern __shared__ __align__(128) unsigned char memory[];

    // Blocks of the next kernel start when all of this one have: it reads its weights meanwhile.
    pdl_launch_dependents();
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    const int halves = gated ? 2 : 1, width = n / halves;  // of out
    const int block = blockIdx.x, blocks = gridDim.x;
    const int tiles = ((width + ROWS - 1) / ROWS - block + blocks - 1) / blocks;
    const int chunks = (k + COLUMNS - 1) / COLUMNS;
    // Records are numbered by tile, its halves if gated, then by column. This warp has warp,
    // warp + WARPS and so on.
    const int end = tiles * halves * chunks;

    const unsigned char* source;
    int next = warp, next_chunk = warp, next_half = 0;
    const auto find = [&] {
        while (next_chunk >= chunks) {
            next_chunk -= chunks;
            next_half++;
        }
        const int tile = block + (gated ? next_half / 2 : next_half) * blocks;
        const int row = tile * ROWS + (gated && next_half % 2 ? width : 0);
        source = records + R::offset(row / ROWS, k) + next_chunk * R::BYTES;
    };
    Loaded<R, PLANES> ahead[DEPTH][1];
    const auto load = [&](Loaded<R, PLANES>& to) {
        if (next >= end) return;
        next += WARPS;
        next_chunk += WARPS;
        to.load(source, lane);
        source += WARPS * R::BYTES;
        if (next_chunk >= chunks) find();
    };
    // No kernel writes weights: they may be read before the preceding kernel has ended.
    find();
#pragma unroll
    for (int d = 0; d < DEPTH; d++) load(ahead[d][0]);
    const int count = num_tokens ? min(m, max(1, load_l2(num_tokens))) : m;
    Table table = {};
    if constexpr (R::CODES == TABLE) table = *values;

    const SharedX<R, PLANES> of_x(memory, (k + PLANE_COLUMNS - 1) / PLANE_COLUMNS * PLANE_COLUMNS);
    // [tiles * halves, WARPS, m, PARTS, PITCH]
    float* const partial = reinterpret_cast<float*>(of_x.memory + m * of_x.row_bytes());
    const int warp_sums = m * PARTS * PITCH;
    const Epilogue epilogue = {bias, residual, out, width, gated, wide};
    const int outputs = tiles * count * ROWS;
    // Of an output of this thread: its tile, and its row and column of out.
    int tile, row, out_column;
    const auto locate = [&](int output) {
        tile = output / ROWS / count;
        row = output / ROWS - tile * count;
        out_column = (block + tile * blocks) * ROWS + output % ROWS;
    };
    pdl_wait();
    of_x.template load<WARPS * 32>(x, stride, count, k, 0, chunks * COLUMNS);
    // Of the first output, loaded while the product is computed.
    const int sharers = count <= SHARED_TOKENS ? SHARERS : 1;
    const int first = threadIdx.x / sharers;
    Epilogue::Added added = {};
    if (first < outputs) {
        locate(first);
        if (out_column < width) added = epilogue.added(row, out_column);
    }
    of_x.finish();

    // Where this lane's sums of its first token go; it has the next one as well.
    const int token = PLANES ? lane % 2 * 2 : lane % 4 * 2;
    float* mine = partial + warp * warp_sums +
                  (token * PARTS + (PLANES ? lane / 2 % 2 : 0)) * PITCH + lane / 4;
    int chunk = warp;
    while (chunk >= chunks) {
        chunk -= chunks;
        mine += WARPS * warp_sums;
    }
    unsigned own_x = of_x.row(count, chunk);
    float sums[1][4] = {};
#pragma unroll 1
    for (int i = warp; i < end; i += DEPTH * WARPS) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (i + d * WARPS >= end) break;
            of_x.multiply(ahead[d], table, own_x, chunk, sums);
            load(ahead[d][0]);
            own_x += WARPS * of_x.COLUMN_BYTES * COLUMNS;
            chunk += WARPS;
            if (chunk < chunks) continue;
            // This was the warp's last record of a tile, or of its half.
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (token + e % 2 < count) mine[e % 2 * (PARTS * PITCH) + e / 2 * 8] = sums[0][e];
                sums[0][e] = 0.0f;
            }
            while (chunk >= chunks) {
                chunk -= chunks;
                mine += WARPS * warp_sums;
            }
            own_x = of_x.row(count, chunk);
        }
    }
    __syncthreads();

    // Lanes without an output do what those of the last one do: all take part in the sums.
#pragma unroll 1
    for (int i = first; i - lane / sharers < outputs; i += WARPS * 32 / sharers) {
        if (i != first || i >= outputs) locate(min(i, outputs - 1));
        float found[2];
#pragma unroll 1
        for (int half = 0; half < halves; half++) {
            const int place = tile * halves + half;
            const float* const parts =
                partial + place * WARPS * warp_sums + row * (PARTS * PITCH) + out_column % ROWS;
            const int first_warp = place * chunks % WARPS;  // that has records of this half
            // Of each SHARERS-th warp; all sums are added in the same order for any m.
            const auto sum_from = [&](int from) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < WARPS; j += SHARERS) {
                    const int w = j + from;
                    if ((w - first_warp + WARPS) % WARPS >= chunks) continue;
#pragma unroll
                    for (int p = 0; p < PARTS; p++) sum += parts[w * warp_sums + p * PITCH];
                }
                return sum;
            };
            float sum;
            if (sharers == 1) {
                sum = (sum_from(0) + sum_from(1)) + (sum_from(2) + sum_from(3));
            } else {
                sum = sum_from(lane % SHARERS);
                sum += __shfl_xor_sync(FULL_WARP, sum, 1);
                sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            }
            found[1] = sum;
            if (half == 0) found[0] = sum;
        }
        if (lane % sharers || i >= outputs || out_column >= width) continue;
        if (i != first) added = epilogue.added(row, out_column);
        epilogue.store(row, out_column, added, [&](int half) { return found[half]; });
    }
#endif
}
