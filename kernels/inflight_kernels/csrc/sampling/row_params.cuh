// Sampling parameters of a row of logits: ROW_PARAMS of ops/sampling.py as the kernels read it.
// Written by `make generate`; do not edit.
#pragma once

struct RowParams {
    unsigned long long seed;
    float temperature;
    int slot;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
    float top_n_sigma;
    int top_k;
    float typical_p;
    float top_p;
    float min_p;
    float epsilon_cutoff;
    float xtc_threshold;
    float xtc_probability;
    int unused;
};
static_assert(sizeof(RowParams) == 64, "as the host writes it");

constexpr int ROW_PARAMS_WORDS = sizeof(RowParams) / sizeof(int);
constexpr int ROW_PARAMS_SLOT = 3;  // the word of `slot`

__device__ inline bool has_penalties(const RowParams& params) {
    return params.repetition_penalty != 1.0f ||
           params.presence_penalty != 0.0f ||
           params.frequency_penalty != 0.0f;
}

// Whether a row has filters that need more than its maximum and its bound.
__device__ inline bool has_rare_filters(const RowParams& params) {
    return params.typical_p != 1.0f ||
           params.top_n_sigma != 0.0f ||
           params.epsilon_cutoff != 0.0f ||
           params.xtc_probability != 0.0f;
}

// A word of a row's parameters, or its default if it belongs to a rare filter.
__device__ inline int without_rare_filters(int word, int value) {
    switch (word) {
        case 9: return __float_as_int(1.0f);  // typical_p
        case 7: return __float_as_int(0.0f);  // top_n_sigma
        case 12: return __float_as_int(0.0f);  // epsilon_cutoff
        case 14: return __float_as_int(0.0f);  // xtc_probability
        default: return value;
    }
}
