// Matrices turned in the registers, a square at a time.

#include "vectors.h"

// Transposes a square, whose rows are so far apart, and those of the result as far as its width. In each
// round pairs of rows exchange halves, then quarters, and so on.
enum { kSquare = kLanes };
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLES
#endif
#endif
#ifdef HAS_SHUFFLES
#define FIRST(lane, apart) ((lane) & (apart) ? kLanes + (lane) - (apart) : (lane))
#define SECOND(lane, apart) ((lane) & (apart) ? kLanes + (lane) : (lane) + (apart))
#define EIGHT(of, n, apart)                                                                      \
  of(n, apart), of(n + 1, apart), of(n + 2, apart), of(n + 3, apart), of(n + 4, apart),          \
      of(n + 5, apart), of(n + 6, apart), of(n + 7, apart)
#ifdef __AVX512F__
#define ALL(of, apart) EIGHT(of, 0, apart), EIGHT(of, 8, apart)
#else
#define ALL(of, apart) EIGHT(of, 0, apart)
#endif
#define EXCHANGE(rows, apart)                                                                    \
  UNROLL for (int i = 0; i < kSquare; ++i) if (!(i & (apart))) {                                 \
    const Vector first = rows[i], second = rows[i + (apart)];                                    \
    rows[i] = __builtin_shufflevector(first, second, ALL(FIRST, apart));                         \
    rows[i + (apart)] = __builtin_shufflevector(first, second, ALL(SECOND, apart));              \
  }

static inline void turn_square(const float* from, int64_t stride, float* to, int width) {
  Vector rows[kSquare];
  UNROLL for (int i = 0; i < kSquare; ++i) rows[i] = load(from + i * stride);
#ifdef __AVX512F__
  EXCHANGE(rows, 8)
#endif
  EXCHANGE(rows, 4)
  EXCHANGE(rows, 2)
  EXCHANGE(rows, 1)
  UNROLL for (int i = 0; i < kSquare; ++i) store(to + i * width, rows[i]);
}
#else
static inline void turn_square(const float* from, int64_t stride, float* to, int width) {
  for (int i = 0; i < kSquare; ++i)
    for (int t = 0; t < kSquare; ++t) to[t * width + i] = from[i * stride + t];
}
#endif
