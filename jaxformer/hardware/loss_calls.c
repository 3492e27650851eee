// What the cross-entropy of rows of logits needs, for XLA on CPUs: the sum of their exponentials, the
// logit of the target, and the gradient.
//
// All arrays of numbers are float32. XLA makes a pass over all rows for each of the largest logits,
// the differences from them, the sums, and what the gradient adds. Here a row stays in a core's cache.

#include <math.h>

#include "custom_calls.h"
#include "vectors.h"

// Numbers of a block, whose rows are whole. And vectors at a time: each waits for the one before.
enum { kNumbers = 16384, kChains = 4 };

typedef struct {
  Job job;
  const float* x;
  const int32_t* targets;
  // Of each row: a shift, which is the largest logit, or 0 where that is infinite; and the sum of
  // exp(logit - shift).
  float *moments, *picked;
  // The gradients of the logarithms of the sums, and of the logits that were picked.
  const float *of_logarithms, *of_picked;
  float* dx;
  int64_t rows, classes, rows_of_block;
} Losses;

INLINE float largest_of(const float* x, int64_t classes) {
  Vector found[kChains];
  UNROLL for (int j = 0; j < kChains; ++j) found[j] = spread(-INFINITY);
  int64_t i = 0;
  for (; i + kChains * kLanes <= classes; i += kChains * kLanes)
    UNROLL for (int j = 0; j < kChains; ++j) found[j] = larger(load(x + i + j * kLanes), found[j]);
  for (; i < classes; i += kLanes) {
    const int count = classes - i < kLanes ? (int)(classes - i) : kLanes;
    found[0] = larger(load_some(x + i, count, -INFINITY), found[0]);
  }
  const Vector both = larger(larger(found[0], found[1]), larger(found[2], found[3]));
  float largest = -INFINITY;
  for (int j = 0; j < kLanes; ++j) largest = both[j] > largest ? both[j] : largest;
  return largest;
}

INLINE float sum_exponentials(const float* x, int64_t classes, float shift) {
  Vector sums[kChains] = {{0}};
  int64_t i = 0;
  for (; i + kChains * kLanes <= classes; i += kChains * kLanes)
    UNROLL for (int j = 0; j < kChains; ++j)
      sums[j] += exponential(load(x + i + j * kLanes) - shift);
  for (; i < classes; i += kLanes) {
    const int count = classes - i < kLanes ? (int)(classes - i) : kLanes;
    sums[0] += exponential(load_some(x + i, count, -INFINITY) - shift);
  }
  return total((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Returns Σ exp(x) of a row whose largest number is infinite: infinity, or 0 where all are -∞; not a
// number where one is none.
static float sum_infinite(const float* x, int64_t classes) {
  float sum = 0;
  for (int64_t i = 0; i < classes; ++i) sum += x[i] <= 0 ? 0 : x[i];
  return sum;
}

static void sum_rows(const Job* job, int block) {
  const Losses* p = (const Losses*)job;
  const int64_t from = block * p->rows_of_block, end = from + p->rows_of_block;
  for (int64_t row = from; row < end && row < p->rows; ++row) {
    const float* x = p->x + row * p->classes;
    const float largest = largest_of(x, p->classes);
    const bool is_infinite = isinf(largest);
    p->moments[2 * row] = is_infinite ? 0 : largest;
    p->moments[2 * row + 1] =
        is_infinite ? sum_infinite(x, p->classes) : sum_exponentials(x, p->classes, largest);
    // As JAX does, of a target that is no class the nearest class is picked.
    const int64_t target = p->targets[row] < 0 ? 0 : p->targets[row];
    p->picked[row] = x[target < p->classes ? target : p->classes - 1];
  }
}

// The gradient may lie where the logits do.
static void differentiate_rows(const Job* job, int block) {
  const Losses* p = (const Losses*)job;
  const int64_t from = block * p->rows_of_block, end = from + p->rows_of_block;
  for (int64_t row = from; row < end && row < p->rows; ++row) {
    const float* x = p->x + row * p->classes;
    float* dx = p->dx + row * p->classes;
    const float shift = p->moments[2 * row];
    const float factor = p->of_logarithms[row] / p->moments[2 * row + 1];
    int64_t i = 0;
    for (; i + kLanes <= p->classes; i += kLanes)
      store(dx + i, exponential(load(x + i) - shift) * factor);
    if (i < p->classes) {
      const int count = (int)(p->classes - i);
      store_some(dx + i, count, exponential(load_some(x + i, count, shift) - shift) * factor);
    }
    const int32_t target = p->targets[row];
    if (target >= 0 && target < p->classes) dx[target] += p->of_picked[row];
  }
}

// A number takes about as long as so many operations of a product.
static const double kOperationsPerNumber = 40;

static Losses* read_arguments(const XLA_FFI_CallFrame* frame, void (*compute)(const Job*, int)) {
  Losses* p = calloc(1, sizeof(Losses));
  if (p == NULL) return NULL;
  const XLA_FFI_Buffer* x = argument(frame, 0);
  p->job.compute = compute;
  p->x = x->data;
  p->targets = argument(frame, 1)->data;
  p->rows = x->dims[0];
  p->classes = x->dims[1];
  p->rows_of_block = p->classes < kNumbers ? kNumbers / p->classes : 1;
  p->job.count = (int)((p->rows + p->rows_of_block - 1) / p->rows_of_block);
  return p;
}

static void compute(Losses* p, const XLA_FFI_CallFrame* frame) {
  finish(&p->job, frame, share_of_threads(frame, kOperationsPerNumber * p->rows * p->classes));
}

XLA_FFI_Error* jaxformer_losses(XLA_FFI_CallFrame* frame) {
  if (answers_question(frame)) return NULL;
  Losses* p = read_arguments(frame, sum_rows);
  if (p == NULL) return fail(frame->api, "no memory for a loss");
  p->moments = result(frame, 0)->data;
  p->picked = result(frame, 1)->data;
  compute(p, frame);
  return NULL;
}

XLA_FFI_Error* jaxformer_losses_back(XLA_FFI_CallFrame* frame) {
  if (answers_question(frame)) return NULL;
  Losses* p = read_arguments(frame, differentiate_rows);
  if (p == NULL) return fail(frame->api, "no memory for a loss");
  p->moments = argument(frame, 2)->data;
  p->of_logarithms = argument(frame, 3)->data;
  p->of_picked = argument(frame, 4)->data;
  p->dx = result(frame, 0)->data;
  compute(p, frame);
  return NULL;
}
