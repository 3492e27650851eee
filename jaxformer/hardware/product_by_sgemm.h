// Products of matrices by a library's sgemm.

// Fortran's sgemm: C = alpha op(A) op(B) + beta C, of matrices that lie column after column.
typedef void Sgemm(const char* transpose_a, const char* transpose_b, const int* m, const int* n,
                   const int* k, const float* alpha, const float* a, const int* lda,
                   const float* b, const int* ldb, const float* beta, float* c, const int* ldc);
// Sets how many threads the products of the calling thread may use, and returns how many it was.
typedef int SetThreads(int);

static Sgemm* sgemm;
static SetThreads* set_threads;

void jaxformer_set_sgemm(Sgemm* product, SetThreads* threads) {
  sgemm = product;
  set_threads = threads;
}

// Of a result that is cut by columns: a multiple of the numbers in a register.
enum { kColumnStep = 16 };

static inline bool best_cut_by_rows(int rows, int columns, bool transpose_a, int threads) {
  (void)transpose_a, (void)threads;
  return rows >= columns / 2;
}

// c = op(a) op(b), of so many rows and columns; or c += op(a) op(b). The result is finished, if so wanted.
static void multiply_and_finish(Matrix a, bool transpose_a, Matrix b, bool transpose_b, Matrix c,
                                int rows, int columns, int inner, bool adds, Finish* finish,
                                const void* product) {
  const float one = 1, beta = adds ? 1 : 0;
  const int before = set_threads(1);
  // What is C row after row is Cᵀ column after column, and Cᵀ = Bᵀ Aᵀ.
  sgemm(transpose_b ? "T" : "N", transpose_a ? "T" : "N", &columns, &rows, &inner, &one, b.data,
        &b.stride, a.data, &a.stride, &beta, c.data, &c.stride);
  set_threads(before);
  if (finish) finish(product, c, rows, columns);
}
