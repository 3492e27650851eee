// What custom calls of XLA on CPUs share: work cut into blocks, which the threads of XLA's own pool
// take, and answers to XLA's questions.

// For clock_gettime.
#define _POSIX_C_SOURCE 200809L

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "xla/ffi/api/c_api.h"

static inline int least(int a, int b) { return a < b ? a : b; }

// A matrix: where it begins, and how far apart its rows are.
typedef struct {
  float* data;
  int stride;
} Matrix;

// Where the matrix (tokens, width) of a head begins in an array (texts, tokens, heads, width).
static inline Matrix head_of(float* array, int text, int tokens, int head, int heads, int width) {
  const Matrix found = {array + ((int64_t)text * tokens * heads + head) * width, heads * width};
  return found;
}

// What threads do together: they take blocks one after the other. The thread that waits for them
// takes blocks too, so that it never waits for one that nobody computes.
typedef struct Job {
  void (*compute)(const struct Job* job, int block);
  int count;
  // Whether another job follows soon, and nothing else that the pool's threads are wanted for.
  bool lingers;
  atomic_int next, done, owners;
} Job;

static void compute_blocks(Job* job) {
  for (int block = atomic_fetch_add(&job->next, 1); block < job->count;
       block = atomic_fetch_add(&job->next, 1)) {
    job->compute(job, block);
    atomic_fetch_add(&job->done, 1);
  }
}

// A thread of the pool may come only after the last block was taken: the last one to leave frees.
static void leave(Job* job) {
  if (atomic_fetch_sub(&job->owners, 1) == 1) free(job);
}

static void work_on(Job* job) {
  compute_blocks(job);
  leave(job);
}

// A thread of the pool that sleeps takes longer to come than a short job takes. After a job that says so
// it waits some time, in a seat of its own, for the next one, which may be of another kind. A seat is
// empty, or has a thread that waits, or the job that the thread works on. Where no job says so, LINGERS
// is not defined.
#ifdef LINGERS
enum { kSeats = 64, kLingerMicroseconds = 100 };
typedef struct {
  _Alignas(64) _Atomic(Job*) job;
} Seat;
static Seat seats[kSeats];
static Job waits;

// Hands a job to a thread that waits, if there is one.
static bool hand_over(Job* job) {
  for (int i = 0; i < kSeats; ++i) {
    Job* found = &waits;
    if (atomic_load(&seats[i].job) == found &&
        atomic_compare_exchange_strong(&seats[i].job, &found, job))
      return true;
  }
  return false;
}

static int64_t microseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000) + now.tv_nsec / 1000;
}

// Waits a moment in which a thread on the same core computes.
static void pause_core(void) {
#if defined(__x86_64__)
  for (int i = 0; i < 10; ++i) __builtin_ia32_pause();
#endif
  sched_yield();
}

// Returns the next job; NULL once the thread has left its seat.
static Job* wait_for_job(Seat* seat) {
  const int64_t end = microseconds() + kLingerMicroseconds;
  Job* found;
  while ((found = atomic_load(&seat->job)) == &waits) {
    if (microseconds() > end && atomic_compare_exchange_strong(&seat->job, &found, NULL))
      return NULL;
    pause_core();
  }
  return found;
}

static void linger(void) {
  for (int i = 0; i < kSeats; ++i) {
    Job* found = NULL;
    if (!atomic_compare_exchange_strong(&seats[i].job, &found, &waits)) continue;
    while ((found = wait_for_job(&seats[i])) != NULL) {
      work_on(found);
      atomic_store(&seats[i].job, &waits);
    }
    return;
  }
}
#else
static bool hand_over(Job* job) {
  (void)job;
  return false;
}
static void linger(void) {}
#endif

static void run_task(void* job) {
  const bool lingers = ((Job*)job)->lingers;
  work_on(job);
  if (lingers) linger();
}

static bool succeeded(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  if (error == NULL) return true;
  XLA_FFI_Error_Destroy_Args arguments = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  api->XLA_FFI_Error_Destroy(&arguments);
  return false;
}

// Returns how many threads XLA's pool has.
static int pool_threads(const XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args arguments = {
      XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx, &threads};
  // Without a pool the calling thread computes alone.
  if (!succeeded(frame->api, frame->api->XLA_FFI_ThreadPool_NumThreads(&arguments))) return 1;
  return threads < 1 ? 1 : (int)threads;
}

// Devices of this process, which share its threads.
static int devices = 1;

void jaxformer_set_devices(int number) { devices = number; }

// To hand a product of fewer operations to another thread costs more than it saves. Where devices
// compute at the same time, each takes its share of the threads, until a product is so long that
// one of them may wait for it.
static const double kFewestOperations = 1e6, kFewestForAllThreads = 6e7;

// Returns on how many threads so many operations are best computed.
static inline int share_of_threads(const XLA_FFI_CallFrame* frame, double operations) {
  if (operations < kFewestOperations) return 1;
  const int threads = pool_threads(frame);
  const int share = operations < kFewestForAllThreads ? threads / devices : threads;
  return share < 1 ? 1 : share;
}

// Computes all blocks on so many threads, and frees the job.
static void finish(Job* job, const XLA_FFI_CallFrame* frame, int threads) {
  atomic_init(&job->next, 0);
  atomic_init(&job->done, 0);
  atomic_init(&job->owners, 1);
  for (int i = 1; i < threads && i < job->count; ++i) {
    XLA_FFI_ThreadPool_Schedule_Args arguments = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE,
                                                  NULL, frame->ctx, run_task, job};
    atomic_fetch_add(&job->owners, 1);
    if (hand_over(job)) continue;
    if (!succeeded(frame->api, frame->api->XLA_FFI_ThreadPool_Schedule(&arguments))) leave(job);
  }
  compute_blocks(job);
  while (atomic_load(&job->done) < job->count) sched_yield();
  leave(job);
}

// Writes the sums of what all blocks have made: parts of so many numbers, which are so far apart.
static inline void add_parts(const float* parts, int count, int apart, int width, float* sums) {
  memset(sums, 0, width * sizeof(float));
  for (int part = 0; part < count; ++part)
    for (int i = 0; i < width; ++i) sums[i] += parts[(int64_t)part * apart + i];
}

// XLA asks first what version of the interface this was built for. The type of the first member has
// another name from version 0.5 on, so it is not named here.
static bool answers_question(const XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Metadata_Extension* question = (const void*)frame->extension_start;
  if (question == NULL || question->extension_base.type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata* about = question->metadata;
  about->api_version.major_version = XLA_FFI_API_MAJOR;
  about->api_version.minor_version = XLA_FFI_API_MINOR;
  about->traits = 0;
  return true;
}

static XLA_FFI_Error* fail(const XLA_FFI_Api* api, const char* message) {
  XLA_FFI_Error_Create_Args arguments = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message,
                                         XLA_FFI_Error_Code_INTERNAL};
  return api->XLA_FFI_Error_Create(&arguments);
}

static const XLA_FFI_Buffer* argument(const XLA_FFI_CallFrame* frame, int number) {
  return frame->args.args[number];
}

static const XLA_FFI_Buffer* result(const XLA_FFI_CallFrame* frame, int number) {
  return frame->rets.rets[number];
}
