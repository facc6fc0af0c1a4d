// The first pass of the sampler, and for most rows the last one (see sampling_job.cuh).
#include "sampling/sampling_job.cuh"

constexpr int BOUND_RANK = 1024;  // maximum rank of the lower bound of candidates
constexpr int MAXIMA = 32;        // upper limit of row maxima per thread, when computing the bound

// Partial results of a warp; `top` and `sum` as in Partial.
struct WarpPart {
    float raw_top, raw_sum, top, sum;
};

struct ScanShared : Shared {
    WarpPart parts[WARPS];
};

// A lower bound of the `rank`-th largest logit: a value that at least `rank`, and not many more, of
// the row's maxima reach. -inf if there are fewer maxima.
template <typename T>
__device__ __noinline__ float find_bound(const Job<T>& job, int row, int rank, float top,
                                         Shared& shared) {
    const float* const maxima = job.maxima(row);
    const int groups = min(job.slices() * THREADS, MAXIMA * THREADS);
    float values[MAXIMA], least = INFINITE;
    int finite = 0;
#pragma unroll
    for (int i = 0; i < MAXIMA; i++) {
        const int at = i * THREADS + threadIdx.x;
        values[i] = at < groups ? __ldcg(maxima + at) : -INFINITE;
        if (values[i] > -INFINITE) {
            finite++;
            least = fminf(least, values[i]);
        }
    }
    if (block_total(finite, shared.ints) < rank) return -INFINITE;
    float low = -block_largest(-least, shared.floats), high = top;
    for (int step = 0; step < 24; step++) {
        const float middle = low + (high - low) * 0.5f;
        int above = 0;
#pragma unroll
        for (int i = 0; i < MAXIMA; i++) above += values[i] >= middle;
        above = block_total(above, shared.ints);
        if (above >= rank) {
            low = middle;
            if (above <= rank + rank / 8) break;
        } else {
            high = middle;
        }
    }
    return low;
}

// Sample from a whole row, first a slice and then a token in it.
template <typename T>
__device__ __noinline__ void draw_from_all(const Job<T>& job, int row, const RowParams& params, float top,
                              float log_sum, float scale, Shared& shared) {
    const Partial* const partials = job.partials(row);
    // In double the sum over slices is close to exact, and the same in every thread.
    double sum = 0.0;
    for (int s = 0; s < job.slices(); s++) {
        const float peak = __ldcg(&partials[s].top);
        if (peak > -INFINITE)
            sum += static_cast<double>(__ldcg(&partials[s].sum)) * exp2_fast((peak - top) * scale);
    }
    const u64 random = uniform(params.seed, job.positions[row], DRAW);
    const double target = static_cast<double>(random) * 0x1p-64 * sum;
    double before = 0.0, size = 1.0, running = 0.0;
    int slice = 0;
    for (int s = 0; s < job.slices(); s++) {
        const float peak = __ldcg(&partials[s].top);
        if (!(peak > -INFINITE)) continue;
        const double mass =
            static_cast<double>(__ldcg(&partials[s].sum)) * exp2_fast((peak - top) * scale);
        if (!(mass > 0.0)) continue;
        slice = s;
        before = running;
        size = mass;
        running += mass;
        if (running > target) break;
    }
    // Masses are relative to the slice's maximum, so that they do not vanish far below `top`.
    const float peak = __ldcg(&partials[slice].top);
    const Masses all = {peak, params.temperature};
    u64 total, unused;
    walk(job, row, params, slice, slice + 1, all, NEVER, total, shared);
    const double share = (target - before) / size;
    u64 inside = static_cast<u64>(fmax(share, 0.0) * static_cast<double>(total));
    inside = min(inside, total - 1);
    const int id = walk(job, row, params, slice, slice + 1, all, inside, unused, shared);
    if (threadIdx.x == 0) write_result(job, row, id, log_sum);
}

// Finish a row after all its slices are scanned.
template <typename T>
__device__ __noinline__ void finish_scan(const Job<T>& job, int row, const RowParams& params,
                                         Shared& shared) {
    const Partial* const partials = job.partials(row);
    const float scale = LOG2_E / params.temperature;
    float raw_top = -INFINITE, top = -INFINITE;
    int finite = 1, id = job.vocab;
    for (int s = threadIdx.x; s < job.slices(); s += THREADS) {
        raw_top = fmaxf(raw_top, __ldcg(&partials[s].raw_top));
        finite &= __ldcg(&partials[s].finite);
        const float peak = __ldcg(&partials[s].top);
        if (peak > top) {
            top = peak;
            id = __ldcg(&partials[s].id);
        }
    }
    const float highest = block_largest(top, shared.floats);
    raw_top = block_largest(raw_top, shared.floats);
    finite = block_total(1 - finite, shared.ints) == 0;
    id = block_reduce(top == highest ? id : job.vocab, shared.ints,
                      [](int a, int b) { return min(a, b); });
    top = highest;
    if (!finite || !(top > -INFINITE)) {
        if (threadIdx.x == 0) {
            write_failure(job, row, finite ? NO_ALLOWED_TOKENS : NOT_FINITE);
            job.bound(row)->open = 0;
        }
        return;
    }
    float raw_sum = 0.0f, sum = 0.0f;
    for (int s = threadIdx.x; s < job.slices(); s += THREADS) {
        raw_sum += __ldcg(&partials[s].raw_sum) *
                   exp2_fast((__ldcg(&partials[s].raw_top) - raw_top) * LOG2_E);
        const float peak = __ldcg(&partials[s].top);
        if (peak > -INFINITE) sum += __ldcg(&partials[s].sum) * exp2_fast((peak - top) * scale);
    }
    raw_sum = block_total(raw_sum, shared.floats);
    sum = block_total(sum, shared.floats);
    const float log_sum = raw_top + logf(raw_sum);
    const bool greedy = !(params.temperature > 0.0f);
    const bool cut_k = cuts_rank(job, params), cut_p = params.top_p < 1.0f;
    const bool rare = has_rare_filters(params);
    const bool open = !greedy && (cut_k || cut_p || params.min_p > 0.0f || rare);
    if (greedy) {
        if (threadIdx.x == 0) write_result(job, row, id, log_sum);
    } else if (!open) {
        draw_from_all(job, row, params, top, log_sum, scale, shared);
    }
    float threshold = -INFINITE;
    if (open && job.vocab > CAPACITY) {
        // min_p is relative to the top token, unless typical_p may remove that.
        if (cut_k || cut_p || params.min_p == 0.0f || params.typical_p < 1.0f) {
            const int rank = cut_k ? params.top_k : max(job.vocab / (4 * VALUES), 1);
            threshold = find_bound(job, row, min(rank, BOUND_RANK), top, shared);
        } else {
            threshold = top + params.temperature * (logf(params.min_p) - 1e-3f);
        }
    }
    if (threadIdx.x == 0) {
        *job.bound(row) = {top, log_sum, sum, threshold, open, ANY_SCORE};
        job.found[row] = 0;
    }
}

// Sum over the warp, each value rescaled from its own base to the common one.
__device__ inline float rebased_sum(float sum, float base, float new_base, float scale) {
    return warp_sum(sum * exp2_fast((base - new_base) * scale));
}

// Not -inf, to avoid -inf - -inf.
__device__ inline float base_of(float top) { return fmaxf(top, -LARGEST); }

// Process a slice. Separate code for rows with and without adjustments, so that the latter can use
// all registers.
template <bool ADJUSTED, typename T>
__device__ __forceinline__ bool scan_slice(const Job<T>& job, int row, const RowParams& params, int slice,
                                           ScanShared& shared) {
    const bool drawn = params.temperature > 0.0f;
    // Filters by rank or by relative probability alone do not need the total mass.
    const bool summed = drawn && !cuts_rank(job, params) && (params.top_p < 1.0f || params.min_p == 0.0f);
    const float scale = LOG2_E / params.temperature;
    if (threadIdx.x == 0) shared.id = job.vocab;

    float x[VALUES];
    const bool finite = read_slice(job, row, slice, x);
    float raw_top = x[0];
#pragma unroll
    for (int i = 1; i < VALUES; i++) raw_top = fmaxf(raw_top, x[i]);
    float raw_sum = 0.0f;
    const float raw_base = base_of(raw_top);
#pragma unroll
    for (int i = 0; i < VALUES; i++) raw_sum += exp2_fast((x[i] - raw_base) * LOG2_E);

    float top = raw_top, sum = raw_sum;
    if (ADJUSTED) {
        adjust<VALUES>(job, row, params, slice, x, shared);
        top = x[0];
#pragma unroll
        for (int i = 1; i < VALUES; i++) top = fmaxf(top, x[i]);
    }
    const float base = base_of(top);
    if (summed && (ADJUSTED || params.temperature != 1.0f)) {
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUES; i++) sum += exp2_fast((x[i] - base) * scale);
    }
    if (drawn) job.maxima(row)[slice * THREADS + threadIdx.x] = top;

    // By warp first, then combined: a block that waits at barriers does not load.
    WarpPart part;
    part.raw_top = warp_max(raw_top);
    part.raw_sum = rebased_sum(raw_sum, raw_base, base_of(part.raw_top), LOG2_E);
    part.top = ADJUSTED ? warp_max(top) : part.raw_top;
    part.sum = summed ? rebased_sum(sum, base, base_of(part.top), scale) : 0.0f;
    if (threadIdx.x % 32 == 0) shared.parts[threadIdx.x / 32] = part;
    const bool all_finite = __syncthreads_and(finite);
    float peak = shared.parts[0].top;
#pragma unroll
    for (int i = 1; i < WARPS; i++) peak = fmaxf(peak, shared.parts[i].top);
    if (top == peak) {
        int id = job.vocab;
#pragma unroll
        for (int i = VALUES - 1; i >= 0; i--)
            if (x[i] == top) id = id_of<T>(slice, i);
        atomicMin(&shared.id, id);
    }
    Partial result;
    if (threadIdx.x == 0) {
        result.raw_top = shared.parts[0].raw_top;
        for (int i = 1; i < WARPS; i++) result.raw_top = fmaxf(result.raw_top, shared.parts[i].raw_top);
        result.top = peak;
        result.raw_sum = result.sum = 0.0f;
        for (int i = 0; i < WARPS; i++) {
            const WarpPart& one = shared.parts[i];
            result.raw_sum +=
                one.raw_sum * exp2_fast((base_of(one.raw_top) - base_of(result.raw_top)) * LOG2_E);
            if (summed) result.sum += one.sum * exp2_fast((base_of(one.top) - base_of(peak)) * scale);
        }
        result.finite = all_finite;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        result.id = shared.id;
        job.partials(row)[slice] = result;
    }
    return arrives_last(job, row);
}

template <typename T>
__device__ __noinline__ bool scan_adjusted_slice(const Common<T>& common, int row, int slice,
                                               ScanShared& shared) {
    return scan_slice<true>(common.job, row, common.params, slice, shared);
}

// Grid: (slices, rows).
template <typename T>
__global__ void __launch_bounds__(THREADS, 4) scan(JOB_PARAMETERS) {
    __shared__ Common<T> common;
    __shared__ ScanShared shared;
    pdl_wait();
    pdl_launch_dependents();
    const Job<T> job = JOB;
    const int row = blockIdx.y, slice = blockIdx.x;
    const RowParams params = row_params[row];
    bool last;
    if (is_adjusted(job, row, params)) {
        copy_to_shared(job, params, common);
        last = scan_adjusted_slice(common, row, slice, shared);
    } else {
        last = scan_slice<false>(job, row, params, slice, shared);
    }
    if (!last) return;
    copy_to_shared(job, params, common);
    finish_scan(common.job, row, common.params, shared);
}
