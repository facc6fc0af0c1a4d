#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() atomic_signal_fence(memory_order_seq_cst)
#endif

enum {
    MAX_WORKERS = 255,
    SPINS = 4000,          // some tens of microseconds, the time between two calls of one step
    SPINS_TO_YIELD = 500,  // of a caller that waits for the last tasks
};

// Bits 32 and up of a ticket count the changes of a job: odd while its fields are written. The
// others are the index of the next task. A worker takes a task only if the number is still the one
// that it saw before it read the fields.
static _Atomic uint64_t ticket = (uint64_t)1 << 32;
static _Atomic uint32_t num_done;
static _Atomic(Task) job_task;
static _Atomic(const void*) job_context;
static _Atomic uint32_t job_count;
static _Atomic int32_t job_workers;  // those with lower numbers work

static pthread_mutex_t calling = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static _Atomic int32_t num_sleeping;
static int32_t num_workers;

static void work(uint32_t number) {
    Task task = job_task;
    const void* context = job_context;
    uint32_t count = job_count;
    for (;;) {
        uint64_t taken = ticket;
        if (taken >> 32 != number || (uint32_t)taken >= count) return;
        if (!atomic_compare_exchange_weak(&ticket, &taken, taken + 1)) continue;
        task(context, (uint32_t)taken);
        atomic_fetch_add(&num_done, 1);
    }
}

static uint32_t wait_for_change(uint32_t seen) {
    for (int spin = 0; spin < SPINS; spin++) {
        uint32_t number = (uint32_t)(ticket >> 32);
        if (number != seen && number % 2 == 0) return number;
        PAUSE();
    }
    pthread_mutex_lock(&lock);
    atomic_fetch_add(&num_sleeping, 1);
    uint32_t number;
    while ((number = (uint32_t)(ticket >> 32)) == seen || number % 2)
        pthread_cond_wait(&wake, &lock);
    atomic_fetch_sub(&num_sleeping, 1);
    pthread_mutex_unlock(&lock);
    return number;
}

static void* worker(void* argument) {
    int32_t own = (int32_t)(intptr_t)argument;
    for (uint32_t number = 0;;) {
        number = wait_for_change(number);
        if (own < job_workers) work(number);
    }
    return 0;
}

// Threads do not survive a fork.
static void forget_workers(void) {
    num_workers = 0;
    num_sleeping = 0;
    pthread_mutex_init(&calling, 0);
    pthread_mutex_init(&lock, 0);
    pthread_cond_init(&wake, 0);
}

static void start_workers(int64_t wanted) {
    static bool watches_forks;
    if (!watches_forks) watches_forks = !pthread_atfork(0, 0, forget_workers);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (num_workers < wanted && num_workers < MAX_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, worker, (void*)(intptr_t)num_workers)) break;
        num_workers++;
    }
    pthread_attr_destroy(&attributes);
}

void pool_run(Task task, const void* context, int64_t count, int64_t threads) {
    if (threads <= 1 || count <= 1 || pthread_mutex_trylock(&calling)) {
        for (int64_t index = 0; index < count; index++) task(context, index);
        return;
    }
    if (num_workers < threads - 1) start_workers(threads - 1);
    uint32_t number = (uint32_t)(ticket >> 32) + 1;
    job_task = task;
    job_context = context;
    job_count = (uint32_t)count;
    job_workers = (int32_t)(threads - 1);
    num_done = 0;
    ticket = (uint64_t)number << 32;
    if (num_sleeping) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&lock);
    }
    work(number);
    for (int spin = 0; num_done < (uint32_t)count; spin++) {
        if (spin < SPINS_TO_YIELD)
            PAUSE();
        else
            sched_yield();
    }
    // Nobody takes a task any more, and nobody has one.
    ticket = (uint64_t)(number + 1) << 32;
    pthread_mutex_unlock(&calling);
}
