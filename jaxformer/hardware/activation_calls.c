// GELU of x + bias for XLA on CPUs, alone and with its slope; and its gradients, of that slope.
//
// XLA makes GELU and its slope in separate passes, and what they have in common twice. Each pass reads
// from memory what does not fit a cache, so the bias is added, and its gradient summed, on the way.

#include <math.h>

#include "custom_calls.h"
#include "vectors.h"

// Rows of a block, whose sums are made by block, so that they do not depend on who computes them.
enum { kRows = 16 };

typedef struct {
  Job job;
  // All of so many rows and columns, but for the bias, which has a number for each column.
  const float *x, *bias;
  // Without slopes the pointer is NULL.
  float *y, *slopes;
  // On the way back: the gradients of the result and of x, and of each block that of the bias.
  const float* dy;
  float *dx, *parts;
  int rows, columns;
  // Of the approximation by tanh; 0 is exact.
  float root;
} Activation;

// Returns erf(x), of a rational function on the numbers where it is not ±1 in float32 (Eigen's).
static inline Vector error_function(Vector x) {
  const Vector largest = spread(3.832506856900711f);
  x = -larger(-larger(x, -largest), -largest);
  const Vector s = x * x;
  Vector p = s * 0.00022905065861350646f + 0.0034082910107109506f;
  p = p * s + 0.050955695062380861f;
  p = p * s + 0.18520832239976145f;
  p = p * s + 1.128379143519084f;
  Vector q = s * -1.1791602954361697e-7f + 0.000023547966471313185f;
  q = q * s + 0.0010179625278914885f;
  q = q * s + 0.014070470171167667f;
  q = q * s + 0.11098505178285362f;
  q = q * s + 0.49746925110067538f;
  q = q * s + 1.0f;
  return x * p / q;
}

// Computes in Φ(in), and its slope Φ(in) + in φ(in).
INLINE Vector compute_exact(Vector in, Vector* slope) {
  const Vector cdf = 0.5f + 0.5f * error_function(in * 0.70710678118654752f);
  *slope = cdf + in * exponential(in * in * -0.5f) * 0.3989422804014327f;
  return in * cdf;
}

// Computes in s(2 u) with the logistic function s and u = root (in + 0.044715 in³), and its slope.
INLINE Vector compute_by_tanh(Vector in, Vector* slope, float root) {
  const Vector square = in * in;
  const Vector u = 2 * root * in * (1 + 0.044715f * square);
  // exp is of numbers of at most 0: s(-u) = 1 - s(u).
  const Integers is_negative = u < spread(0);
  const Vector power = exponential(choose(is_negative, u, -u));
  const Vector of_negative = power / (1 + power), of_positive = 1 / (1 + power);
  const Vector gate = choose(is_negative, of_negative, of_positive);
  *slope = gate + in * (of_negative * of_positive) * (2 * root * (1 + 3 * 0.044715f * square));
  return in * gate;
}

// Of some numbers of a row, which begin at so many. Slopes that nobody wants are not computed.
INLINE void compute_some(const Activation* p, int64_t row, int column, const int count,
                         const bool with_slopes, const bool is_exact) {
  const int64_t at = row * p->columns + column;
  const Vector in = load_some(p->x + at, count, 0) + load_some(p->bias + column, count, 0);
  Vector slope;
  store_some(p->y + at, count,
             is_exact ? compute_exact(in, &slope) : compute_by_tanh(in, &slope, p->root));
  if (with_slopes) store_some(p->slopes + at, count, slope);
}

INLINE void compute_rows(const Activation* p, int block, const bool with_slopes,
                         const bool is_exact) {
  const int end = (block + 1) * kRows < p->rows ? (block + 1) * kRows : p->rows;
  for (int row = block * kRows; row < end; ++row) {
    int column = 0;
    for (; column + kLanes <= p->columns; column += kLanes)
      compute_some(p, row, column, kLanes, with_slopes, is_exact);
    if (column < p->columns)
      compute_some(p, row, column, p->columns - column, with_slopes, is_exact);
  }
}

static void activate(const Job* job, int block) {
  const Activation* p = (const Activation*)job;
  if (p->root == 0 && p->slopes) compute_rows(p, block, true, true);
  else if (p->root == 0) compute_rows(p, block, false, true);
  else if (p->slopes) compute_rows(p, block, true, false);
  else compute_rows(p, block, false, false);
}

// Writes some numbers of dx, and adds them to the block's part of the bias's gradient.
INLINE void differentiate_some(const Activation* p, int64_t row, int column, const int count,
                               float* part) {
  const int64_t at = row * p->columns + column;
  const Vector dx = load_some(p->dy + at, count, 0) * load_some(p->slopes + at, count, 0);
  store_some(p->dx + at, count, dx);
  store_some(part + column, count, load_some(part + column, count, 0) + dx);
}

static void differentiate(const Job* job, int block) {
  const Activation* p = (const Activation*)job;
  float* part = p->parts + (int64_t)block * p->columns;
  const int end = (block + 1) * kRows < p->rows ? (block + 1) * kRows : p->rows;
  for (int row = block * kRows; row < end; ++row) {
    int column = 0;
    for (; column + kLanes <= p->columns; column += kLanes)
      differentiate_some(p, row, column, kLanes, part);
    if (column < p->columns) differentiate_some(p, row, column, p->columns - column, part);
  }
}

// Returns what both ways have in common, given an array of all rows; NULL without memory.
static Activation* start(const XLA_FFI_Buffer* array, void (*compute)(const Job*, int)) {
  Activation* p = calloc(1, sizeof(Activation));
  if (p == NULL) return NULL;
  p->job.compute = compute;
  p->rows = (int)array->dims[0];
  p->columns = (int)array->dims[1];
  p->job.count = (p->rows + kRows - 1) / kRows;
  return p;
}

// A number takes about as long as so many operations of a product.
static const double kOperationsPerNumber = 60, kOperationsPerNumberBack = 20;

static XLA_FFI_Error* activate_all(XLA_FFI_CallFrame* frame, bool with_slopes) {
  if (answers_question(frame)) return NULL;
  Activation* p = start(argument(frame, 0), activate);
  if (p == NULL) return fail(frame->api, "no memory for an activation");
  p->x = argument(frame, 0)->data;
  p->bias = argument(frame, 1)->data;
  p->root = *(const float*)argument(frame, 2)->data;
  p->y = result(frame, 0)->data;
  p->slopes = with_slopes ? result(frame, 1)->data : NULL;
  const double operations = kOperationsPerNumber * p->rows * p->columns;
  finish(&p->job, frame, share_of_threads(frame, operations));
  return NULL;
}

XLA_FFI_Error* jaxformer_gelu(XLA_FFI_CallFrame* frame) { return activate_all(frame, false); }

XLA_FFI_Error* jaxformer_gelu_and_slope(XLA_FFI_CallFrame* frame) {
  return activate_all(frame, true);
}

XLA_FFI_Error* jaxformer_gelu_back(XLA_FFI_CallFrame* frame) {
  if (answers_question(frame)) return NULL;
  Activation* p = start(argument(frame, 0), differentiate);
  if (p == NULL) return fail(frame->api, "no memory for an activation");
  const int count = p->job.count, columns = p->columns;
  p->dy = argument(frame, 0)->data;
  p->slopes = argument(frame, 1)->data;
  p->dx = result(frame, 0)->data;
  float *parts = calloc((size_t)count * columns + 1, sizeof(float)), *sums = result(frame, 1)->data;
  if (parts == NULL) {
    free(p);
    return fail(frame->api, "no memory for an activation");
  }
  p->parts = parts;
  const double operations = kOperationsPerNumberBack * p->rows * columns;
  finish(&p->job, frame, share_of_threads(frame, operations));
  add_parts(parts, count, columns, columns, sums);
  free(parts);
  return NULL;
}
