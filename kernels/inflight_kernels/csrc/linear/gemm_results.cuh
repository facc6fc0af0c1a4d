// Results of a tile on their way to memory, while the next tile is multiplied. sm_90a only.
//
// Each consumer warpgroup has its part of a tile in shared memory. A warp of the producers copies
// the residual there, to which the warpgroup adds its results, and then the sums to memory.
#pragma once

#include "attention/attention_ptx.cuh"
#include "linear/gemm_hopper.cuh"

namespace gemm {

constexpr int GROUP_TOKENS = 64;  // of a tile, of a consumer warpgroup

// Add the two values of a word.
template <typename T>
__device__ void add_pair(float& a, float& b, unsigned word) {
    float both[2];
    Word<T>::unpack(word, both);
    a += both[0];
    b += both[1];
}

// The results of a warpgroup: [GROUP_TOKENS, COLUMNS] of 16 bits, as boxes of BOX columns, or of
// Fp8, as one.
template <typename T, int COLUMNS>
struct Results {
    static constexpr int BOX = sizeof(T) == 1 ? COLUMNS : COLUMNS % 32 == 0 ? 32 : 16;
    static constexpr int BOX_BYTES = GROUP_TOKENS * BOX * sizeof(T);
    static constexpr int BYTES = GROUP_TOKENS * COLUMNS * sizeof(T);
    static constexpr int BARRIERS = 2;

    char* boxes;
    Barrier* ready;    // may be written; the residual is there, unless there is none
    Barrier* written;  // may be stored

    // all: of all warpgroups, aligned to 1024 bytes; barriers: BARRIERS of each.
    __device__ Results(char* all, Barrier* barriers, int group)
        : boxes(all + group * BYTES), ready(barriers + group * BARRIERS), written(ready + 1) {}

    __device__ void init() const {
        init_barrier(ready, 1);
        init_barrier(written, 4);
    }

    // ------------------------------------------------------------ by one thread of the producers

    // Request the residual of a tile, or say that there is none.
    __device__ void prepare(const TensorMap& residual, bool has_residual, int token,
                            int column) const {
        if (!has_residual) {
            arrive(ready);
            return;
        }
        arrive_expect_tx(ready, BYTES);
#pragma unroll 1
        for (int from = 0; from < COLUMNS; from += BOX)
            tma_load(boxes + from / BOX * BOX_BYTES, &residual, token, column + from, ready);
    }

    // Store what the warpgroup has written, and wait until it may write again.
    __device__ void store(const TensorMap& out, int token, int column, int parity) const {
        barrier_wait(written, parity);
#pragma unroll 1
        for (int from = 0; from < COLUMNS; from += BOX)
            asm volatile(
                "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                    &out),
                "r"(column + from), "r"(token), "r"(shared_address(boxes + from / BOX * BOX_BYTES))
                : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }

    // Wait until all is in memory.
    static __device__ void finish() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

    // ------------------------------------------------------------ by the warpgroup

    // Add the residual to this thread's sums, as wgmma leaves them, and write all.
    __device__ void write(float (&sums)[COLUMNS / 2], bool has_residual, int parity) const {
        constexpr int CHUNKS = BOX / 8;  // of 16 bytes, in a row
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
        // TMA exchanges the chunks of a row, in other ways in each line of 128 bytes.
        const int line = row * BOX * static_cast<int>(sizeof(T)) / 128;
        const int chunk = row * CHUNKS % 8 + lane / 16;
        const unsigned base = shared_address(boxes) + line * 128;
        barrier_wait(ready, parity);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n += 2) {
            const unsigned place =
                base + n / CHUNKS * BOX_BYTES + ((chunk + n % CHUNKS) ^ line % CHUNKS) * 16;
            float* const values = sums + 4 * n;
            if (has_residual) {
                unsigned words[4];
                ptx::load_matrices(words, place);
#pragma unroll
                for (int i = 0; i < 4; i++) add_pair<T>(values[2 * i], values[2 * i + 1], words[i]);
            }
            ptx::store_matrices(place, Word<T>::pack(values), Word<T>::pack(values + 2),
                                Word<T>::pack(values + 4), Word<T>::pack(values + 6));
        }
        publish();
    }

    // Write this thread's sums, of which `inverses` are the inverse scales of its two tokens.
    __device__ void write_bytes(const float (&sums)[COLUMNS / 2], const float (&inverses)[2],
                                int parity) const {
        const int lane = threadIdx.x % 32, q = lane % 4;
        const int row = threadIdx.x / 32 % 4 * 16 + lane / 4;
        barrier_wait(ready, parity);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n += 2)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float* const values = sums + 4 * n + 2 * r;
                const float scaled[4] = {values[0] * inverses[r], values[1] * inverses[r],
                                         values[4] * inverses[r], values[5] * inverses[r]};
                // A lane has two columns of eight, and two of the next eight. It gets four that are
                // adjacent, from two lanes.
                const unsigned word = Fp8::encode(scaled);
                const unsigned first = __shfl_sync(FULL_WARP, word, q % 2 * 2, 4);
                const unsigned second = __shfl_sync(FULL_WARP, word, q % 2 * 2 + 1, 4);
                *reinterpret_cast<unsigned*>(boxes + (row + 8 * r) * COLUMNS + 8 * n + 4 * q) =
                    __byte_perm(first, second, q < 2 ? 0x5410 : 0x7632);
            }
        publish();
    }

   private:
    __device__ void publish() const {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(written);
    }
};

}  // namespace gemm
