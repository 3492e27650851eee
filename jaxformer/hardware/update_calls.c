// What AdamW makes of gradients, and the sum of their squares, for XLA on CPUs.
//
// All arrays are float32. XLA makes a program of its own for each array of a model, which takes it as
// long to compile as the rest of a step of a small model. Here one call updates all arrays in place.

#include <math.h>

#include "custom_calls.h"
#include "vectors.h"

// Numbers of a block. Sums are made by block, so they do not depend on who computes them.
enum { kNumbers = 16384 };
// Vectors at a time: each sum waits for the one before.
enum { kChains = 4 };

typedef struct {
  const float* gradient;
  // In an update alone.
  float *x, *mu, *nu, decay;
  int64_t count;
  // The number of its first block among those of all arrays.
  int first_block;
} Numbers;

typedef struct {
  Job job;
  // Of each block, in a sum.
  double* sums;
  // In an update: what gradients and updates are multiplied by, and the moments before they are used.
  float scale, rate, of_mu, of_nu;
  // What is kept of each moment, and what is added of gradients and their squares.
  float kept_mu, added_mu, kept_nu, added_nu, eps;
  int arrays;
  Numbers of[];
} Update;

// Returns the array that a block is of, and where in it the block begins and ends.
static const Numbers* find(const Update* p, int block, int64_t* from, int64_t* end) {
  int i = p->arrays - 1;
  while (p->of[i].first_block > block) --i;
  *from = (int64_t)(block - p->of[i].first_block) * kNumbers;
  *end = *from + kNumbers < p->of[i].count ? *from + kNumbers : p->of[i].count;
  return &p->of[i];
}

static void add_squares(const Job* job, int block) {
  const Update* p = (const Update*)job;
  int64_t i, end;
  const float* x = find(p, block, &i, &end)->gradient;
  Vector sums[kChains] = {{0}};
  for (; i + kChains * kLanes <= end; i += kChains * kLanes)
    UNROLL for (int j = 0; j < kChains; ++j) {
      const Vector some = load(x + i + j * kLanes);
      sums[j] += some * some;
    }
  for (; i < end; i += kLanes) {
    const Vector some = load_some(x + i, end - i < kLanes ? (int)(end - i) : kLanes, 0);
    sums[0] += some * some;
  }
  p->sums[block] = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

INLINE void update_some(const Update* p, const Numbers* of, int64_t at, const int count) {
  const Vector gradient = load_some(of->gradient + at, count, 0) * p->scale;
  const Vector x = load_some(of->x + at, count, 0);
  const Vector mu = load_some(of->mu + at, count, 0) * p->kept_mu + gradient * p->added_mu;
  const Vector nu =
      load_some(of->nu + at, count, 0) * p->kept_nu + gradient * gradient * p->added_nu;
  const Vector step = mu * p->of_mu / (root(nu * p->of_nu) + p->eps) + x * of->decay;
  store_some(of->mu + at, count, mu);
  store_some(of->nu + at, count, nu);
  store_some(of->x + at, count, x - step * p->rate);
}

static void update(const Job* job, int block) {
  const Update* p = (const Update*)job;
  int64_t i, end;
  const Numbers* of = find(p, block, &i, &end);
  for (; i + kLanes <= end; i += kLanes) update_some(p, of, i, kLanes);
  if (i < end) update_some(p, of, i, (int)(end - i));
}

// Returns a job for so many arrays, whose gradients are arguments from this one on; NULL without
// memory.
static Update* start(const XLA_FFI_CallFrame* frame, int arrays, int gradients,
                     void (*compute)(const Job*, int)) {
  Update* p = calloc(1, sizeof(Update) + arrays * sizeof(Numbers));
  if (p == NULL) return NULL;
  p->job.compute = compute;
  p->arrays = arrays;
  for (int i = 0; i < arrays; ++i) {
    const XLA_FFI_Buffer* gradient = argument(frame, gradients + i);
    Numbers* of = &p->of[i];
    of->gradient = gradient->data;
    of->count = 1;
    for (int64_t dim = 0; dim < gradient->rank; ++dim) of->count *= gradient->dims[dim];
    of->first_block = p->job.count;
    p->job.count += (int)((of->count + kNumbers - 1) / kNumbers);
  }
  return p;
}

// A number takes about as long as so many operations of a product.
static const double kOperationsPerNumber = 60, kOperationsPerSquare = 8;

static double numbers_of(const Update* p) { return (double)p->job.count * kNumbers; }

// Takes arrays, and gives the sum of the squares of all their numbers.
XLA_FFI_Error* jaxformer_sum_squares(XLA_FFI_CallFrame* frame) {
  if (answers_question(frame)) return NULL;
  Update* p = start(frame, (int)frame->args.size, 0, add_squares);
  const int blocks = p == NULL ? 0 : p->job.count;
  double* sums = calloc(blocks + 1, sizeof(double));
  if (p == NULL || sums == NULL) {
    free(p);
    free(sums);
    return fail(frame->api, "no memory for a sum of squares");
  }
  p->sums = sums;
  finish(&p->job, frame, share_of_threads(frame, kOperationsPerSquare * numbers_of(p)));
  double sum = 0;
  for (int block = 0; block < blocks; ++block) sum += sums[block];
  free(sums);
  *(float*)result(frame, 0)->data = (float)sum;
  return NULL;
}

// Takes arrays, their gradients and their first and second moments, which are as many; how much each
// array decays; what changes from update to update; and what does not. The results, arrays and moments,
// are where the arguments are. Nothing is changed where the update is not wanted.
XLA_FFI_Error* jaxformer_adamw(XLA_FFI_CallFrame* frame) {
  if (answers_question(frame)) return NULL;
  const int arrays = (int)(frame->args.size - 3) / 4;
  const float* decays = argument(frame, 4 * arrays)->data;
  const float* changing = argument(frame, 4 * arrays + 1)->data;
  const float* settings = argument(frame, 4 * arrays + 2)->data;
  const bool is_wanted = changing[4] != 0;
  if (!is_wanted) return NULL;
  Update* p = start(frame, arrays, arrays, update);
  if (p == NULL) return fail(frame->api, "no memory for an update");
  for (int i = 0; i < arrays; ++i) {
    p->of[i].x = result(frame, i)->data;
    p->of[i].mu = result(frame, arrays + i)->data;
    p->of[i].nu = result(frame, 2 * arrays + i)->data;
    p->of[i].decay = decays[i];
  }
  p->scale = changing[0];
  p->rate = changing[1];
  p->of_mu = changing[2];
  p->of_nu = changing[3];
  p->kept_mu = settings[0];
  p->added_mu = settings[1];
  p->kept_nu = settings[2];
  p->added_nu = settings[3];
  p->eps = settings[4];
  finish(&p->job, frame, share_of_threads(frame, kOperationsPerNumber * numbers_of(p)));
  return NULL;
}
