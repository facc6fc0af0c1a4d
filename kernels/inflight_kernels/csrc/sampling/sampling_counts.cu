// State of the sampler's penalties: the tokens of a prompt, and token counts of an output.
#include "common.cuh"

// Count token ids[i] in the output of slots[i], for i < n; negative slots and ids are skipped.
// Counts saturate at 32767.
__global__ void count_output_tokens(const int* slots, const long long* ids, short* counts, int n,
                            int vocab) {
    pdl_wait();
    pdl_launch_dependents();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || slots[i] < 0 || ids[i] < 0 || ids[i] >= vocab) return;
    const long long at = static_cast<long long>(slots[i]) * vocab + ids[i];
    unsigned* const word = reinterpret_cast<unsigned*>(counts) + at / 2;
    const int shift = at % 2 * 16;
    for (unsigned seen = *word;;) {
        if ((seen >> shift & 0xffffu) == 32767u) return;
        const unsigned before = atomicCAS(word, seen, seen + (1u << shift));
        if (before == seen) return;
        seen = before;
    }
}

// Set the bits of token ids[i] in the prompt of slots[i], for i < n.
__global__ void mark_prompt_tokens(const int* slots, const long long* ids, unsigned* prompt, int n,
                            int vocab) {
    pdl_wait();
    pdl_launch_dependents();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || slots[i] < 0 || ids[i] < 0 || ids[i] >= vocab) return;
    const long long words = (vocab + 31) / 32;
    atomicOr(prompt + slots[i] * words + ids[i] / 32, 1u << ids[i] % 32);
}
