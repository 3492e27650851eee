// Matrix products for XLA on CPUs, computed by the library of products that torch brings along.
//
// XLA calls one of three functions, for A B, A Bᵀ or Aᵀ B, with two float32 matrices, each row after
// row. The result is cut into blocks, one for each thread of XLA's own pool, and each block is one
// call of sgemm on one thread.

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "xla/ffi/api/c_api.h"

// Fortran's sgemm: C = alpha op(A) op(B) + beta C, of matrices that lie column after column.
typedef void Sgemm(const char* transpose_a, const char* transpose_b, const int* m, const int* n,
                   const int* k, const float* alpha, const float* a, const int* lda,
                   const float* b, const int* ldb, const float* beta, float* c, const int* ldc);
// Sets how many threads the products of the calling thread may use, and returns how many it was.
typedef int SetThreads(int);

static Sgemm* sgemm;
static SetThreads* set_threads;

void jaxformer_set_functions(Sgemm* product, SetThreads* threads) {
  sgemm = product;
  set_threads = threads;
}

// To hand a product of fewer operations to another thread costs more than it saves.
static const double kFewestOperations = 1e6;
// A multiple of the numbers in a register.
static const int kBlockStep = 16;

// A product, and how far it is. Threads take blocks one after the other. The thread that waits for
// them takes blocks too, so that it never waits for one that nobody computes.
typedef struct {
  const float *a, *b;
  float* c;
  int rows, columns, inner, a_stride, b_stride;
  bool transpose_a, transpose_b;
  // Rows of the result, or else columns, are cut into so many blocks of this width.
  bool cuts_rows;
  int width, count;
  atomic_int next, done, owners;
} Product;

static void compute_block(const Product* p, int block) {
  const int64_t first = (int64_t)block * p->width;
  const int64_t rest = (p->cuts_rows ? p->rows : p->columns) - first;
  const int width = rest < p->width ? (int)rest : p->width;
  const int rows = p->cuts_rows ? width : p->rows;
  const int columns = p->cuts_rows ? p->columns : width;
  const float *a = p->a, *b = p->b;
  float* c = p->c;
  if (p->cuts_rows) {
    a += p->transpose_a ? first : first * p->a_stride;
    c += first * p->columns;
  } else {
    b += p->transpose_b ? first * p->b_stride : first;
    c += first;
  }
  const float one = 1, zero = 0;
  const int before = set_threads(1);
  // What is C row after row is Cᵀ column after column, and Cᵀ = Bᵀ Aᵀ.
  sgemm(p->transpose_b ? "T" : "N", p->transpose_a ? "T" : "N", &columns, &rows, &p->inner, &one, b,
        &p->b_stride, a, &p->a_stride, &zero, c, &p->columns);
  set_threads(before);
}

static void compute_blocks(Product* p) {
  for (int block = atomic_fetch_add(&p->next, 1); block < p->count;
       block = atomic_fetch_add(&p->next, 1)) {
    compute_block(p, block);
    atomic_fetch_add(&p->done, 1);
  }
}

// A thread of the pool may come only after the last block was taken: the last one to leave frees.
static void leave(Product* p) {
  if (atomic_fetch_sub(&p->owners, 1) == 1) free(p);
}

static void run_task(void* product) {
  compute_blocks(product);
  leave(product);
}

static bool succeeded(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  if (error == NULL) return true;
  XLA_FFI_Error_Destroy_Args arguments = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  api->XLA_FFI_Error_Destroy(&arguments);
  return false;
}

static int count_threads(const XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args arguments = {
      XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx, &threads};
  // Without a pool the calling thread computes alone.
  if (!succeeded(frame->api, frame->api->XLA_FFI_ThreadPool_NumThreads(&arguments))) return 1;
  return threads < 1 ? 1 : (int)threads;
}

static void hand_to_pool(const XLA_FFI_CallFrame* frame, Product* p) {
  for (int i = 1; i < p->count; ++i) {
    XLA_FFI_ThreadPool_Schedule_Args arguments = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE,
                                                  NULL, frame->ctx, run_task, p};
    atomic_fetch_add(&p->owners, 1);
    if (!succeeded(frame->api, frame->api->XLA_FFI_ThreadPool_Schedule(&arguments))) leave(p);
  }
}

static void cut(Product* p, int threads) {
  const bool is_short = 2.0 * p->rows * p->columns * p->inner < kFewestOperations;
  p->cuts_rows = p->rows >= p->columns / 2;
  const int size = p->cuts_rows ? p->rows : p->columns;
  const int parts = is_short ? 1 : threads;
  const int share = size / parts + (size % parts != 0);
  p->width = (share + kBlockStep - 1) / kBlockStep * kBlockStep;
  p->count = size / p->width + (size % p->width != 0);
}

// XLA asks first what version of the interface this was built for.
static bool answers_question(const XLA_FFI_CallFrame* frame) {
  XLA_FFI_Extension_Base* extension = frame->extension_start;
  if (extension == NULL || extension->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata* about = ((XLA_FFI_Metadata_Extension*)extension)->metadata;
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

static XLA_FFI_Error* multiply(XLA_FFI_CallFrame* frame, bool transpose_a, bool transpose_b) {
  if (answers_question(frame)) return NULL;
  const XLA_FFI_Buffer* a = frame->args.args[0];
  const XLA_FFI_Buffer* b = frame->args.args[1];
  const XLA_FFI_Buffer* c = frame->rets.rets[0];
  Product* p = malloc(sizeof(Product));
  if (p == NULL) return fail(frame->api, "no memory for a matrix product");
  p->a = a->data;
  p->b = b->data;
  p->c = c->data;
  p->rows = (int)c->dims[0];
  p->columns = (int)c->dims[1];
  p->inner = (int)a->dims[transpose_a ? 0 : 1];
  p->a_stride = (int)a->dims[1];
  p->b_stride = (int)b->dims[1];
  p->transpose_a = transpose_a;
  p->transpose_b = transpose_b;
  cut(p, count_threads(frame));
  atomic_init(&p->next, 0);
  atomic_init(&p->done, 0);
  atomic_init(&p->owners, 1);
  hand_to_pool(frame, p);
  compute_blocks(p);
  while (atomic_load(&p->done) < p->count) sched_yield();
  leave(p);
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
