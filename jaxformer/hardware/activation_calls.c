// GELU for XLA on CPUs, alone and with its slope, which the backward pass multiplies by.
//
// XLA makes the two in separate passes, and what they have in common twice.

#include <math.h>

#include "custom_calls.h"
#include "vectors.h"

// Numbers of a block.
enum { kNumbers = 16384 };

typedef struct {
  Job job;
  const float* x;
  // Without slopes the pointer is NULL.
  float *y, *slopes;
  int64_t size;
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

// Computes x Φ(x), and its slope Φ(x) + x φ(x).
INLINE void compute_exact(const float* x, float* y, float* slopes) {
  const Vector in = load(x);
  const Vector cdf = 0.5f + 0.5f * error_function(in * 0.70710678118654752f);
  store(y, in * cdf);
  if (slopes) store(slopes, cdf + in * exponential(in * in * -0.5f) * 0.3989422804014327f);
}

// Computes x s(2 u) with the logistic function s and u = root (x + 0.044715 x³), and its slope.
INLINE void compute_by_tanh(const float* x, float* y, float* slopes, float root) {
  const Vector in = load(x), square = in * in;
  const Vector u = 2 * root * in * (1 + 0.044715f * square);
  // exp is of numbers of at most 0: s(-u) = 1 - s(u).
  const Integers is_negative = u < spread(0);
  const Vector power = exponential(choose(is_negative, u, -u));
  const Vector of_negative = power / (1 + power), of_positive = 1 / (1 + power);
  const Vector gate = choose(is_negative, of_negative, of_positive);
  store(y, in * gate);
  if (!slopes) return;
  const Vector slope = 2 * root * (1 + 3 * 0.044715f * square);
  store(slopes, gate + in * (of_negative * of_positive) * slope);
}

INLINE void compute_some(const float* x, float* y, float* slopes, float root) {
  if (root == 0) compute_exact(x, y, slopes);
  else compute_by_tanh(x, y, slopes, root);
}

INLINE void compute_block(const Activation* p, int block, bool with_slopes, float root) {
  const int64_t from = (int64_t)block * kNumbers;
  const int64_t end = from + kNumbers < p->size ? from + kNumbers : p->size;
  int64_t i = from;
  for (; i + kLanes <= end; i += kLanes)
    compute_some(p->x + i, p->y + i, with_slopes ? p->slopes + i : NULL, root);
  if (i == end) return;
  float x[kLanes] = {0}, y[kLanes], slopes[kLanes];
  memcpy(x, p->x + i, (end - i) * sizeof(float));
  compute_some(x, y, slopes, root);
  memcpy(p->y + i, y, (end - i) * sizeof(float));
  if (with_slopes) memcpy(p->slopes + i, slopes, (end - i) * sizeof(float));
}

static void compute(const Job* job, int block) {
  const Activation* p = (const Activation*)job;
  if (p->root == 0 && p->slopes) compute_block(p, block, true, 0);
  else if (p->root == 0) compute_block(p, block, false, 0);
  else compute_block(p, block, p->slopes != NULL, p->root);
}

// A number takes about as long as so many operations of a product.
static const double kOperationsPerNumber = 60;

static XLA_FFI_Error* activate(XLA_FFI_CallFrame* frame, bool with_slopes) {
  if (answers_question(frame)) return NULL;
  const XLA_FFI_Buffer* x = argument(frame, 0);
  Activation* p = calloc(1, sizeof(Activation));
  if (p == NULL) return fail(frame->api, "no memory for an activation");
  p->job.compute = compute;
  p->x = x->data;
  p->y = result(frame, 0)->data;
  p->slopes = with_slopes ? result(frame, 1)->data : NULL;
  p->size = x->dims[0];
  p->root = *(const float*)argument(frame, 1)->data;
  p->job.count = (int)((p->size + kNumbers - 1) / kNumbers);
  finish(&p->job, frame, share_of_threads(frame, kOperationsPerNumber * p->size));
  return NULL;
}

XLA_FFI_Error* jaxformer_gelu(XLA_FFI_CallFrame* frame) { return activate(frame, false); }

XLA_FFI_Error* jaxformer_gelu_and_slope(XLA_FFI_CallFrame* frame) {
  return activate(frame, true);
}
