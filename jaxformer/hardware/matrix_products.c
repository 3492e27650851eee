// Matrix products for XLA on CPUs.
//
// XLA calls the functions at the end: for products of two matrices, also with GELU or its gradients,
// of the heads of attention, and of rows in groups. All arrays are float32, each row after row. A
// result is cut into blocks, which the threads of XLA's own pool take, and each block is a product of
// matrices on one thread.

#include "custom_calls.h"
#include "gelu.h"

// What is done to a part of a result as soon as it is complete, while it is in a core's cache.
typedef void Finish(const void* product, Matrix part, int rows, int columns);

// Built with SGEMM the products are those of a library, else jaxformer's own.
#ifdef SGEMM
#include "product_by_sgemm.h"
#else
#include "product_by_tiles.h"
#endif

static const char kNoMemory[] = "no memory for a matrix product";
// Of a result that is cut by rows, each part has a multiple of so many.
enum { kRowStep = 16 };
_Static_assert(kRowStep % kRowsOfPart == 0, "threads share no part of a bias's gradient");

static void multiply_matrices(Matrix a, bool transpose_a, Matrix b, bool transpose_b, Matrix c,
                              int rows, int columns, int inner, bool adds) {
  multiply_and_finish(a, transpose_a, b, transpose_b, c, rows, columns, inner, adds, NULL, NULL);
}

// A product of two matrices, of which each block is some rows of the result, or some columns.
typedef struct {
  Job job;
  Matrix a, b, c;
  int rows, columns, inner;
  bool transpose_a, transpose_b;
  bool cuts_rows;
  int width;
  // NULL, or what is done with the result, for which the rest is.
  Finish* finish;
  const float* bias;
  // As large as the result; and for so many of its rows each, gradients of the bias. Either may be NULL.
  float *slopes, *parts;
  float root;
} Product;

static void compute_part(const Job* job, int block) {
  const Product* p = (const Product*)job;
  const int64_t first = (int64_t)block * p->width;
  const int width = least(p->width, (p->cuts_rows ? p->rows : p->columns) - (int)first);
  Matrix a = p->a, b = p->b, c = p->c;
  if (p->cuts_rows) {
    a.data += p->transpose_a ? first : first * a.stride;
    c.data += first * c.stride;
  } else {
    b.data += p->transpose_b ? first * b.stride : first;
    c.data += first;
  }
  multiply_and_finish(a, p->transpose_a, b, p->transpose_b, c, p->cuts_rows ? width : p->rows,
                      p->cuts_rows ? p->columns : width, p->inner, false, p->finish, p);
}

// Makes y of a result, and the slopes.
static void activate_part(const void* product, Matrix part, int rows, int columns) {
  const Product* p = product;
  const int64_t at = part.data - p->c.data;
  activate_rows(part.data, p->bias + at % part.stride, part.data,
                p->slopes ? p->slopes + at : NULL, part.stride, rows, columns, p->root);
}

// Multiplies a result, which is the gradient of y, by the slopes.
static void differentiate_part(const void* product, Matrix part, int rows, int columns) {
  const Product* p = product;
  int64_t at = part.data - p->c.data;
  const int64_t column = at % part.stride;
  for (int row = (int)(at / part.stride), some; rows > 0; rows -= some, row += some) {
    some = least(kRowsOfPart - row % kRowsOfPart, rows);
    float* of_bias = p->parts ? p->parts + row / kRowsOfPart * (int64_t)part.stride + column : NULL;
    differentiate_rows(p->c.data + at, p->slopes + at, p->c.data + at, of_bias, part.stride, some,
                       columns);
    at += (int64_t)some * part.stride;
  }
}

// Cuts so many rows or columns into at most so many parts, whose widths are multiples of the step.
static void cut_evenly(int size, int most, int step, int* width, int* parts) {
  const int share = size / most + (size % most != 0);
  *width = (share + step - 1) / step * step;
  *parts = size / *width + (size % *width != 0);
}

static void cut(Product* p, int threads) {
  p->cuts_rows = best_cut_by_rows(p->rows, p->columns, p->transpose_a, threads);
  const int size = p->cuts_rows ? p->rows : p->columns, step = p->cuts_rows ? kRowStep : kColumnStep;
  cut_evenly(size, threads, step, &p->width, &p->job.count);
}

// Products of each head of each text, of which one array or two have the heads within a token.
typedef enum { kScores, kWeighted, kWeightedBack } Form;

typedef struct {
  Job job;
  Form form;
  float *a, *b, *c;
  // Of the tokens that have keys, the first so many are used.
  int texts, queries, keys, tokens, heads, key_heads, width;
} Heads;

static void compute_head(const Job* job, int block) {
  const Heads* p = (const Heads*)job;
  const int shared = p->heads / p->key_heads;
  const int text = block / p->key_heads, key_head = block % p->key_heads;
  for (int i = 0; i < shared; ++i) {
    const int head = key_head * shared + i;
    float* weights = p->form == kScores ? p->c : p->a;
    const Matrix of_weights = {
        weights + ((int64_t)text * p->heads + head) * p->queries * p->keys, p->keys};
    float* per_query = p->form == kScores ? p->a : p->form == kWeighted ? p->c : p->b;
    float* per_key = p->form == kWeightedBack ? p->c : p->b;
    const Matrix of_queries = head_of(per_query, text, p->queries, head, p->heads, p->width);
    const Matrix of_keys = head_of(per_key, text, p->tokens, key_head, p->key_heads, p->width);
    if (p->form == kScores) {
      multiply_matrices(of_queries, false, of_keys, true, of_weights, p->queries, p->keys,
                        p->width, false);
    } else if (p->form == kWeighted) {
      multiply_matrices(of_weights, false, of_keys, false, of_queries, p->queries, p->width,
                        p->keys, false);
    } else {
      multiply_matrices(of_weights, true, of_queries, false, of_keys, p->keys, p->width,
                        p->queries, i > 0);
    }
  }
  if (p->form == kWeightedBack) {
    const Matrix unused = head_of(p->c, text, p->tokens, key_head, p->key_heads, p->width);
    for (int i = p->keys; i < p->tokens; ++i)
      memset(unused.data + (int64_t)i * unused.stride, 0, p->width * sizeof(float));
  }
}

// Products of rows, sorted by group, with the matrix of each row's group; or, with transposed rows,
// the matrix of each group, made of its rows in a and b.
typedef enum { kGrouped, kGroupedByTransposed, kGroupedMatrices } GroupedForm;

typedef struct {
  Job job;
  GroupedForm form;
  float *a, *b, *c;
  // Where the rows of each group begin, and where those of the last one end.
  const int32_t* first;
  // Numbers in a row of a and of the result, and how many of these a block has.
  int a_width, columns, width, parts;
} Groups;

static void compute_group(const Job* job, int block) {
  const Groups* p = (const Groups*)job;
  const int group = block / p->parts, from = block % p->parts * p->width;
  const int width = least(p->width, p->columns - from);
  const int64_t start = p->first[group];
  const int rows = p->first[group + 1] - (int)start;
  const int64_t of_group = (int64_t)group * p->a_width * p->columns;
  const Matrix a = {p->a + start * p->a_width, p->a_width};
  if (p->form == kGroupedMatrices) {
    const Matrix b = {p->b + start * p->columns + from, p->columns};
    const Matrix c = {p->c + of_group + from, p->columns};
    if (rows == 0) {
      for (int i = 0; i < p->a_width; ++i)
        memset(c.data + (int64_t)i * c.stride, 0, width * sizeof(float));
      return;
    }
    multiply_matrices(a, true, b, false, c, p->a_width, width, rows, false);
    return;
  }
  if (rows == 0) return;
  const bool transposes = p->form == kGroupedByTransposed;
  const Matrix b = {p->b + of_group + (transposes ? (int64_t)from * p->a_width : from),
                    transposes ? p->a_width : p->columns};
  const Matrix c = {p->c + start * p->columns + from, p->columns};
  multiply_matrices(a, false, b, transposes, c, rows, width, p->a_width, false);
}

// Returns the product of the first two arguments, of which none is empty; NULL without memory.
static Product* start(XLA_FFI_CallFrame* frame, bool transpose_a, bool transpose_b) {
  const XLA_FFI_Buffer* a = argument(frame, 0);
  const XLA_FFI_Buffer* b = argument(frame, 1);
  const XLA_FFI_Buffer* c = result(frame, 0);
  Product* p = calloc(1, sizeof(Product));
  if (p == NULL) return NULL;
  p->job.compute = compute_part;
  p->a = (Matrix){a->data, (int)a->dims[1]};
  p->b = (Matrix){b->data, (int)b->dims[1]};
  p->c = (Matrix){c->data, (int)c->dims[1]};
  p->rows = (int)c->dims[0];
  p->columns = (int)c->dims[1];
  p->inner = (int)a->dims[transpose_a ? 0 : 1];
  p->transpose_a = transpose_a;
  p->transpose_b = transpose_b;
  return p;
}

// Computes a product, and frees it.
static XLA_FFI_Error* compute(Product* p, XLA_FFI_CallFrame* frame) {
  const int threads = share_of_threads(frame, 2.0 * p->rows * p->columns * p->inner);
  cut(p, threads);
  finish(&p->job, frame, threads);
  return NULL;
}

static XLA_FFI_Error* multiply(XLA_FFI_CallFrame* frame, bool transpose_a, bool transpose_b) {
  if (answers_question(frame)) return NULL;
  const XLA_FFI_Buffer* a = argument(frame, 0);
  const XLA_FFI_Buffer* c = result(frame, 0);
  if (a->dims[0] == 0 || a->dims[1] == 0 || c->dims[0] == 0 || c->dims[1] == 0) {
    memset(c->data, 0, c->dims[0] * c->dims[1] * sizeof(float));
    return NULL;
  }
  Product* p = start(frame, transpose_a, transpose_b);
  return p ? compute(p, frame) : fail(frame->api, kNoMemory);
}

static XLA_FFI_Error* multiply_and_activate(XLA_FFI_CallFrame* frame, bool with_slopes) {
  if (answers_question(frame)) return NULL;
  Product* p = start(frame, false, false);
  if (p == NULL) return fail(frame->api, kNoMemory);
  p->finish = activate_part;
  p->bias = argument(frame, 2)->data;
  p->root = *(const float*)argument(frame, 3)->data;
  p->slopes = with_slopes ? result(frame, 1)->data : NULL;
  return compute(p, frame);
}

// The gradient of the bias is empty where there is no bias.
static XLA_FFI_Error* multiply_and_differentiate(XLA_FFI_CallFrame* frame) {
  if (answers_question(frame)) return NULL;
  Product* p = start(frame, false, true);
  if (p == NULL) return fail(frame->api, kNoMemory);
  p->finish = differentiate_part;
  p->slopes = argument(frame, 2)->data;
  if (result(frame, 1)->dims[0] == 0) return compute(p, frame);
  const int count = (p->rows + kRowsOfPart - 1) / kRowsOfPart, columns = p->columns;
  float* parts = p->parts = calloc((size_t)count * columns, sizeof(float));
  if (parts == NULL) {
    free(p);
    return fail(frame->api, kNoMemory);
  }
  XLA_FFI_Error* error = compute(p, frame);
  add_parts(parts, count, columns, columns, result(frame, 1)->data);
  free(parts);
  return error;
}

static XLA_FFI_Error* multiply_heads(XLA_FFI_CallFrame* frame, Form form) {
  if (answers_question(frame)) return NULL;
  const XLA_FFI_Buffer* a = argument(frame, 0);
  const XLA_FFI_Buffer* b = argument(frame, 1);
  const XLA_FFI_Buffer* c = result(frame, 0);
  const XLA_FFI_Buffer* weights = form == kScores ? c : a;
  const XLA_FFI_Buffer* per_key = form == kWeightedBack ? c : b;
  Heads* p = calloc(1, sizeof(Heads));
  if (p == NULL) return fail(frame->api, kNoMemory);
  p->job.compute = compute_head;
  p->form = form;
  p->a = a->data;
  p->b = b->data;
  p->c = c->data;
  p->texts = (int)weights->dims[0];
  p->heads = (int)weights->dims[1];
  p->queries = (int)weights->dims[2];
  p->keys = (int)weights->dims[3];
  p->tokens = (int)per_key->dims[1];
  p->key_heads = (int)per_key->dims[2];
  p->width = (int)per_key->dims[3];
  p->job.count = p->texts * p->key_heads;
  const double pairs = (double)p->texts * p->heads * p->queries * p->keys;
  finish(&p->job, frame, share_of_threads(frame, 2 * pairs * p->width));
  return NULL;
}

static XLA_FFI_Error* multiply_groups(XLA_FFI_CallFrame* frame, GroupedForm form) {
  if (answers_question(frame)) return NULL;
  const XLA_FFI_Buffer* a = argument(frame, 0);
  const XLA_FFI_Buffer* b = argument(frame, 1);
  const XLA_FFI_Buffer* first = argument(frame, 2);
  const XLA_FFI_Buffer* c = result(frame, 0);
  Groups* p = calloc(1, sizeof(Groups));
  if (p == NULL) return fail(frame->api, kNoMemory);
  p->job.compute = compute_group;
  p->form = form;
  p->a = a->data;
  p->b = b->data;
  p->c = c->data;
  p->first = first->data;
  p->a_width = (int)a->dims[1];
  p->columns = (int)c->dims[c->rank - 1];
  const int groups = (int)first->dims[0] - 1;
  const int threads = share_of_threads(frame, 2.0 * a->dims[0] * p->a_width * p->columns);
  cut_evenly(p->columns, threads, kColumnStep, &p->width, &p->parts);
  p->job.count = groups * p->parts;
  if (form != kGroupedMatrices) {
    // Rows after those of the last group are of none.
    const int64_t used = p->first[groups], all = c->dims[0];
    memset(p->c + used * p->columns, 0, (all - used) * p->columns * sizeof(float));
  }
  finish(&p->job, frame, threads);
  return NULL;
}

XLA_FFI_Error* jaxformer_product(XLA_FFI_CallFrame* frame) {
  return multiply(frame, false, false);
}

XLA_FFI_Error* jaxformer_product_bt(XLA_FFI_CallFrame* frame) {
  return multiply(frame, false, true);
}

XLA_FFI_Error* jaxformer_product_at(XLA_FFI_CallFrame* frame) {
  return multiply(frame, true, false);
}

XLA_FFI_Error* jaxformer_product_gelu(XLA_FFI_CallFrame* frame) {
  return multiply_and_activate(frame, false);
}

XLA_FFI_Error* jaxformer_product_gelu_and_slope(XLA_FFI_CallFrame* frame) {
  return multiply_and_activate(frame, true);
}

XLA_FFI_Error* jaxformer_product_bt_gelu_back(XLA_FFI_CallFrame* frame) {
  return multiply_and_differentiate(frame);
}

XLA_FFI_Error* jaxformer_scores(XLA_FFI_CallFrame* frame) { return multiply_heads(frame, kScores); }

XLA_FFI_Error* jaxformer_weighted(XLA_FFI_CallFrame* frame) {
  return multiply_heads(frame, kWeighted);
}

XLA_FFI_Error* jaxformer_weighted_back(XLA_FFI_CallFrame* frame) {
  return multiply_heads(frame, kWeightedBack);
}

XLA_FFI_Error* jaxformer_grouped(XLA_FFI_CallFrame* frame) {
  return multiply_groups(frame, kGrouped);
}

XLA_FFI_Error* jaxformer_grouped_bt(XLA_FFI_CallFrame* frame) {
  return multiply_groups(frame, kGroupedByTransposed);
}

XLA_FFI_Error* jaxformer_grouped_matrices(XLA_FFI_CallFrame* frame) {
  return multiply_groups(frame, kGroupedMatrices);
}
