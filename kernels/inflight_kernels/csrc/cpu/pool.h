// Threads that share the tasks of a call. The caller works as well and waits for tasks, not for
// threads: one that the system does not run at the moment takes no task and delays nobody.
#pragma once

#include <stdint.h>

typedef void (*Task)(const void* context, int64_t index);

// Run task(context, i) for i in 0..count-1 on at most so many threads, the caller among them.
void pool_run(Task task, const void* context, int64_t count, int64_t threads);
