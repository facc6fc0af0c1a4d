// The middle pass of the sampler, over rows with rare filters (see sampling_job.cuh): the standard
// deviation of a row's logits and the mean surprisal of its tokens.
#include "sampling/sampling_job.cuh"

// Partial results of a slice: masses and moments are exact, the rest is summed in a fixed order.
struct Share {
    u64 mass, moment;
    double distance, square;  // sums of logits' distances from the top, and of their squares
    int count;
};
static_assert(MAX_SLICES * sizeof(Share) <= CAPACITY * sizeof(u64), "a row's shares have room");

template <typename T>
__device__ void spread_slice(int row, int slice, const Common<T>& common, Shared& shared) {
    const Job<T>& job = common.job;
    const RowParams& params = common.params;
    Bound& bound = *job.bound(row);
    const float top = bound.top;
    Share* const shares = reinterpret_cast<Share*>(job.candidates(row));  // not used yet

    float x[VALUES];
    read_adjusted(job, row, params, slice, x, shared);
    Share mine = {};
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        if (!(x[i] > -INFINITE)) continue;
        const unsigned score = score_of(x[i], top, params.temperature);
        mine.mass += mass_of(score);
        mine.moment += moment_of(score);
        const double distance = static_cast<double>(top) - static_cast<double>(x[i]);
        mine.distance += distance;
        mine.square += distance * distance;
        mine.count++;
    }
    const auto add_up = [&] {
        mine.mass = block_total(mine.mass, shared.sums);
        mine.moment = block_total(mine.moment, shared.sums);
        mine.distance = block_total(mine.distance, shared.doubles);
        mine.square = block_total(mine.square, shared.doubles);
        mine.count = block_total(mine.count, shared.ints);
    };
    add_up();
    if (threadIdx.x == 0) shares[slice] = mine;
    if (!arrives_last(job, row)) return;

    mine = {};
    for (int s = threadIdx.x; s < job.slices(); s += THREADS) {
        mine.mass += __ldcg(&shares[s].mass);
        mine.moment += __ldcg(&shares[s].moment);
        mine.distance += __ldcg(&shares[s].distance);
        mine.square += __ldcg(&shares[s].square);
        mine.count += __ldcg(&shares[s].count);
    }
    add_up();
    if (threadIdx.x != 0) return;
    bound.mass = mine.mass;
    bound.mean = mean_score(mine.mass, mine.moment);
    if (params.top_n_sigma > 0.0f) {
        const double mean = mine.distance / mine.count;
        const double variance = fmax(mine.square / mine.count - mean * mean, 0.0);
        const float limit = static_cast<float>(params.top_n_sigma * sqrt(variance));
        bound.worst = score_of(0.0f, limit, params.temperature);
    }
}

// Grid: (slices, rows). After `scan`, with the same arguments.
template <typename T>
__global__ void __launch_bounds__(THREADS, 4) spread(JOB_PARAMETERS) {
    __shared__ Common<T> common;
    __shared__ Shared shared;
    pdl_wait();
    pdl_launch_dependents();
    const Job<T> job = JOB;
    const RowParams params = row_params[blockIdx.y];
    if (!has_rare_filters(params) || !job.bound(blockIdx.y)->open) return;
    copy_to_shared(job, params, common);
    spread_slice(blockIdx.y, blockIdx.x, common, shared);
}
