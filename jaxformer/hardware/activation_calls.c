// GELU of x + bias for XLA on CPUs, alone and with its slope; and its gradients, of that slope.
//
// XLA makes GELU and its slope in separate passes, and what they have in common twice. Each pass reads
// from memory what does not fit a cache, so the bias is added, and its gradient summed, on the way.

#include "custom_calls.h"
#include "gelu.h"

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

// A block is the rows of a part. Returns where it begins in the arrays, and how many rows it has.
static int64_t block_of(const Activation* p, int block, int* rows) {
  *rows = least(kRowsOfPart, p->rows - block * kRowsOfPart);
  return (int64_t)block * kRowsOfPart * p->columns;
}

static void activate(const Job* job, int block) {
  const Activation* p = (const Activation*)job;
  int rows;
  const int64_t at = block_of(p, block, &rows);
  activate_rows(p->x + at, p->bias, p->y + at, p->slopes ? p->slopes + at : NULL, p->columns, rows,
                p->columns, p->root);
}

static void differentiate(const Job* job, int block) {
  const Activation* p = (const Activation*)job;
  int rows;
  const int64_t at = block_of(p, block, &rows);
  float* part = p->parts + (int64_t)block * p->columns;
  differentiate_rows(p->dy + at, p->slopes + at, p->dx + at, part, p->columns, rows, p->columns);
}

// Returns what both ways have in common, given an array of all rows; NULL without memory.
static Activation* start(const XLA_FFI_Buffer* array, void (*compute)(const Job*, int)) {
  Activation* p = calloc(1, sizeof(Activation));
  if (p == NULL) return NULL;
  p->job.compute = compute;
  p->rows = (int)array->dims[0];
  p->columns = (int)array->dims[1];
  p->job.count = (p->rows + kRowsOfPart - 1) / kRowsOfPart;
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
