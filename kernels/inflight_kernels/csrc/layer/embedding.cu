// Embedding lookup.
#include "common.cuh"

// One thread per 16-byte vector of `out`. The table has the rows of ids [first, first + num_rows),
// as in a rank of a vocabulary-parallel embedding; other ids yield zeros.
template <typename Id>
__global__ void __launch_bounds__(256)
    embedding(const Id* ids, const uint4* table, uint4* out, unsigned num_vectors,
              unsigned vectors_per_row, long long first, long long num_rows) {
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    pdl_wait();
    pdl_launch_dependents();
    if (index >= num_vectors) return;

    const unsigned token = index / vectors_per_row;
    const unsigned column = index - token * vectors_per_row;
    const long long row = static_cast<long long>(ids[token]) - first;
    uint4 values = make_uint4(0, 0, 0, 0);
    if (row >= 0 && row < num_rows) values = table[row * vectors_per_row + column];
    out[index] = values;
}
