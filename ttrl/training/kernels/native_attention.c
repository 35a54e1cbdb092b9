/* Attention of packed trees on CPUs with AVX-512, in fp32: see native_attention.py for what and why.

One tile of a matrix product, C[R x 32] += A[R x T] B[T x 32], does all products. Scores are in units of log 2.
Rows of q, out, grad and dq are H*E floats apart, those of k, v, dk and dv K*E. A part is (q0, q1, k0, k1): queries [q0, q1) see keys
[k0, k1), or, where q0 == k0, those up to their own position. E is a multiple of 32. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef __m512 v16;

enum { QUERIES = 96, KEYS = 288, LARGEST = 256 /* E */, PANEL = 32 };

static inline v16 load(const float *x) { return _mm512_loadu_ps(x); }
static inline void store(float *x, v16 y) { _mm512_storeu_ps(x, y); }
static inline v16 all(float x) { return _mm512_set1_ps(x); }
static inline __mmask16 first(long n) { return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1); }

/* 2^x: 2^n times a polynomial (Cephes' exp2f) of the rest in [-1/2, 1/2]; 0 far below; NaN stays NaN. */
static inline v16 power(v16 x) {
    x = _mm512_max_ps(all(-200.0f), x); /* of a NaN and a number it takes the second */
    v16 n = _mm512_roundscale_ps(x, 0), f = x - n;
    v16 p = all(1.535336188319500e-4f);
    p = p * f + all(1.339887440266574e-3f);
    p = p * f + all(9.618437357674640e-3f);
    p = p * f + all(5.550332471162809e-2f);
    p = p * f + all(2.402264791363012e-1f);
    p = p * f + all(6.931472028550421e-1f);
    p = p * f + all(1.0f);
    return _mm512_scalef_ps(p, n);
}

static inline __attribute__((always_inline)) void rows(const int R, int T, const float *A, long ai, long at, const float *B, long bt,
                                                       float *C, long ci, int add) {
    v16 c[12][2];
#pragma GCC unroll 12
    for (int i = 0; i < R; i++)
        c[i][0] = c[i][1] = _mm512_setzero_ps();
    for (int t = 0; t < T; t++) {
        v16 b0 = load(B), b1 = load(B + 16);
#pragma GCC unroll 12
        for (int i = 0; i < R; i++) {
            v16 a = all(A[i * ai]);
            c[i][0] += a * b0;
            c[i][1] += a * b1;
        }
        A += at;
        B += bt;
    }
#pragma GCC unroll 12
    for (int i = 0; i < R; i++) {
        float *to = C + i * ci;
        if (add) {
            c[i][0] += load(to);
            c[i][1] += load(to + 16);
        }
        store(to, c[i][0]);
        store(to + 16, c[i][1]);
    }
}

/* R rows, 4, 8 or 12. */
static void tile(int R, int T, const float *A, long ai, long at, const float *B, long bt, float *C, long ci, int add) {
    if (R == 12)
        rows(12, T, A, ai, at, B, bt, C, ci, add);
    else if (R == 8)
        rows(8, T, A, ai, at, B, bt, C, ci, add);
    else
        rows(4, T, A, ai, at, B, bt, C, ci, add);
}

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int up(int n, int to) { return (n + to - 1) / to * to; }

/* n rows of E floats, `stride` apart, into rows side by side, times a factor; zeros up to a multiple of 4 rows. */
static void gather(int n, int E, const float *x, long stride, float factor, float *to) {
    for (int i = 0; i < n; i++, x += stride, to += E)
        for (int e = 0; e < E; e += 16)
            store(to + e, load(x + e) * all(factor));
    memset(to, 0, sizeof(float) * (size_t)((up(n, 4) - n) * E));
}

/* Rows become columns: in step s blocks of s x s change places within blocks of 2s x 2s. */
static inline void transpose(v16 x[16]) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
    for (int s = 1; s < 16; s *= 2) {
        const __mmask16 upper = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(s));
        const __m512i lows = _mm512_mask_add_epi32(lane, upper, lane, _mm512_set1_epi32(16 - s));
        const __m512i highs = _mm512_add_epi32(lows, _mm512_set1_epi32(s)); /* lanes from 16 are those of the other row */
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (!(i & s)) {
                v16 low = _mm512_permutex2var_ps(x[i], lows, x[i + s]);
                x[i + s] = _mm512_permutex2var_ps(x[i], highs, x[i + s]);
                x[i] = low;
            }
    }
}

/* n keys into panels [E][32], with zeros up to a multiple of 32. */
static void panels(int n, int E, const float *x, long stride, float *to) {
    for (int i = 0; i < up(n, PANEL); i += 16)
        for (int e = 0; e < E; e += 16) {
            v16 block[16];
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++)
                block[j] = i + j < n ? load(x + (i + j) * stride + e) : _mm512_setzero_ps();
            transpose(block);
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++)
                store(to + i / PANEL * PANEL * E + (e + j) * PANEL + i % PANEL, block[j]);
        }
}

/* Products [m x keys] of gathered rows with panels; `seen` keys of the first row, one more of each next one. */
static void scores(int m, int keys, int seen, int E, const float *x, const float *panel, float *to) {
    for (int i = 0; i < m; i += 12) {
        int R = least(12, up(m - i, 4)), end = least(keys, seen + i + R - 1);
        for (int j = 0; j < end; j += PANEL)
            tile(R, E, x + i * E, E, 1, panel + j * E, PANEL, to + i * KEYS + j, KEYS, 0);
    }
}

typedef struct {
    float q[QUERIES * LARGEST], g[QUERIES * LARGEST], p[QUERIES * KEYS], d[QUERIES * KEYS];
    float k[KEYS * LARGEST], v[KEYS * LARGEST], dk[KEYS * LARGEST], dv[KEYS * LARGEST];
} Space;

long workspace(void) { return sizeof(Space); }

/* One head: q and out begin at it, k and v at its key/value head. out holds zeros and lse -inf at first. */
static void forward_head(const float *q, const float *k, const float *v, float *out, float *lse, const int64_t *parts, long n, long H,
                         long K, int E, float scale, Space *w) {
    const long sq = H * E, sk = K * E;
    for (const int64_t *part = parts; part < parts + 4 * n; part += 4) {
        const int64_t q1 = part[1], k1 = part[3];
        const int causal = part[0] == part[2];
        for (int64_t k0 = part[2]; k0 < k1; k0 += KEYS) {
            const int keys = k1 - k0 < KEYS ? (int)(k1 - k0) : KEYS;
            panels(keys, E, k + k0 * sk, sk, w->k);
            for (int64_t q0 = causal ? k0 : part[0]; q0 < q1; q0 += QUERIES) {
                const int m = q1 - q0 < QUERIES ? (int)(q1 - q0) : QUERIES, seen = causal ? least(keys, (int)(q0 - k0) + 1) : keys;
                gather(m, E, q + q0 * sq, sq, scale * 1.44269504f, w->q);
                scores(m, keys, seen, E, w->q, w->k, w->p);
                float weight[QUERIES];
                for (int i = 0; i < m; i++) {
                    float *row = w->p + i * KEYS, *end = row + least(keys, seen + i);
                    const int width = up(least(keys, seen + least(up(i + 1, 12), m) - 1), 16);
                    v16 most = all(-INFINITY), sum = _mm512_setzero_ps();
                    for (float *x = row; x < end; x += 16) {
                        v16 s = _mm512_mask_loadu_ps(all(-INFINITY), first(end - x), x);
                        store(x, s);
                        most = _mm512_max_ps(most, s);
                    }
                    const float top = _mm512_reduce_max_ps(most);
                    for (float *x = row; x < row + width; x += 16) {
                        v16 s = x < end ? power(load(x) - all(top)) : _mm512_setzero_ps();
                        store(x, s);
                        sum += s;
                    }
                    float own = top + log2f(_mm512_reduce_add_ps(sum)), *before = lse + (q0 + i) * H;
                    float highest = *before > own ? *before : own;
                    float both = highest + log2f(exp2f(*before - highest) + exp2f(own - highest));
                    float keep = exp2f(*before - both);
                    weight[i] = exp2f(top - both);
                    *before = both;
                    float *o = out + (q0 + i) * sq;
                    for (int e = 0; e < E; e += 16)
                        store(o + e, load(o + e) * all(keep));
                }
                for (int i = 0; i < m; i += 12) {
                    const int R = least(12, up(m - i, 4)), T = least(keys, seen + least(i + 12, m) - 1);
                    for (int e = 0; e < E; e += 32)
                        tile(R, T, w->p + i * KEYS, KEYS, 1, v + k0 * sk + e, sk, w->g + i * E + e, E, 0);
                }
                for (int i = 0; i < m; i++)
                    for (int e = 0; e < E; e += 16) {
                        float *o = out + (q0 + i) * sq + e;
                        store(o, load(o) + load(w->g + i * E + e) * all(weight[i]));
                    }
            }
        }
    }
}

/* One head. delta [S, H] is the sum of grad * out over a head. Adds to dq (without its factor `scale`), dk and dv. */
static void backward_head(const float *grad, const float *q, const float *k, const float *v, const float *lse, const float *delta,
                          float *dq, float *dk, float *dv, const int64_t *parts, long n, long H, long K, int E, float scale, Space *w) {
    const long sq = H * E, sk = K * E;
    for (const int64_t *part = parts; part < parts + 4 * n; part += 4) {
        const int64_t q1 = part[1], k1 = part[3];
        const int causal = part[0] == part[2];
        for (int64_t k0 = part[2]; k0 < k1; k0 += KEYS) {
            const int keys = k1 - k0 < KEYS ? (int)(k1 - k0) : KEYS;
            panels(keys, E, k + k0 * sk, sk, w->k);
            panels(keys, E, v + k0 * sk, sk, w->v);
            memset(w->dk, 0, sizeof(float) * (size_t)(up(keys, 4) * E));
            memset(w->dv, 0, sizeof(float) * (size_t)(up(keys, 4) * E));
            for (int64_t q0 = causal ? k0 : part[0]; q0 < q1; q0 += QUERIES) {
                const int m = q1 - q0 < QUERIES ? (int)(q1 - q0) : QUERIES, seen = causal ? least(keys, (int)(q0 - k0) + 1) : keys;
                gather(m, E, q + q0 * sq, sq, scale * 1.44269504f, w->q);
                gather(m, E, grad + q0 * sq, sq, 1.0f, w->g);
                scores(m, keys, seen, E, w->q, w->k, w->p);
                scores(m, keys, seen, E, w->g, w->v, w->d);
                const int wide = least(KEYS, up(least(keys, seen + m - 1) + 12, 16));
                for (int i = 0; i < m; i++) {
                    float *p = w->p + i * KEYS, *d = w->d + i * KEYS, l = lse[(q0 + i) * H], own = delta[(q0 + i) * H];
                    const int end = least(keys, seen + i);
                    int j = 0;
                    for (; j < end; j += 16) {
                        v16 s = _mm512_maskz_mov_ps(first(end - j), power(load(p + j) - all(l)));
                        store(p + j, s);
                        store(d + j, (load(d + j) - all(own)) * s);
                    }
                    for (; j < wide; j += 16) {
                        store(p + j, _mm512_setzero_ps());
                        store(d + j, _mm512_setzero_ps());
                    }
                }
                for (int j = 0; j < least(keys, seen + m - 1); j += 12) {
                    const int R = least(12, up(keys - j, 4)), t = j < seen ? 0 : j - seen + 1; /* from the first row that sees one */
                    for (int e = 0; e < E; e += 32) {
                        tile(R, m - t, w->p + t * KEYS + j, 1, KEYS, w->g + t * E + e, E, w->dv + j * E + e, E, 1);
                        tile(R, m - t, w->d + t * KEYS + j, 1, KEYS, w->q + t * E + e, E, w->dk + j * E + e, E, 1);
                    }
                }
                for (int i = 0; i < m; i += 12) {
                    const int R = least(12, up(m - i, 4)), T = least(keys, seen + least(i + 12, m) - 1);
                    for (int e = 0; e < E; e += 32)
                        tile(R, T, w->d + i * KEYS, KEYS, 1, k + k0 * sk + e, sk, w->q + i * E + e, E, 0);
                }
                for (int i = 0; i < m; i++)
                    for (int e = 0; e < E; e += 16) {
                        float *to = dq + (q0 + i) * sq + e;
                        store(to, load(to) + load(w->q + i * E + e));
                    }
            }
            for (int i = 0; i < keys; i++)
                for (int e = 0; e < E; e += 16) {
                    float *to = dk + (k0 + i) * sk + e, *other = dv + (k0 + i) * sk + e;
                    store(to, load(to) + load(w->dk + i * E + e) * all(0.69314718f));
                    store(other, load(other) + load(w->dv + i * E + e));
                }
        }
    }
}

/* All query heads of one key/value head. */
void forward(const float *q, const float *k, const float *v, float *out, float *lse, const int64_t *parts, long n, long H, long K, long E,
             float scale, long head, Space *w) {
    for (long h = head * (H / K); h < (head + 1) * (H / K); h++)
        forward_head(q + h * E, k + head * E, v + head * E, out + h * E, lse + h, parts, n, H, K, (int)E, scale, w);
}

void backward(const float *grad, const float *q, const float *k, const float *v, const float *lse, const float *delta, float *dq, float *dk,
              float *dv, const int64_t *parts, long n, long H, long K, long E, float scale, long head, Space *w) {
    for (long h = head * (H / K); h < (head + 1) * (H / K); h++)
        backward_head(grad + h * E, q + h * E, k + head * E, v + head * E, lse + h, delta + h, dq + h * E, dk + head * E, dv + head * E,
                      parts, n, H, K, (int)E, scale, w);
}
